"""Run folders as a job leaves them, made by hand: the shape is that of a real run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_sonar import MODES

EXPERT_GRADIENTS = {"standard": 151_000_000, "standard_no_expert_clip": 151_000_000}
STATES = {"parameters": 158_544_384, "optimizer_state": 317_089_044, "dense_gradients": 2_097_664}


def result(mode: str, **changed: Any) -> dict[str, Any]:
    """What ``result.json`` holds; ``changed`` takes the place of its values."""
    gradients = EXPERT_GRADIENTS.get(mode, 16_777_216)
    split = {**STATES, "expert_gradients": gradients, "activations_and_other": 25_535_800}
    return {
        "model": "olmoe",
        "size": "tiny",
        "params_total": 79_272_192,
        "params_expert": 75_497_472,
        "mode": mode,
        "expert_clip": MODES[mode].expert_clip if mode in MODES else "none",
        "backend": "grouped_mm",
        "loss": "full",
        "optimizer": "FusedAdamW",
        "data": "builtin",
        "device": "cpu",
        "device_name": "a device",
        "dtype": "bfloat16",
        "precision": "bf16-true",
        "seed": 0,
        "steps": 30,
        "batch_size": 2,
        "seq_len": 64,
        "peak_memory_bytes": sum(split.values()),
        "predicted_peak_bytes": sum(split.values()),
        "peak_phase": "backward",
        "peak_expert_grad_bytes": gradients,
        "ranks": 1,
        "memory_split": split,
        "hooks_per_step": 0 if mode.startswith("standard") else 12,
        "step_time_ms": {"median": 250.0, "p10": 240.0, "p90": 300.0},
        "train_loss": 6.6,
        "heldout_loss": 6.5,
        "skipped_steps": 0,
        "skipped_tensors": 0,
        "overrides": [f"mode={mode}"],
        "settings_sha256": "0",
        "versions": {"python": "3.11", "torch": "2.13.0"},
        **changed,
    }


def memory(peak: int) -> dict[str, Any]:
    """What ``memory.json`` holds, of a step that peaks in backward."""
    live = [480_000_000, 500_000_000, 510_000_000, peak, 490_000_000, 490_000_000, 480_000_000]
    names = ("forward", "backward", "clip", "step", "done")
    ends = (30.0, 150.0, 160.0, 180.0, 182.0)
    starts = (0.0, *ends[:-1])
    phases = [
        {"phase": name, "start_ms": start, "end_ms": end, "peak_bytes": peak}
        for name, start, end in zip(names, starts, ends, strict=True)
    ]
    timeline = {
        "time_ms": [0.0, 10.0, 30.0, 90.0, 151.0, 170.0, 181.0],
        "event": list(range(7)),
        "live_bytes": live,
        "by_label": {},
        "phases": phases,
        "peak_index": 3,
    }
    return {"peak_bytes": peak, "timeline": timeline}


def write_run(
    folder: Path,
    value: dict[str, Any] | None = None,
    *,
    losses: list[float] | None = None,
    error: str | None = None,
    status: dict[str, Any] | None = None,
    overrides: list[str] | None = None,
) -> Path:
    """Make a run folder; without ``value`` it has no result."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text("")
    given = overrides if overrides is not None else (value or {}).get("overrides", [])
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {line}\n" for line in given) or "[]\n")
    if value is not None:
        (folder / "result.json").write_text(json.dumps(value))
        if value.get("peak_memory_bytes"):
            (folder / "memory.json").write_text(json.dumps(memory(value["peak_memory_bytes"])))
    if losses is not None:
        lines = [f"{index},{loss}" for index, loss in enumerate(losses, 1)]
        (folder / "losses.csv").write_text("\n".join(["batch,train_loss", *lines]) + "\n")
    if error is not None:
        (folder / "error.txt").write_text(error)
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    return folder
