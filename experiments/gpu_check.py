"""Show on one GPU what no other machine can show: the kernels, the paper's table, and that both agree with the plan.

python experiments/gpu_check.py
python experiments/gpu_check.py --parts 1,3 --minutes 4 --json check.json

Parts: 1 the fused AdamW; 2 one layer of experts under each backend; 3 the paper's table at full size, with random
weights; 4 sonar against standard_no_expert_clip to the bit; 5 predicted against measured peaks; 6 states and sums of
gradients in host memory: peak, time, and that no bit changes. Each job is a process of its own with a time limit, so
one that crashes or runs out of memory or time costs only itself. What matters most comes first; the file is written
after every finding. Needs torch, triton, transformers and lightning, and no network.
Without a GPU every part runs at toy size, on the CPU and in Triton's interpreter, which shows that the script works,
no more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.status import write_text

ROOT = Path(__file__).resolve().parent.parent
RECORD = "@record "
PACKAGES = ("torch", "triton", "transformers", "lightning", "sonic-moe", "kernels")
# Seconds below which a job is not begun: its imports alone take most of them.
LEAST_S = 10.0


@dataclass(frozen=True)
class Job:
    """One process of the check; `limit_s` is for a GPU."""

    part: int
    kind: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 90.0

    @property
    def name(self) -> str:
        return " ".join((self.kind, *self.arguments))


TABLE_BACKENDS = ("scattermoe", "sonicmoe", "grouped_mm", "eager")
# In the order of what matters; the second model last, so that it is what a short budget leaves out.
JOBS = (
    Job(1, "adamw", limit_s=60),
    Job(2, "layers", ("olmoe",)),
    *(Job(3, "table", ("olmoe", backend)) for backend in TABLE_BACKENDS),
    Job(4, "bitwise", ("scattermoe",), limit_s=60),
    Job(4, "bitwise", ("grouped_mm",), limit_s=60),
    Job(5, "predicted"),
    Job(6, "host", ("scattermoe",), limit_s=120),
    Job(6, "host", ("grouped_mm",), limit_s=120),
    Job(2, "layers", ("granite",)),
    *(Job(3, "table", ("granite", backend)) for backend in TABLE_BACKENDS),
)


# In a job's own process.


def run_job(job: Job, toy: bool, so_far: Path) -> None:
    """Do the job and print its findings as records."""
    import torch

    from experiments import gpu_host, gpu_parts, gpu_training

    def emit(name: str, line: str, ok: bool | None = None, **figures: Any) -> None:
        record = {"part": job.part, "job": job.name, "name": name, "ok": ok, "line": line, **figures}
        print(RECORD + json.dumps(record), flush=True)

    check = gpu_parts.Check(torch.device("cpu" if toy else "cuda"), toy, emit)
    if not toy:
        print(RECORD + json.dumps({"machine": gpu_facts()}), flush=True)
    if job.kind == "adamw":
        gpu_parts.adamw(check)
    elif job.kind == "layers":
        gpu_parts.layers(check, *job.arguments)
    elif job.kind == "table":
        gpu_training.table(check, *job.arguments)
    elif job.kind == "bitwise":
        gpu_training.bitwise(check, *job.arguments)
    elif job.kind == "host":
        gpu_host.host(check, *job.arguments)
    else:
        gpu_training.predicted(check, _measured(so_far))


def gpu_facts() -> dict[str, Any]:
    """Asked in a job's process: where a GPU serves one process at a time, the one around them must not hold it."""
    import torch

    found = torch.cuda.get_device_properties(0)
    facts = {"gpu": found.name, "memory_gb": found.total_memory / 1e9, "capability": f"{found.major}.{found.minor}"}
    return {**facts, "cuda": torch.version.cuda, "hip": torch.version.hip}


def _measured(path: Path) -> list[dict[str, Any]]:
    """Peaks of part 3 for which there is a plan of the very kernel."""
    if not path.exists():
        return []
    records = json.loads(path.read_text())["records"]
    return [
        record
        for record in records
        if record.get("part") == 3 and "peak_gb" in record and record["backend"] in ("scattermoe", "grouped_mm")
    ]


# Around them.


class Report:
    """What was found so far: printed as it comes, and kept in a file that is whole at any moment."""

    def __init__(self, path: Path, toy: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {"toy": toy, "machine": versions(), "jobs": [], "records": []}
        self.write()

    def machine(self, facts: dict[str, Any]) -> None:
        """What a job says of the GPU; each does, the first is printed."""
        if not facts.items() <= self.content["machine"].items():
            print("  " + ", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
            self.content["machine"].update(facts)
            self.write()

    def record(self, record: dict[str, Any]) -> None:
        mark = {True: "ok  ", False: "FAIL", None: "    "}[record["ok"]]
        print(f"  {mark} {record['line']}", flush=True)
        self.content["records"].append(record)
        self.write()

    def job(self, job: Job, outcome: str, seconds: float, detail: str = "") -> None:
        print(f"part {job.part}, {job.name}: {outcome} ({seconds:.0f} s)", flush=True)
        if detail:
            print("    " + detail.replace("\n", "\n    "), flush=True)
        entry = {"part": job.part, "job": job.name, "outcome": outcome, "seconds": round(seconds, 1), "detail": detail}
        self.content["jobs"].append(entry)
        self.write()

    def write(self) -> None:
        write_text(self.path, json.dumps(self.content, indent=1) + "\n")

    def missing(self, backend: str) -> str | None:
        """What an earlier job said the backend lacks."""
        found = [r["missing"] for r in self.content["records"] if r.get("backend") == backend and "missing" in r]
        return found[0] if found else None

    @property
    def passed(self) -> bool:
        return all(entry["outcome"] in ("ok", "not here") for entry in self.content["jobs"])


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def command_of(job: Job, so_far: Path, toy: bool) -> list[str]:
    command = [sys.executable, str(Path(__file__).resolve()), "--json", str(so_far), "--job", job.name]
    return [*command, *(["--toy"] if toy else [])]


def supervise(job: Job, report: Report, toy: bool, limit_s: float) -> None:
    """Run a job in a process of its own, and pass on what it finds until it ends or its time is up."""
    began = time.monotonic()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if toy:
        environment["TRITON_INTERPRET"] = "1"
    else:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    late = threading.Event()
    said: deque[str] = deque(maxlen=15)
    failed = missing = 0
    process = subprocess.Popen(
        command_of(job, report.path, toy),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A group of its own: compilers that it started end with it.
        start_new_session=True,
    )

    def stop() -> None:
        late.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, stop)
    try:
        timer.start()
        for line in process.stdout or ():
            if line.startswith(RECORD):
                record = json.loads(line.removeprefix(RECORD))
                if "machine" in record:
                    report.machine(record["machine"])
                    continue
                failed += record["ok"] is False
                missing += "missing" in record
                report.record(record)
            else:
                said.append(line.rstrip())
        code = process.wait()
    finally:
        timer.cancel()
        stop_if_running(process)
        if process.stdout is not None:
            process.stdout.close()
    seconds = time.monotonic() - began
    if late.is_set():
        report.job(job, f"stopped at its limit of {limit_s:.3g} s", seconds, "\n".join(said))
    elif code != 0:
        report.job(job, f"ended with code {code}", seconds, "\n".join(said))
    elif failed:
        report.job(job, f"{failed} findings failed", seconds)
    else:
        report.job(job, "not here" if missing and job.kind != "layers" else "ok", seconds)


def stop_if_running(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM becomes SystemExit: a job is in a session of its own, and would outlive a process that just dies."""

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not break off the cleaning up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def select(text: str) -> list[Job]:
    """The jobs of ``"1,3"``, in order; a job's own name selects it alone."""
    try:
        parts = {int(part) for part in text.split(",")}
    except ValueError:
        parts = set()
    chosen = [job for job in JOBS if job.part in parts or job.name == text]
    if not chosen or parts - {job.part for job in JOBS}:
        raise SystemExit(f"--parts {text}: expected some of 1,2,3,4,5,6, or one of: {', '.join(j.name for j in JOBS)}.")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", default="1,2,3,4,5,6", help="which, by number, or one job by its name (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="time for everything; what does not fit is skipped (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("outputs/gpu_check.json"),
        metavar="PATH",
        help="file of the figures (default: %(default)s)",
    )
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU even where there is a GPU")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        run_job(select(options.job)[0], options.toy, options.json)
        return 0

    deadline = time.monotonic() + 60 * options.minutes
    jobs = select(options.parts)
    import torch

    toy = options.toy or not torch.cuda.is_available()
    if toy:
        why = "asked for" if options.toy else "there is no GPU that torch can use"
        print(f"Toy sizes ({why}): this shows that the script works. Its figures say nothing about a GPU.")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = Report(options.json, toy)
    print(", ".join(f"{name} {value}" for name, value in report.content["machine"].items()))
    for job in jobs:
        left = deadline - time.monotonic()
        missing = report.missing(job.arguments[-1]) if job.arguments else None
        if missing is not None:
            report.job(job, "not here", 0.0, f"needs {missing}")
        elif left < LEAST_S:
            report.job(job, "skipped: no time left", 0.0)
        else:
            with ended_by_sigterm():
                supervise(job, report, toy, min(left, job.limit_s * (2 if toy else 1)))
    print(f"Written to {options.json}. {'Everything passed.' if report.passed else 'Not everything passed.'}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
