"""Part 6 of the GPU check: what host memory saves and costs, and that it changes no bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.gpu_parts import Check, emit_bitwise, runs_here
from experiments.measuring import Training, batch_of, build, measure_mode

MICRO = 2
STATES = {"expert_state_device": "cpu"}
# Label, options of `release_in_backward`, microbatches a step, and the label it is compared with.
CASES: tuple[tuple[str, dict[str, Any], int, str | None], ...] = (
    ("sonar", {}, 1, None),
    ("sonar, expert_state_device=cpu", STATES, 1, "sonar"),
    ("sonar, 2 microbatches, accumulation=exact", {"accumulation": "exact"}, MICRO, None),
    (
        "sonar, 2 microbatches, accumulation=host",
        {"accumulation": "host"},
        MICRO,
        "sonar, 2 microbatches, accumulation=exact",
    ),
)


def host(check: Check, backend: str) -> None:
    """Peak and median step with states, or sums of gradients, in host memory; equality to the bit at two layers."""
    if not runs_here(check, backend):
        return
    _bitwise(check, backend)
    model = build("olmoe", backend, check.device, toy=check.toy)
    batch = batch_of(model, *((1, 16) if check.toy else (2, 256)), check.device)
    found: dict[str, tuple[float, float]] = {}
    for label, options, microbatches, base in CASES:
        try:
            figures = measure_mode(
                model,
                "sonar",
                batch,
                check.device,
                steps=1 if check.toy else 8,
                warmup=1 if check.toy else 2,
                microbatches=microbatches,
                **options,
            )
        except torch.OutOfMemoryError as problem:
            check.emit(label, f"olmoe {backend} {label}: out of memory: {str(problem).splitlines()[0]}", ok=False)
            continue
        peak, ms = found[label] = (figures.peak_bytes / 1e9, figures.median_ms)
        line = f"olmoe {backend} {label}: peak {peak:.4g} GB, {ms:.1f} ms a step (median of {len(figures.ms)})"
        if base in found:
            line += "; against {}: {:+.1%} memory, {:+.1%} time".format(
                base, *(new / old - 1 for new, old in zip((peak, ms), found[base], strict=True))
            )
        check.emit(
            f"host {backend} {label}",
            line,
            # The point of it, at full size; a toy's states are as small as its activations.
            ok=None if check.toy or base not in found else peak < found[base][0],
            backend=backend,
            options=options,
            microbatches=microbatches,
            peak_gb=peak,
            median_ms=ms,
        )


def _bitwise(check: Check, backend: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    values: dict[str, dict[str, Tensor]] = {}
    for label, options, microbatches, base in CASES:
        # A sum of bfloat16 gradients is rounded once in host memory, and at each addition on the device.
        dtype = torch.float32 if "accumulation" in options else torch.bfloat16
        model = build("olmoe", backend, check.device, toy=check.toy, layers=2, attn_implementation="eager").to(dtype)
        training = Training(model, "sonar", lr=1e-3, **options)
        shape = (1, 16) if check.toy else (2, 256)
        for step in range(2 if check.toy else 4):
            training.step(*(batch_of(model, *shape, check.device, 10 * step + m) for m in range(microbatches)))
        values[label] = training.values()
        training.close()
        del model, training
        if base is None:
            continue
        reference, these = values[base], values[label]
        what = f"{backend}: {label} against {base}, {str(dtype).removeprefix('torch.')}"
        emit_bitwise(check, f"host bitwise {backend} {label}", what, reference, these, backend=backend)
    torch.use_deterministic_algorithms(False)
