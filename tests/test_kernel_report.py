"""The kernel report says what the compiled code holds, and what keeps it from compiling."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from experiments.kernel_report import COLUMNS, KERNELS, main, markdown, rows_of
from lightning_sonar.kernel_figures import TARGETS, KernelFigures, _amd_accesses, _ptx_accesses

ROOT = Path(__file__).parent.parent


def report(command: list[str], path: Path) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """The figures that a report wrote, and the words of each line that it printed."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command, "--json", str(path)],
        env={**environment, "TRITON_CACHE_DIR": str(path.parent / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), [line.split() for line in done.stdout.splitlines()]


ONLY_ADAMW = """
from experiments import kernel_report
kernel_report.KERNELS[:] = [kernel_report.adamw_cases]
kernel_report.main()
"""


def test_the_report_prints_a_table_and_writes_the_same_figures(tmp_path: Path) -> None:
    figures, rows = report(["-c", ONLY_ADAMW, "--target", "sm_90", "--target", "gfx942"], tmp_path / "new" / "a.json")
    assert {f["target"] for f in figures} == {"sm_90", "gfx942"}
    assert {f["dtype"]: f["bytes_read"] + f["bytes_written"] for f in figures} == {"bf16": 14, "fp32": 28}
    for f in figures:
        assert any(row[:4] == [f["kernel"], f["variant"], f["dtype"], f["target"]] for row in rows), f


@pytest.mark.slow
def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    figures, rows = report(["experiments/kernel_report.py"], tmp_path / "all.json")
    assert {f["target"] for f in figures} == {target.name for target in TARGETS}
    assert len({f["kernel"] for f in figures}) >= len(KERNELS)
    for f in figures:
        assert any(row[:4] == [f["kernel"], f["variant"], f["dtype"], f["target"]] for row in rows), f


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main([]) == 1
    assert re.match("Triton is not installed.*pip install triton", capsys.readouterr().err)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 1
    assert re.match("TRITON_INTERPRET is set.*Unset it", capsys.readouterr().err)


def test_a_row_has_a_text_for_every_column() -> None:
    common = {"variant": "plain", "target": "gfx942", "dtype": "bf16", "shared": 0}
    spilling = KernelFigures(
        **common,
        kernel="one",
        block=2048,
        registers=512,
        spilled=260,
        spilled_registers=64,
        loads={32: 1, 128: 4},
        stores={},
        bytes_read=8.0,
        bytes_written=6.0,
    )
    other = KernelFigures(
        **common,
        kernel="two",
        block=None,
        registers=32,
        spilled=0,
        spilled_registers=0,
        loads={16: 2},
        stores={64: 1},
        bytes_read=None,
        bytes_written=None,
    )
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of([spilling, other])]
    assert (rows[0]["spilled B"], rows[0]["loads"], rows[0]["stores"]) == ("260 (64 registers)", "4x128 + 1x32", "-")
    assert rows[0]["B a parameter"] == "14"
    assert (rows[1]["block"], rows[1]["B a parameter"], rows[1]["spilled B"]) == ("-", "-", "0")


def test_the_markdown_has_a_row_a_case_with_the_targets_in_order() -> None:
    adamw: dict[str, Any] = {
        "kernel": "adamw",
        "variant": "plain",
        "dtype": "bf16",
        "block": 1024,
        "spilled": 0,
        "spilled_registers": 0,
        "shared": 16,
        "loads": {32: 1, 128: 4},
        "stores": {128: 3},
        "bytes_read": 8.0,
        "bytes_written": 6.0,
    }
    product: dict[str, Any] = {
        "kernel": "moe_product",
        "variant": "up",
        "dtype": "bf16",
        "block": None,
        "spilled_registers": 0,
        "loads": {64: 2},
        "stores": {16: 3},
        "bytes_read": None,
        "bytes_written": None,
        "registers": 200,
    }
    figures = [
        KernelFigures(**adamw, target="sm_90", registers=55),
        KernelFigures(**product, target="sm_90", spilled=0, shared=96 * 1024),
        KernelFigures(**adamw, target="gfx942", registers=47),
        KernelFigures(**product, target="gfx942", spilled=8, shared=32 * 1024),
    ]
    lines = markdown(figures).splitlines()
    assert "registers sm_90 / gfx942" in lines[0]
    assert {line.count("|") for line in lines} == {10}
    assert lines[2:] == [
        "| adamw | plain | bf16 | 55 / 47 | 0 | 16 | 4x128 | 3x128 | 14 |",
        "| moe_product | up | bf16 | 200 | 0 / 8 | 98304 / 32768 | - | - | - |",
    ]


def test_accesses_are_counted_by_width_whatever_stands_between_the_words() -> None:
    ptx = """
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @%p1 ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd1 + 0 ];
        ld.relaxed.gpu.global.b16 { %rs1 }, [ %rd1 + 0 ];
        ld.param.b64 %rd1, [adamw_kernel_param_0];
        ld.shared.b32 %r1, [global_smem];
        st.global.v8.f32 [ %rd1 + 0 ], { %r1 };
    """
    assert _ptx_accesses(ptx, "ld") == {16: 1, 128: 2}
    assert _ptx_accesses(ptx, "st") == {256: 1}
    amd = """
        global_load_dwordx4 v[0:3], v[4:5], off
        buffer_load_dword v0, v1, s[0:3], 0 offen
        global_load_ushort v0, v[4:5], off
        global_load_short_d16_hi v0, v[4:5], off
        global_load_ubyte v0, v[4:5], off
        s_load_dwordx4 s[0:3], s[4:5], 0x0
        global_store_dwordx2 v[4:5], v[0:1], off
        global_store_short_d16_hi v[4:5], v0, off
    """
    assert _amd_accesses(amd, "load") == {8: 1, 16: 2, 32: 1, 128: 1}
    assert _amd_accesses(amd, "store") == {16: 1, 64: 1}
