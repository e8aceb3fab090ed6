"""Break the code on purpose, one line at a time, and see a test fail each time: ``python tests/mutants.py``.

`mutants.txt` holds the faults. The tree is copied into a temporary folder, and only the copy is changed. First all
tests that are named there run once on the unchanged copy; then each fault is put in, its tests run, and it is taken
out again. The exit code is 1 if a fault survives, or cannot be put in, or its tests could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".txt")
PACKAGE = "lightning_sonar"
# Imported once, before the runs part from this process: for most selections that takes longer than the tests.
PRELOADED = (
    *("torch", "torch.distributed.tensor", "lightning.pytorch", "torchmetrics", "hydra", "datasets", "matplotlib"),
    *("transformers.models.olmoe.modeling_olmoe", "transformers.models.granitemoe.modeling_granitemoe"),
)
LIMIT = 180.0
"""Seconds that the tests of one fault may take; a fault that makes them hang is found, too."""

KINDS = ("killed", "survived", "not applied", "not run")
_COPIED_NOT = (".git", "__pycache__", ".*_cache", ".venv*", "outputs", "multirun", "lightning_logs", "*.egg-info")
_ALIEN = 99


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: says what is wrong.
        file: which file it is in, from the root.
        old: the lines that it takes the place of; they follow one another, and indentation does not count.
        new: what stands there instead, indented relative to the first old line.
        tests: ``file::function``, in ``tests``; at least one must fail.
    """

    name: str
    file: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    tests: tuple[str, ...]

    def places(self, text: str) -> list[int]:
        """The lines, counted from 0, at which the old lines begin."""
        lines, wanted = [line.strip() for line in text.splitlines()], [line.strip() for line in self.old]
        return [at for at in range(len(lines)) if lines[at : at + len(wanted)] == wanted]

    def applied(self, text: str) -> str:
        """The file with the fault in it.

        Raises:
            ValueError: if the old lines are not there exactly once.
        """
        places = self.places(text)
        if len(places) != 1:
            raise ValueError(f"{self.name}: its old lines stand {len(places)} times in {self.file}; expected once.")
        lines = text.splitlines()
        indent = lines[places[0]][: len(lines[places[0]]) - len(lines[places[0]].lstrip())]
        lines[places[0] : places[0] + len(self.old)] = [indent + line for line in self.new]
        return "\n".join(lines) + "\n"


def read_mutants(path: Path = TABLE) -> list[Mutant]:
    """The faults in a file. Each is a line ``@ name file test...``, then old lines after ``-`` and new after ``+``.

    Raises:
        ValueError: for a line of another kind.
    """
    mutants: list[Mutant] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        kind, body = line[:1], line[2:]
        if kind == "@":
            name, file, *tests = body.split()
            mutants.append(Mutant(name, file, (), (), tuple(tests)))
        elif kind in "-+" and mutants:
            last = mutants.pop()
            sides = {"old": (*last.old, body)} if kind == "-" else {"new": (*last.new, body)}
            mutants.append(replace(last, **sides))
        else:
            raise ValueError(f"{path.name}, line {number}: expected @, -, + or #, found {line!r}.")
    return mutants


@dataclass(frozen=True)
class Outcome:
    """How one fault fared: ``killed``, ``survived``, ``not applied`` or ``not run``."""

    name: str
    file: str
    outcome: str
    by: str
    seconds: float


class Workshop:
    """A copy of the tree in which tests run, each time in a process of its own that parts from this one."""

    def __init__(self, root: Path, folder: Path, package: str) -> None:
        self.tree, self.folder, self.package, self.source = folder / "tree", folder, package, root
        self.failing: set[str] = set()
        shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(*_COPIED_NOT))

    def run(self, tests: Sequence[str], whole: bool = False) -> tuple[int, str]:
        """Run tests of the copy; returns pytest's exit code (-1: they took too long) and what it printed.

        Args:
            tests: as in `Mutant`.
            whole: whether the tree is as it was: then no failure ends the run, and it may take long.
        """
        log = self.folder / "log.txt"
        child = os.fork()
        if not child:
            code = _ALIEN
            try:
                code = self._run_here(tests, log, whole)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        deadline = time.monotonic() + (20 * LIMIT if whole else LIMIT)
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status), log.read_text(encoding="utf-8", errors="replace")
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return -1, log.read_text(encoding="utf-8", errors="replace")

    def _run_here(self, tests: Sequence[str], log: Path, whole: bool) -> int:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(self.tree)
        # Neither this script's folder nor the tree that the package may be installed from.
        gone = {str(self.source), str(self.source / "tests")}
        sys.path[:] = [str(self.tree), *(path for path in sys.path if path not in gone)]
        # The size and time of a changed file may be those of another fault's bytecode.
        sys.dont_write_bytecode = not whole
        changed = {"PYTHONPATH": str(self.tree), "XDG_CACHE_HOME": str(self.folder / "cache")}
        os.environ.update(changed if whole else {**changed, "PYTHONDONTWRITEBYTECODE": "1"})
        found = importlib.util.find_spec(self.package)
        if found is None or not str(found.origin).startswith(str(self.tree)):
            print(f"{self.package} would come from {found and found.origin}, not from the copy in {self.tree}.")
            return _ALIEN
        import pytest

        named = [f"tests/{test}" for test in tests]
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={self.tree}", f"--basetemp={self.folder / 'base'}"]
        # What was imported before pytest began has asserts that pytest does not explain; nobody reads them.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main([*options, *([] if whole else ["-x"]), *named]))
        loaded = sys.modules.get(self.package)
        if loaded is not None and not str(loaded.__file__).startswith(str(self.tree)):
            print(f"{self.package} came from {loaded.__file__}, not from the copy in {self.tree}.")
            return _ALIEN
        return code

    def judge(self, mutant: Mutant) -> Outcome:
        """Put one fault in, run its tests, take it out."""
        path = self.tree / mutant.file
        whole = path.read_text(encoding="utf-8")
        started = time.monotonic()

        def outcome(kind: str, by: str) -> Outcome:
            return Outcome(mutant.name, mutant.file, kind, by, round(time.monotonic() - started, 1))

        # A file that cannot be imported is named without a function.
        failing = ((test, name) for test in self.failing for name in mutant.tests)
        if any(test.startswith(name) or name.startswith(test) for test, name in failing):
            return outcome("not run", "its tests fail on the unchanged tree")
        try:
            broken = mutant.applied(whole)
        except ValueError as error:
            return outcome("not applied", str(error))
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            old.unlink()
        try:
            path.write_text(broken, encoding="utf-8")
            code, text = self.run(mutant.tests)
        finally:
            path.write_text(whole, encoding="utf-8")
        if code == 0:
            return outcome("survived", " ".join(mutant.tests))
        if code == -1:
            return outcome("killed", f"no test ended within {LIMIT:.0f} s")
        failed = _failed(text)
        if code == 1 and failed:
            return outcome("killed", failed[0])
        return outcome("not run", f"pytest ended with {code}: {' '.join(text.split()[-60:])}")


def _failed(text: str) -> list[str]:
    """The tests that failed, by what pytest printed."""
    return re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", text, re.MULTILINE)


def prepare(root: Path, folder: Path, preloaded: Iterable[str], mutants: Sequence[Mutant], package: str) -> Workshop:
    """Copy the tree and run all tests on it as it is.

    Raises:
        SystemExit: if they cannot be run.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ("pytest", *preloaded):
        importlib.import_module(name)
    workshop = Workshop(root, folder, package)
    code, text = workshop.run(sorted({test for mutant in mutants for test in mutant.tests}), whole=True)
    workshop.failing.update(_failed(text))
    if code and not workshop.failing:
        raise SystemExit(f"The tests do not run on the tree as it is (pytest ended with {code}):\n{text[-6000:]}")
    return workshop


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", help="only faults with this in their name; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the faults and their tests; run nothing")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the outcome as JSON")
    parser.add_argument("--table", type=Path, default=TABLE, help="the faults")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree")
    parser.add_argument("--package", default=PACKAGE, help="the package whose copy must be what tests import")
    parser.add_argument("--preload", default=",".join(PRELOADED), help="modules to import once for all runs")
    options = parser.parse_args(arguments)
    mutants = [m for m in read_mutants(options.table) if not options.only or any(o in m.name for o in options.only)]
    if not mutants:
        parser.error(f"no fault has {options.only} in its name; --list names them all")
    if options.list:
        print("\n".join(f"{mutant.name:60} {mutant.file:45} {' '.join(mutant.tests)}" for mutant in mutants))
        return 0
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        preload = [name for name in options.preload.split(",") if name]
        workshop = prepare(options.root.resolve(), Path(folder).resolve(), preload, mutants, options.package)
        print(f"The tests ran on the unchanged tree, after {time.monotonic() - started:.0f} s.", flush=True)
        for test in sorted(workshop.failing):
            print(f"FAILS on the unchanged tree: {test}")
        for mutant in mutants:
            outcomes.append(workshop.judge(mutant))
            last = outcomes[-1]
            print(f"{last.outcome:11} {last.seconds:6.1f} s  {last.name:60} {last.by}", flush=True)
    counts = {kind: sum(each.outcome == kind for each in outcomes) for kind in KINDS}
    seconds = round(time.monotonic() - started)
    print(f"{len(outcomes)} faults: {', '.join(f'{n} {kind}' for kind, n in counts.items() if n)}; {seconds} s.")
    if options.write is not None:
        found = {"faults": len(outcomes), **counts, "seconds": seconds, "outcomes": [asdict(o) for o in outcomes]}
        options.write.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(counts["killed"] != len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
