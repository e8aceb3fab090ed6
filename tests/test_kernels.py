"""The Triton AdamW kernel: bit-exact with the reference when interpreted, and lean when compiled offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sonar.optim.reference import _sqrt, bias_correction

ROOT = Path(__file__).parent.parent


def run_cases(command: str, **environment: str) -> dict[str, dict[str, Any]]:
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "kernel_cases.py"), command],
        env={**clean, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"kernel_cases.py {command} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def in_the_interpreter() -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton")
    return run_cases("interpret", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def interpreted(in_the_interpreter: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    return in_the_interpreter["bits"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    pytest.importorskip("triton")
    return run_cases("compile", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("tensor", ["param", "exp_avg", "exp_avg_sq", "step"])
def test_kernel_equals_reference_in_every_bit(interpreted: dict[str, dict[str, int]], tensor: str) -> None:
    wrong = {case: found[tensor] for case, found in interpreted.items() if found[tensor]}
    assert not wrong
    assert len(interpreted) > 50


def test_kernel_writes_nothing_while_the_flag_is_up(interpreted: dict[str, dict[str, int]]) -> None:
    for case, found in interpreted.items():
        if "flag_up" in case or "flag_nan" in case:
            assert found["moved"] == 0, case
        elif case != "transposed" and "-none-" not in case:
            assert found["moved"] > 0, case


def test_sums_of_squares_add_up_and_repeat_themselves(in_the_interpreter: dict[str, dict[str, Any]]) -> None:
    for case, found in in_the_interpreter["sums"].items():
        # A tree of fp32 sums over 1,024 elements, then over three blocks: far fewer than 16 roundings deep.
        assert found["whole"] == pytest.approx(found["exact"], rel=16 * 2**-24), case
        assert found["halves"] == pytest.approx(found["exact"], rel=16 * 2**-24), case
        assert found["again"] == found["scaled"] == found["whole"], case
        assert found["flag_up"] == 0, case


def real(compiled: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The cases as they run; the others are there to be noticed."""
    return {case: found for case, found in compiled.items() if not case.endswith(("-unaligned", "-cramped"))}


def test_every_target_and_dtype_is_compiled(compiled: dict[str, dict[str, Any]]) -> None:
    variants = {"bf16": ("plain", "everything", "stochastic"), "fp32": ("plain", "everything")}
    targets = ("sm_80", "sm_90", "sm_100", "gfx942")
    expected = {f"{t}-{d}-{v}" for t in targets for d, names in variants.items() for v in names}
    assert set(real(compiled)) == expected


def test_every_byte_moves_once_in_128_bit_accesses(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in real(compiled).items():
        size = {"bf16": 2, "fp32": 4}[found["dtype"]]
        # Parameter, gradient and two moments are read, all but the gradient written: 14 bytes in bf16, 28 in fp32.
        assert (found["tensors_loaded"], found["tensors_stored"]) == (4, 3), case
        assert (found["bytes_read"], found["bytes_written"]) == (4 * size, 3 * size), case
        # All else is one scalar a program: step; learning rate, scale and flag; the partial sum.
        plain = found["variant"] == "plain"
        assert found["scalars"] == (1 if plain else 4), case
        assert found["loads"].keys() <= {"32", "128"}, case
        assert found["loads"].get("32", 0) <= (1 if plain else 4), case
        assert found["stores"] == {"128": found["stores"]["128"], **({} if plain else {"32": 1})}, case


def test_unaligned_pointers_would_be_noticed(compiled: dict[str, dict[str, Any]]) -> None:
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        found = compiled[f"{target}-unaligned"]
        assert found["bytes_read"] == found["bytes_written"] == 0, target
        assert found["loads"]["16"] == 32, target


def test_nothing_spills(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in real(compiled).items():
        assert found["spilled"] == 0, case
        assert not found["spilled_registers"], case
        assert found["registers"] <= 64, case  # 64 keeps eight blocks of 128 threads on a multiprocessor


def test_spills_would_be_noticed(compiled: dict[str, dict[str, Any]]) -> None:
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert compiled[f"{target}-cramped"]["spilled"] > 0, target
    assert compiled["gfx942-cramped"]["spilled_registers"] > 0


def test_random_bits_stay_in_the_thread_that_uses_them(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in real(compiled).items():
        # A float for each of four warps, for the sum of squares. A change of layout would take all the bits.
        assert found["shared"] == (0 if found["variant"] == "plain" else 16), case


def test_offsets_are_64_bit_before_they_are_multiplied(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in real(compiled).items():
        assert found["offsets"] == ["i64"], case
        assert found["block_start"] == ["i64"], case
        assert found["widened_late"] == [], case


def test_compiled_arithmetic_rounds_like_the_reference(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in real(compiled).items():
        assert found["contracted"] == found["fused"] == found["approximate"] == 0, case


def test_roots_of_the_reference_are_correctly_rounded() -> None:
    value = torch.rand(2**16, generator=torch.Generator().manual_seed(0))
    value = torch.cat([value, torch.tensor([0.0, 1e-45, 1.2e-38, 3e38, float("inf")])])
    root = _sqrt(value)
    below, above = (torch.nextafter(root, torch.tensor(end)) for end in (-1.0, float("inf")))
    # Half way to either neighbour has 25 bits and its square 50, which fp64 holds: the root lies between the two.
    exact = value[:-1].double()
    low, high = ((root.double() + near.double())[:-1] / 2 for near in (below, above))
    assert ((low.clamp(min=0.0).square() <= exact) & (exact <= high.square())).all()
    assert root[-1] == float("inf")


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 0.9999])
def test_bias_correction_is_within_five_ulps(beta: float) -> None:
    step = torch.cat([torch.arange(1, 20_001), torch.logspace(4, 6, 20_000).round()]).float()
    exact = 1 - torch.tensor(beta, dtype=torch.float64) ** step.double()
    ulp = torch.nextafter(exact.float(), torch.tensor(2.0)).double() - exact.float().double()
    error = (bias_correction(step, beta).double() - exact).abs() / ulp
    assert error.max() <= 5
    if beta == 0:
        assert (bias_correction(step, beta) == 1).all()


def test_the_obvious_bias_correction_is_far_off() -> None:
    step, beta = torch.tensor(1.0), torch.tensor(0.999)
    obvious = 1 - torch.exp2(step * torch.log2(beta))
    assert abs(obvious.item() / 0.001 - 1) > 1e-5
    assert abs(bias_correction(step, 0.999).item() / 0.001 - 1) < 1e-6
