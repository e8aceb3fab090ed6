"""The ScatterMoE kernels as cases for `kernel_figures`: what they cost on GPUs that need not be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_sonar.backends.scattermoe import tiles
from lightning_sonar.kernel_figures import KernelCase, Target

__all__ = ["GRANITE", "OLMOE", "SHARED_BYTES", "Shape", "scattermoe_cases"]

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Shared memory (LDS on AMD) that one program may use, by `Target.name`; source: the vendors' programming guides."""

_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Shape:
    """A layer of experts and the tokens in a batch."""

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: int


OLMOE = Shape("olmoe", 2048, 1024, 64, 8, 512)
GRANITE = Shape("granite", 1536, 512, 40, 8, 512)


def _product(
    shape: Shape,
    target: Target,
    rows: str,
    weights: str,
    variant: str,
    depth: int,
    cols: int,
    unit: str,
    order: tuple[int, int],
    scaled: bool = False,
) -> KernelCase:
    from lightning_sonar.backends.scattermoe.kernels import product_kernel

    device = tiles.Device(target.backend, SHARED_BYTES[target.name])
    tile = tiles.row_tiles(
        -(-shape.tokens * shape.top_k // shape.experts), cols, depth, _BYTES[rows], _BYTES[weights], device
    )
    constants = {
        # The launcher makes a stride of 1 a constant; which of the two it is, is the weight's layout.
        unit: 1,
        "A_BY": order[0],
        "OUT_BY": order[1],
        "TOP_K": shape.top_k,
        "HAS_BIAS": False,
        "HAS_SCALE": scaled,
        "GROUPS": 1 << shape.experts.bit_length(),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.cols,
        "BLOCK_K": tile.depth,
        "EVEN_K": depth % tile.depth == 0,
        "INTERPRETED": False,
    }
    types = {"a_ptr": rows, "w_ptr": weights, "bias_ptr": weights, "scale_ptr": rows, "out_ptr": rows}
    return _case("moe_product", variant, rows, product_kernel, types, constants, tile)


def _weight_grad(
    shape: Shape, target: Target, rows: str, weights: str, variant: str, sizes: tuple[int, int], order: tuple[int, int]
) -> KernelCase:
    from lightning_sonar.backends.scattermoe.kernels import weight_grad_kernel

    device = tiles.Device(target.backend, SHARED_BYTES[target.name])
    tile = tiles.grad_tiles(-(-shape.tokens * shape.top_k // shape.experts), *sizes, _BYTES[rows], device)
    constants = {
        "A_BY": order[0],
        "B_BY": order[1],
        "TOP_K": shape.top_k,
        "BLOCK_A": tile.rows,
        "BLOCK_B": tile.cols,
        "BLOCK_R": tile.depth,
        "INTERPRETED": False,
    }
    types = {"a_ptr": rows, "b_ptr": rows, "out_ptr": weights}
    return _case("moe_grad", variant, rows, weight_grad_kernel, types, constants, tile)


def _case(
    name: str,
    variant: str,
    dtype: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    tile: tiles.Tiles,
) -> KernelCase:
    signature = {}
    for argument in kernel.arg_names:
        if argument not in constants:
            pointer = types.get(argument, "i64" if argument == "order_ptr" else "i32")
            signature[argument] = f"*{pointer}" if argument.endswith("_ptr") else "i32"
    return KernelCase(
        name=name,
        variant=variant,
        dtype=dtype,
        kernel=kernel,
        signature=signature,
        constants=constants,
        # Tensors that torch allocates, and widths that are multiples of 16. Counts of rows and experts are anything.
        aligned=tuple(argument for argument in signature if argument not in ("num_rows", "num_experts")),
        block=None,
        num_warps=tile.warps,
        options={"num_stages": tile.stages, "enable_fp_fusion": True},
    )


def scattermoe_cases(
    target: Target, shape: Shape = OLMOE, rows: str = "bf16", weights: str | None = None
) -> list[KernelCase]:
    """The six products of a training step, as `functional.py` launches them. Needs Triton.

    Variants are named after the weight; ``dx`` is the gradient of the rows, ``dw`` that of the weight.

    Args:
        target: where they are to run; one of `SHARED_BYTES`.
        shape: layer and batch.
        rows: dtype of activations, ``"bf16"`` or ``"fp32"``.
        weights: dtype of weights; by default that of the rows. fp32 beside bf16 rows is what autocast gives.
    """
    from lightning_sonar.backends.scattermoe.launch import GROUPED, SLOT, TOKEN

    hidden, both, inner = shape.hidden, 2 * shape.inner, shape.inner
    base = (shape, target, rows, weights or rows)
    along_k, along_n = "stride_wk", "stride_wn"
    return [
        _product(*base, "up", hidden, both, along_k, (TOKEN, GROUPED)),
        _product(*base, "down", inner, hidden, along_k, (GROUPED, SLOT), scaled=True),
        _product(*base, "down_dx", hidden, inner, along_n, (TOKEN, GROUPED)),
        _weight_grad(*base, "down_dw", (hidden, inner), (TOKEN, GROUPED)),
        _product(*base, "up_dx", both, hidden, along_n, (GROUPED, SLOT)),
        _weight_grad(*base, "up_dw", (both, hidden), (GROUPED, TOKEN)),
    ]
