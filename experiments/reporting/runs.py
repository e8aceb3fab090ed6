"""Run folders as they lie on disk: those with figures, and those without."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from experiments.status import read_json, read_status, why

_NEEDED = ("model", "size", "backend", "mode")
_TABLES = ("memory_split", "step_time_ms", "versions")
_NUMBERS = ("params_total", "batch_size", "seq_len", "steps", "ranks")
# What else tells settings and runs apart.
_VALUES = ("expert_clip", "loss", "optimizer", "data", "precision", "device", "device_name", "seed", "gives_up")
# What these set stands in the result and in the report, or decides where things go.
_SHOWN_ELSEWHERE = re.compile(
    r"\+{0,2}(mode|mode\.(expert_clip|accumulation|expert_state_device)|model|model\.size|backend|seed|trainer\.precision"
    r"|trainer\.max_steps|data\.batch_size|data\.seq_len|hydra\..*|hydra/.*|ckpt_path|export|objective)="
)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: where it lies.
        result: its ``result.json``: bytes, milliseconds, nats.
        settings: what its command line changed, besides what is shown elsewhere.
    """

    folder: Path
    result: dict[str, Any]
    settings: tuple[str, ...]

    def number(self, *keys: str) -> float | None:
        """A figure of ``result.json``, such as ``number("step_time_ms", "median")``; None if it was not measured."""
        value: Any = self.result
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if is_number(value) else None

    @cached_property
    def memory(self) -> dict[str, Any] | None:
        """``memory.json``, where the run was profiled."""
        found = read_json(self.folder / "memory.json")
        return found if found and _is_timeline(found.get("timeline")) else None

    @cached_property
    def losses(self) -> tuple[str, list[int], list[float]]:
        """What the places count (``step`` or ``batch``), the places and the training losses there."""
        for name, place in (("losses.csv", "batch"), ("metrics.csv", "step")):
            places, losses = _columns(self.folder / name, place, "train_loss")
            if losses:
                # Lightning counts steps from 0.
                return place, [where + (place == "step") for where in places], losses
        return "step", [], []


@dataclass(frozen=True)
class Failure:
    """A run folder without figures.

    Attributes:
        folder: where it lies.
        settings: what its command line set.
        exit_code: as its sweep put it on record; None if nobody did.
        reason: one line.
    """

    folder: Path
    settings: str
    exit_code: int | None
    reason: str


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[Failure]]:
    """All runs at or below the folders: the finished ones, and those that failed or did not finish.

    Raises:
        FileNotFoundError: if one of ``folders`` is not a folder.
    """
    runs: list[Run] = []
    failures: list[Failure] = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder. Name run folders or folders of runs.")
        found = {path.parent.parent for path in folder.rglob(".hydra/config.yaml")}
        found |= {path.parent for path in folder.rglob("result.json") if _is_of_a_run(path)}
        for run in sorted(found, key=_natural):
            if run.resolve() in seen:
                continue
            seen.add(run.resolve())
            _read(run, runs, failures)
    return runs, failures


def _is_of_a_run(path: Path) -> bool:
    """Whether a ``result.json`` is not one of the other programs, which leave files of that name, too."""
    result = read_json(path)
    return result is None or any(key in result for key in _NEEDED)


def _read(folder: Path, runs: list[Run], failures: list[Failure]) -> None:
    result = read_json(folder / "result.json")
    overrides = _overrides(folder)
    status = read_status(folder)
    code = status.get("exit_code") if isinstance(status.get("exit_code"), int) else None
    missing = [key for key in _NEEDED if result is not None and not isinstance(result.get(key), str)]
    odd = [] if result is None else _odd(result)
    if result is not None and not missing and not odd:
        mine = result.get("overrides")
        own = [str(o) for o in mine] if isinstance(mine, list) else overrides
        shown = tuple(printable(o) for o in own if not _SHOWN_ELSEWHERE.match(o))
        runs.append(Run(folder, _printable(result), shown))
        if not code:
            return
    if missing:
        reason = f"its result.json has no {', '.join(missing)}"
    elif odd:
        reason = f"its result.json has another kind of {', '.join(odd)} than a run writes"
    elif result is None and (folder / "result.json").exists():
        reason = "its result.json cannot be read"
    else:
        reason = str(status.get("error") or why(folder, code))
    shown = " ".join(o for o in overrides if not o.startswith(("hydra.", "hydra/")))
    failures.append(Failure(folder, printable(shown), code, printable(reason)))


def _is_timeline(value: Any) -> bool:
    """Whether a figure can be drawn of it."""
    if not isinstance(value, dict):
        return False
    times, live, phases, peak = (value.get(key) for key in ("time_ms", "live_bytes", "phases", "peak_index"))
    if not (_numbers(times) and _numbers(live) and len(times) == len(live) and isinstance(phases, list) and phases):
        return False
    whole = all(
        isinstance(phase, dict)
        and isinstance(phase.get("phase"), str)
        and _numbers([phase.get("start_ms"), phase.get("end_ms")])
        for phase in phases
    )
    return whole and isinstance(peak, int) and 0 <= peak < len(live)


def _numbers(values: Any) -> TypeGuard[list[float]]:
    """Whether it is a list of finite numbers that is not empty."""
    return bool(values) and isinstance(values, list) and all(is_number(value) for value in values)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number that a figure can show."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) < 1e300


def _odd(result: dict[str, Any]) -> list[str]:
    """Keys whose values could not be laid side by side with other runs'."""
    kinds = {**dict.fromkeys(_TABLES, dict), **dict.fromkeys(_NUMBERS, (int, float))}
    kinds |= dict.fromkeys(_VALUES, (str, int, float))
    return [key for key, kind in kinds.items() if not isinstance(result.get(key), (kind, type(None)))]


def printable(text: str) -> str:
    """Text in which control characters, marks of direction and half characters are shown by their numbers."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _overrides(folder: Path) -> list[str]:
    path = folder / ".hydra" / "overrides.yaml"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [line.removeprefix("- ").strip("'") for line in lines if line.startswith("- ")]


def _columns(path: Path, place: str, value: str) -> tuple[list[int], list[float]]:
    places: list[int] = []
    values: list[float] = []
    try:
        text = path.read_text(encoding="utf-8")
        # A line without its end was being written when something ended the process: its last number may be cut.
        for row in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])):
            try:
                where, number = int(row[place]), float(row[value])
            except (KeyError, TypeError, ValueError):
                continue
            if math.isfinite(number):
                places.append(where)
                values.append(number)
    except (OSError, UnicodeDecodeError, csv.Error):
        return [], []
    return places, values


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.parts]
