"""What the compiler made of a Triton kernel, for GPUs that need not be there.

Registers, spills, and every access to global memory with its width, from the code for a target: enough to see
whether a kernel that streams memory moves each byte once, in the widest accesses there are. A module that has kernels
offers them as a function from a `Target` to its `KernelCase`s; `experiments/kernel_report.py` holds the list.

This module imports Triton only where it compiles, in a process that must not have TRITON_INTERPRET set.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["TARGETS", "KernelCase", "KernelFigures", "Target", "measure", "missing"]

# A full access of one thread. What is narrower is a scalar of the program, or a missed chance.
WIDE = 128


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU architecture, in the words of Triton's GPUTarget."""

    name: str
    backend: str
    arch: int | str
    warp_size: int


TARGETS = (
    Target("sm_80", "cuda", 80, 32),
    Target("sm_90", "cuda", 90, 32),
    Target("sm_100", "cuda", 100, 32),
    Target("gfx942", "hip", "gfx942", 64),
)


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One way to compile a kernel.

    Attributes:
        name: what the kernel is called in the report.
        variant: which switches are on, in a word or two.
        dtype: of its tensors, as in `signature` ("bf16", "fp32").
        kernel: the jitted function.
        signature: Triton's type of each argument that is no constant ("*bf16", "i64", "fp32").
        constants: values of the constexpr arguments.
        aligned: arguments that are multiples of 16, as the launcher finds them for tensors that torch allocates.
        block: elements a program handles, by which bytes an element are counted; None for a kernel that does not
            stream, which moves an element more than once.
        num_warps: warps a program.
        options: further compile options.
    """

    name: str
    variant: str
    dtype: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    block: int | None
    num_warps: int = 4
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class KernelFigures:
    """What the code of one case for one target holds.

    Attributes:
        kernel: `KernelCase.name`.
        variant: `KernelCase.variant`.
        target: `Target.name`.
        dtype: `KernelCase.dtype`.
        block: `KernelCase.block`.
        registers: vector registers a thread.
        spilled: bytes of local memory a thread: stack and local on NVIDIA, scratch on AMD. Spills live there.
        spilled_registers: on AMD, how many registers the compiler says it spilled; None on NVIDIA, where `spilled`
            shows them.
        shared: bytes of shared memory a program.
        loads: by width in bits, how many instructions load from global memory (on AMD without those of the scalar
            unit, which fetch arguments).
        stores: likewise.
        bytes_read: bytes an element that loads of 128 bits (or more) read; None without a block.
        bytes_written: likewise of stores.
    """

    kernel: str
    variant: str
    target: str
    dtype: str
    block: int | None
    registers: int
    spilled: int
    spilled_registers: int | None
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]
    bytes_read: float | None
    bytes_written: float | None


def missing() -> str | None:
    """What keeps this process from compiling kernels, and what to do; None if nothing does."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton is not installed, so nothing can be compiled. Install it with `pip install triton` (Linux only)."
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, so kernels are interpreted and not compiled. Unset it and start again."
    return None


def compile_case(case: KernelCase, target: Target) -> Any:
    """The compiled kernel, with its code at every stage in `.asm`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = case.kernel.arg_names
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in arguments},
        constexprs=dict(case.constants),
        attrs={(arguments.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    return triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": case.num_warps, **case.options},
    )


def measure(case: KernelCase, target: Target) -> KernelFigures:
    """Compile one case for one target, and read what it holds.

    Raises:
        RuntimeError: where `missing` has something to say.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    compiled = compile_case(case, target)
    if target.backend == "cuda":
        code = compiled.asm["ptx"]
        loads, stores = _ptx_accesses(code, "ld"), _ptx_accesses(code, "st")
        resources = _nvidia_resources(compiled.asm["cubin"])
        registers, spilled = resources["REG"], resources["STACK"] + resources["LOCAL"]
        spilled_registers = None
    else:
        code = compiled.asm["amdgcn"]
        loads, stores = _amd_accesses(code, "load"), _amd_accesses(code, "store")
        registers, spilled = _amd_figure(code, "vgpr_count"), _amd_figure(code, "private_segment_fixed_size")
        spilled_registers = _amd_figure(code, "vgpr_spill_count") + _amd_figure(code, "sgpr_spill_count")

    def an_element(accesses: dict[int, int]) -> float | None:
        if case.block is None:
            return None
        bits = sum(width * count for width, count in accesses.items() if width >= WIDE)
        return bits / 8 * case.num_warps * target.warp_size / case.block

    return KernelFigures(
        kernel=case.name,
        variant=case.variant,
        target=target.name,
        dtype=case.dtype,
        block=case.block,
        registers=registers,
        spilled=spilled,
        spilled_registers=spilled_registers,
        shared=compiled.metadata.shared,
        loads=loads,
        stores=stores,
        bytes_read=an_element(loads),
        bytes_written=an_element(stores),
    )


def _ptx_accesses(ptx: str, kind: str) -> dict[int, int]:
    """By width in bits, the instructions like `ld.global.v4.b32`, whatever stands between the words."""
    found = re.findall(rf"\b{kind}(?:\.\w+)*?\.global(?:(?:\.|::)\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return dict(sorted(Counter(int(count or 1) * int(bits) for count, bits in found).items()))


def _amd_accesses(code: str, kind: str) -> dict[int, int]:
    """By width in bits, the instructions like `global_load_dwordx4`."""
    found = re.findall(rf"\b(?:global|buffer|flat)_{kind}_(?:(dword)(?:x(\d))?|[a-z]*?(byte|short)\w*)\b", code)
    widths = (32 * int(count or 1) if dword else {"byte": 8, "short": 16}[small] for dword, count, small in found)
    return dict(sorted(Counter(widths).items()))


def _nvidia_resources(cubin: bytes) -> dict[str, int]:
    """What ptxas reserved for a thread. A spill shows there, not in the PTX."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path  # pyright: ignore[reportAttributeAccessIssue]
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report.stdout)}


def _amd_figure(code: str, name: str) -> int:
    """A figure of the kernel's metadata."""
    found = re.search(rf"^\s*\.{name}:\s*(\d+)", code, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the code for AMD has no .{name}; this version of Triton writes it otherwise.")
    return int(found.group(1))
