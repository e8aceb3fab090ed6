"""Part 1 of the GPU check, with the reference in the kernel's place: every way to launch it, and what a fault costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experiments import gpu_parts
from lightning_sonar.optim.reference import adamw_reference_


class Launched:
    """The reference in the place of the kernel, with what each launch was given, and a fault in one of them."""

    def __init__(self, faulty: str = "") -> None:
        self.faulty, self.given = faulty, []

    def launch_adamw(self, *tensors: torch.Tensor, **settings: Any) -> None:
        self.given.append({name for name in settings if name not in gpu_parts.SETTINGS})
        if self.faulty == "found_inf":
            settings.pop("found_inf", None)
        adamw_reference_(*tensors, **settings)
        if self.faulty in settings:
            tensors[3][-1] += 1  # second moment


def run(findings: list[dict[str, Any]]) -> None:
    def emit(name: str, line: str, ok: bool | None = None, **figures: Any) -> None:
        findings.append({"name": name, "line": line, "ok": ok, **figures})

    gpu_parts.adamw(gpu_parts.Check(torch.device("cpu"), True, emit))


VARIANTS = ("", " scale and flag down", " flag up", " sum of squares", " tensor lr")
EVERY_VARIANT = {f"adamw {dtype}{variant}" for dtype in ("bfloat16", "float32") for variant in VARIANTS}
EVERY_VARIANT |= {"adamw bfloat16 stochastic rounding", "adamw bfloat16 stochastic rounding, odd offset"}


@pytest.mark.parametrize(
    ("faulty", "failing"),
    [
        ("", set()),
        ("grad_scale", {" scale and flag down"}),
        ("found_inf", {" flag up"}),
        ("grad_sq_sum", {" sum of squares"}),
        ("rounding", {" stochastic rounding", " stochastic rounding, odd offset"}),
    ],
)
def test_every_way_to_launch_adamw_is_compared_and_one_wrong_bit_fails(monkeypatch, faulty, failing):
    findings: list[dict[str, Any]] = []
    kernels = Launched(faulty)
    monkeypatch.setattr(gpu_parts.importlib, "import_module", lambda name: kernels)
    monkeypatch.setattr(gpu_parts, "_adamw_rate", lambda *_: None)
    run(findings)
    found = {finding["name"]: finding["ok"] for finding in findings}
    assert set(found) == EVERY_VARIANT
    dtypes = ("bfloat16",) if faulty == "rounding" else ("bfloat16", "float32")
    assert {name for name, ok in found.items() if not ok} == {f"adamw {d}{v}" for d in dtypes for v in failing}
    given = set().union(*kernels.given)
    assert given == {"grad_scale", "found_inf", "grad_sq_sum", "rounding"}


def test_a_launch_that_raises_leaves_the_others_their_findings(monkeypatch):
    findings: list[dict[str, Any]] = []

    class Broken(Launched):
        def launch_adamw(self, *tensors: torch.Tensor, **settings: Any) -> None:
            if "grad_sq_sum" in settings:
                raise RuntimeError("out of registers")
            adamw_reference_(*tensors, **settings)

    monkeypatch.setattr(gpu_parts.importlib, "import_module", lambda name: Broken())
    monkeypatch.setattr(gpu_parts, "_adamw_rate", lambda *_: None)
    run(findings)
    failed = [finding["line"] for finding in findings if not finding["ok"]]
    assert failed == [f"adamw {d} sum of squares: RuntimeError: out of registers" for d in ("bfloat16", "float32")]
    assert len(findings) == len(EVERY_VARIANT)
