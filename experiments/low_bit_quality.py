"""Held-out loss of low-bit optimizers against AdamW with bfloat16 states, on the tiny OLMoE with built-in data.

python experiments/low_bit_quality.py
python experiments/low_bit_quality.py --steps 300 --seeds 0,1,2 --optimizers bnb_adamw8bit,adamw4bit --out quality

Each run is a process of its own, one after the other, and leaves its result in a folder; what is there already is not
run again, so an interrupted comparison goes on where it stopped. A gap is that of two runs with the same seed, so the
same weights and batches. Training in bfloat16 is chaotic: one last bit that rounds otherwise makes another run some
dozens of steps later. How far that alone carries is in the row of AdamW with another eps, which nobody would call
another optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.status import write_text

ROOT = Path(__file__).resolve().parent.parent
BASELINE = "fused_adamw"
NOISE = "fused_adamw+optimizer.eps=1.1e-8"
"""The baseline, a hair's breadth beside itself. What stands behind a plus is an override of that row alone."""
OPTIMIZERS = (
    NOISE,
    "bnb_adamw8bit",
    "bnb_adamw8bit_experts",
    "adamw8bit",
    "adamw8bit_experts",
    "adamw_fp8",
    "adamw_fp8_experts",
    "adamw4bit",
    "adamw4bit_experts",
)
GOAL = 0.003
"""The largest mean gap in held-out loss that 8-bit states may have."""
KEPT = ("optimizer", "seed", "steps", "heldout_loss", "train_loss", "peak_memory_bytes", "step_time_ms", "versions")


def run_of(optimizer: str, seed: int, steps: int, folder: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """One run's figures: read if they are there, else measured in a process of its own.

    Raises:
        RuntimeError: if the run fails, with the end of what it said.
    """
    optimizer, *own = optimizer.split("+")
    more = [*own, *more]
    name = "-".join([optimizer, *(override.replace("=", "-") for override in own), f"seed{seed}", f"steps{steps}"])
    kept = folder / f"{name}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["overrides"] == more:
            return found
    command = [
        *(sys.executable, str(ROOT / "experiments" / "run.py"), "model=olmoe", "model.size=tiny", "data=builtin"),
        *("trainer.precision=bf16-true", f"optimizer={optimizer}", f"seed={seed}", f"trainer.max_steps={steps}"),
        *("trainer.enable_progress_bar=false", f"hydra.run.dir={(folder / 'runs' / name).resolve()}", *more),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    result = folder / "runs" / name / "result.json"
    if done.returncode or not result.exists():
        raise RuntimeError(f"{name} failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    values = json.loads(result.read_text())
    # Warnings of updates larger than the weights are part of the result.
    warned = sum("times its largest weight" in line for line in done.stderr.splitlines())
    found = {**{key: values.get(key) for key in KEPT}, "large_updates": warned, "overrides": more}
    write_text(kept, json.dumps(found, indent=2))
    return found


def gaps_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """For each optimizer its gaps to the baseline's run of the same seed: each, their mean, their spread.

    The spread is the standard deviation over seeds, None for a single one.
    """
    base = {run["seed"]: run["heldout_loss"] for run in runs[BASELINE]}
    found: dict[str, dict[str, Any]] = {}
    for optimizer, mine in runs.items():
        gaps = [run["heldout_loss"] - base[run["seed"]] for run in mine]
        found[optimizer] = {
            "heldout_loss": statistics.fmean(run["heldout_loss"] for run in mine),
            "gaps": gaps,
            "mean": statistics.fmean(gaps),
            "spread": statistics.stdev(gaps) if len(gaps) > 1 else None,
            "large_updates": sum(run["large_updates"] for run in mine),
            "peak_memory_bytes": max(run["peak_memory_bytes"] or 0 for run in mine),
            "goal": judged(optimizer, gaps),
        }
    return found


def judged(optimizer: str, gaps: Sequence[float]) -> str:
    """Whether the goal is met; it is set for 8-bit states."""
    if "8bit" not in optimizer:
        return "none set"
    return "met" if statistics.fmean(gaps) <= GOAL else "not met"


def rows_of(gaps: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table: optimizer, held-out loss, mean gap, spread, each gap, large updates, goal."""
    rows: list[tuple[str, ...]] = []
    for optimizer, value in gaps.items():
        if optimizer == BASELINE:
            rows.append((optimizer, f"{value['heldout_loss']:.4f}", "", "", "", "", ""))
            continue
        spread = "" if value["spread"] is None else f"{value['spread']:.4f}"
        each = ", ".join(f"{gap:+z.4f}" for gap in value["gaps"])
        figures = (f"{value['heldout_loss']:.4f}", f"{value['mean']:+z.4f}", spread, each)
        rows.append((optimizer, *figures, str(value["large_updates"]), value["goal"]))
    return rows


COLUMNS = ("optimizer", "held-out loss", "gap, mean", "spread", "gaps by seed", "warnings", f"goal {GOAL} for 8-bit")


def markdown_of(rows: Sequence[Sequence[str]], steps: int, seeds: Sequence[int]) -> str:
    """The table for a page."""
    lines = [
        f"Tiny OLMoE, built-in data, bf16-true, {steps} steps, seeds {', '.join(map(str, seeds))}. Gaps to {BASELINE} "
        "with the same seed; spread is the standard deviation over seeds; warnings are steps with an update above the "
        "largest weight.\n",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 1 if runs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, with commas (default: %(default)s)")
    parser.add_argument(
        "--optimizers",
        default=",".join(OPTIMIZERS),
        help="names of conf/optimizer, with commas; "
        "each may have overrides of its own behind it: NAME+optimizer.lr=1e-4 (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/low_bit_quality"), help="folder for results (default: %(default)s)"
    )
    parser.add_argument("overrides", nargs="*", help="further overrides of experiments/run.py, for every run")
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    wanted = [BASELINE, *(name for name in options.optimizers.split(",") if name != BASELINE)]
    options.out.mkdir(parents=True, exist_ok=True)
    console, failed = Console(highlight=False), False
    runs: dict[str, list[dict[str, Any]]] = {}
    for optimizer in wanted:
        for seed in seeds:
            try:
                run = run_of(optimizer, seed, options.steps, options.out, options.overrides)
            except RuntimeError as error:
                console.print(f"[red]{error}[/red]", markup=True)
                failed = True
                if optimizer == BASELINE:
                    return 1
                continue
            runs.setdefault(optimizer, []).append(run)
            console.print(f"{optimizer}, seed {seed}: held-out loss {run['heldout_loss']:.4f}")
    gaps = gaps_of(runs)
    rows = rows_of(gaps)
    table = Table(*COLUMNS, box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    (options.out / "low_bit_quality.md").write_text(markdown_of(rows, options.steps, seeds))
    (options.out / "low_bit_quality.json").write_text(json.dumps(gaps, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
