"""Parts 3 to 5 of the GPU check: the paper's table, equality to the bit, predicted against measured peaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.gpu_parts import Check, emit_bitwise, runs_here
from experiments.measuring import TABLE_MODES, TOY, Training, batch_of, build, measure_mode
from lightning_sonar.memory.planner import plan_memory

# Peak GB and ms a step, arXiv 2611.03577: OLMoE-1B-7B with SonicMoE. Per-expert hooks: the same memory, +23.6 ms.
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    "olmoe": {
        "standard": (55.55, 142.8),
        "standard_no_expert_clip": (55.55, 115.9),
        "in_backward_all": (43.35, 114.4),
        "sonar": (43.57, 116.1),
        "sonar_per_expert": (43.57, 139.7),
    },
    "granite": {},
}


def table(check: Check, name: str, backend: str) -> None:
    """The five modes at full size: peak allocated and median step, beside the paper's."""
    if not runs_here(check, backend):
        return
    model = build(name, backend, check.device, toy=check.toy)
    batch = batch_of(model, *((1, 16) if check.toy else (2, 256)), check.device)
    steps = (1, 1) if check.toy else (3, 1) if backend == "eager" else (30, 5)
    base: dict[str, tuple[float, float]] = {}
    for mode in TABLE_MODES:
        label = f"{name} {backend} {mode}"
        try:
            found = measure_mode(model, mode, batch, check.device, steps=steps[0], warmup=steps[1])
        except torch.OutOfMemoryError as problem:
            check.emit(label, f"{label}: out of memory: {str(problem).splitlines()[0]}", ok=False, oom=True)
            continue
        peak, ms = found.peak_bytes / 1e9, found.median_ms
        base[mode] = (peak, ms)
        line = f"{label}: peak {peak:.4g} GB, {ms:.1f} ms a step (median of {len(found.ms)})"
        if mode in PAPER[name] and not check.toy:
            line += "; the paper, on SonicMoE: {:.2f} GB, {:.1f} ms".format(*PAPER[name][mode])
        if mode != "standard" and "standard" in base:
            more, longer = (new / old - 1 for new, old in zip((peak, ms), base["standard"], strict=True))
            line += f"; against standard {more:+.1%} memory, {longer:+.1%} time"
        check.emit(
            label,
            line,
            # A step whose loss is not finite updates nothing, so its time would be of something else.
            ok=bool(torch.isfinite(torch.tensor(found.loss))),
            model=name,
            backend=backend,
            mode=mode,
            peak_gb=peak,
            median_ms=ms,
            ms=[round(value, 3) for value in found.ms],
            loss=found.loss,
            paper=PAPER[name].get(mode),
        )


def bitwise(check: Check, backend: str) -> None:
    """Every parameter and all state after five steps: sonar and per-expert hooks against standard_no_expert_clip."""
    if not runs_here(check, backend):
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    reference: dict[str, Tensor] = {}
    for label, mode in (
        ("standard_no_expert_clip", "standard_no_expert_clip"),
        # If this differs from itself, the kernels below do not repeat themselves, and the rest says nothing.
        ("standard_no_expert_clip again", "standard_no_expert_clip"),
        ("sonar", "sonar"),
        ("sonar_per_expert", "sonar_per_expert"),
    ):
        model = build("olmoe", backend, check.device, toy=check.toy, layers=2, attn_implementation="eager")
        training = Training(model, mode, lr=1e-3)
        for seed in range(2 if check.toy else 5):
            training.step(batch_of(model, *((1, 16) if check.toy else (2, 256)), check.device, seed))
        values = training.values()
        training.close()
        del model, training
        if not reference:
            reference = values
            continue
        what = f"{backend}: {label} against standard_no_expert_clip"
        emit_bitwise(check, f"bitwise {backend} {label}", what, reference, values, backend=backend, mode=label)


def predicted(check: Check, measured: list[dict[str, Any]]) -> None:
    """`plan_memory` against a few steps of its own, and against the peaks of part 3 where there are any."""
    shape = (1, 16) if check.toy else (2, 256)
    own: list[dict[str, Any]] = []
    layers = 1 if check.toy else 4
    for backend in ("grouped_mm",) if check.toy else ("grouped_mm", "scattermoe"):
        if not runs_here(check, backend):
            continue
        model = build("olmoe", backend, check.device, toy=check.toy, layers=layers)
        batch = batch_of(model, *shape, check.device)
        for mode in ("standard", "sonar"):
            found = measure_mode(model, mode, batch, check.device, steps=1 if check.toy else 3, warmup=2)
            row = {"model": "olmoe", "backend": backend, "mode": mode, "peak_gb": found.peak_bytes / 1e9}
            own.append({**row, "layers": layers})
        del model, batch
    for row in [*own, *(row for row in measured if row["mode"] in ("standard", "in_backward_all", "sonar"))]:
        plan = plan_memory(
            row["model"],
            mode=row["mode"],
            backend=row["backend"],
            size="tiny" if check.toy else "full",
            num_layers=1 if check.toy else row.get("layers"),
            batch_size=shape[0],
            seq_len=shape[1],
            rounding=512 if check.device.type == "cuda" else 1,
            **(TOY[row["model"]] if check.toy else {}),
        )
        ratio = plan.peak_bytes / 1e9 / row["peak_gb"]
        label = f"{row['model']} {row['backend']} {row['mode']}" + (
            f" {row['layers']} layers" if "layers" in row else ""
        )
        check.emit(
            f"predicted {label}",
            f"{label}: predicted {plan.peak_bytes / 1e9:.4g} GB, measured {row['peak_gb']:.4g} GB ({ratio - 1:+.2%})",
            ok=abs(ratio - 1) < 0.05,
            predicted_gb=plan.peak_bytes / 1e9,
            measured_gb=row["peak_gb"],
            ratio=ratio,
        )
