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

from lightning_sonar.optim.reference import bias_correction

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
def interpreted() -> dict[str, dict[str, int]]:
    pytest.importorskip("triton")
    return run_cases("interpret", TRITON_INTERPRET="1")


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
        elif case != "transposed":
            assert found["moved"] > 0, case


def test_every_byte_moves_once_in_128_bit_accesses(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in compiled.items():
        # Eight elements a thread: 16 bytes of bf16, 32 of fp32; four tensors read, three written.
        per_tensor = 2 if "fp32" in case else 1
        assert found["wide_loads"] == 4 * per_tensor, case
        assert found["wide_stores"] == found["stores"] == 3 * per_tensor, case
        scalars = 4 if "everything" in case else 1  # step; learning rate, scale and flag
        assert found["loads"] == found["wide_loads"] + scalars, case


def test_nothing_spills(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in compiled.items():
        assert found["stack"] == found["local"] == 0, case
        assert found["reg"] <= 64, case  # 64 keeps eight blocks of 128 threads on a multiprocessor


def test_offsets_are_64_bit_before_they_are_multiplied(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in compiled.items():
        assert found["offsets"] == ["i64"], case
        assert found["block_start"] == ["i64"], case


def test_compiled_arithmetic_rounds_like_the_reference(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in compiled.items():
        assert found["fused"] == 0, case
        assert found["approximate"] == 0, case


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
