"""Launches the kernels: shapes checked once, tiles chosen, nothing read back to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_sonar.backends.scattermoe import kernels, tiles
from lightning_sonar.backends.scattermoe.kernels import INTERPRETED

__all__ = ["GROUPED", "SLOT", "TOKEN", "Routing", "bias_grad", "product", "route", "scale_grad", "weigh", "weight_grad"]

# The kernels' names for the three orders of rows, as plain numbers.
GROUPED: int = kernels.GROUPED.value
SLOT: int = kernels.SLOT.value
TOKEN: int = kernels.TOKEN.value


@dataclass(frozen=True)
class Routing:
    """The order in which rows meet their experts.

    Attributes:
        order: the slot of each grouped position, ``[T * k]`` int64.
        offsets: where each expert's grouped rows start, and where the last one's end, ``[E + 1]`` int32.
        top_k: slots a token has.
    """

    order: Tensor
    offsets: Tensor
    top_k: int

    @property
    def num_rows(self) -> int:
        return self.order.shape[0]

    @property
    def num_experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def per_expert(self) -> int:
        """Rows an expert has on average: the counts themselves are on the device, and stay there."""
        return -(-self.num_rows // self.num_experts)


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Sort the (token, k) pairs by expert.

    Args:
        top_k_index: experts of each token, ``[T, k]``; ids from ``num_experts`` on belong to other ranks, those below
            0 to no expert. Neither contributes anything.
        num_experts: experts here.

    Raises:
        ValueError: for more pairs than 32-bit counts hold.
    """
    if top_k_index.numel() >= 2**31:
        raise ValueError(
            f"{top_k_index.numel()} (token, k) pairs in a batch: expected fewer than 2**31. Split the batch."
        )
    # To the end, where the kernels write zeros: rows before the first expert's would be written by nobody.
    expert = top_k_index.reshape(-1).masked_fill(top_k_index.reshape(-1) < 0, num_experts)
    # Stable, so that an expert's rows are always summed in the order of their tokens.
    expert, order = torch.sort(expert, stable=True)
    bounds = torch.arange(num_experts + 1, device=expert.device, dtype=expert.dtype)
    return Routing(order, torch.searchsorted(expert, bounds, out_int32=True), top_k_index.shape[1])


def _ready(out: Tensor) -> bool:
    # Fake tensors have a shape and no memory: memory plans run the model on them.
    return out.numel() > 0 and not isinstance(out, FakeTensor)


def product(
    a: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    a_by: int = GROUPED,
    out_by: int = GROUPED,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """``out[row] = (a[row] @ weight[expert] + bias[expert]) * scale[slot]``, summed in fp32.

    Args:
        a: the rows, ``[T, K]`` by token or ``[T * k, K]``; which one, ``a_by`` says.
        weight: ``[E, K, N]``; any strides, so that a transposed view costs nothing.
        routing: of the tokens.
        a_by: order of the rows of ``a``: `GROUPED`, `SLOT` or `TOKEN`.
        out_by: order of the rows of the result: `GROUPED` or `SLOT`.
        bias: ``[E, N]``.
        scale: ``[T * k]``, by slot.

    Returns:
        ``[T * k, N]`` in the dtype of ``a``.
    """
    a = a.contiguous()
    experts, depth, cols = weight.shape
    out = torch.empty((routing.num_rows, cols), dtype=a.dtype, device=a.device)
    if not _ready(out):
        return out
    device = tiles.device_of(a.device, INTERPRETED)
    tile = tiles.row_tiles(routing.per_expert, cols, depth, a.element_size(), weight.element_size(), device)
    # Every group, and the rows of other ranks are one, ends in at most one block that is not full.
    blocks = min(triton.cdiv(routing.num_rows, tile.rows) + experts, routing.num_rows)
    with torch.cuda.device_of(a):
        launch: Any = kernels.product_kernel[(blocks * triton.cdiv(cols, tile.cols),)]
        launch(
            a,
            weight,
            # Whichever pointer is unused is never read; `a` only fills its place.
            a if bias is None else bias.contiguous(),
            a if scale is None else scale.contiguous(),
            out,
            routing.order,
            routing.offsets,
            routing.num_rows,
            experts,
            cols,
            depth,
            a.stride(0),
            *weight.stride(),
            A_BY=a_by,
            OUT_BY=out_by,
            TOP_K=routing.top_k,
            HAS_BIAS=bias is not None,
            HAS_SCALE=scale is not None,
            GROUPS=triton.next_power_of_2(experts + 1),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.cols,
            BLOCK_K=tile.depth,
            EVEN_K=depth % tile.depth == 0,
            INTERPRETED=INTERPRETED,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
    return out


def weight_grad(
    a: Tensor, b: Tensor, routing: Routing, dtype: torch.dtype, *, a_by: int = GROUPED, b_by: int = GROUPED
) -> Tensor:
    """``out[expert] = a[rows].T @ b[rows]`` over the expert's rows in grouped order; zeros for an expert without rows.

    Args:
        a: ``[rows, M]``, in the order ``a_by``.
        b: ``[rows, N]``, in the order ``b_by``.
        routing: of the tokens.
        dtype: of the result, that of the parameter.
        a_by: order of the rows of ``a``.
        b_by: order of the rows of ``b``.

    Returns:
        ``[E, M, N]``, contiguous.
    """
    a, b = a.contiguous(), b.contiguous()
    rows, cols = a.shape[1], b.shape[1]
    out = torch.empty((routing.num_experts, rows, cols), dtype=dtype, device=a.device)
    if not _ready(out):
        return out
    device = tiles.device_of(a.device, INTERPRETED)
    tile = tiles.grad_tiles(routing.per_expert, rows, cols, a.element_size(), device)
    grid = routing.num_experts * triton.cdiv(rows, tile.rows) * triton.cdiv(cols, tile.cols)
    with torch.cuda.device_of(a):
        launch: Any = kernels.weight_grad_kernel[(grid,)]
        launch(
            a,
            b,
            out,
            routing.order,
            routing.offsets,
            rows,
            cols,
            A_BY=a_by,
            B_BY=b_by,
            TOP_K=routing.top_k,
            BLOCK_A=tile.rows,
            BLOCK_B=tile.cols,
            BLOCK_R=tile.depth,
            INTERPRETED=INTERPRETED,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )
    return out


def bias_grad(
    a: Tensor, routing: Routing, dtype: torch.dtype, *, a_by: int = GROUPED, scale: Tensor | None = None
) -> Tensor:
    """``out[expert]``: the sum of ``a[row] * scale[slot]`` over the expert's rows, ``[E, N]`` in ``dtype``."""
    a = a.contiguous()
    out = torch.empty((routing.num_experts, a.shape[1]), dtype=dtype, device=a.device)
    if not _ready(out):
        return out
    block_n = min(triton.next_power_of_2(a.shape[1]), 128)
    with torch.cuda.device_of(a):
        launch: Any = kernels.bias_grad_kernel[(routing.num_experts * triton.cdiv(a.shape[1], block_n),)]
        launch(
            a,
            a if scale is None else scale.contiguous(),
            out,
            routing.order,
            routing.offsets,
            a.shape[1],
            A_BY=a_by,
            TOP_K=routing.top_k,
            HAS_SCALE=scale is not None,
            BLOCK_N=block_n,
            BLOCK_R=32,
            INTERPRETED=INTERPRETED,
            enable_fp_fusion=True,
        )
    return out


def _weigh(act: Tensor, grad: Tensor | None, scale: Tensor, out: Tensor, routing: Routing) -> None:
    if not _ready(act):
        return
    with torch.cuda.device_of(act):
        launch: Any = kernels.weigh_kernel[(routing.num_rows,)]
        launch(
            act,
            act if grad is None else grad,
            scale.contiguous(),
            out,
            out,
            routing.order,
            act.shape[1],
            HAS_GRAD=grad is not None,
            BLOCK_N=min(triton.next_power_of_2(act.shape[1]), 1024),
            INTERPRETED=INTERPRETED,
            enable_fp_fusion=True,
        )


def scale_grad(act: Tensor, grad: Tensor, scale: Tensor, routing: Routing) -> Tensor:
    """The gradient of ``scale``, ``act[row] . grad[row]`` in fp32 by slot; scales ``grad`` in place as well.

    Args:
        act: grouped rows, ``[T * k, I]``.
        grad: gradient of the unscaled rows, of the same shape, contiguous; afterwards it is that of the scaled ones.
        scale: ``[T * k]``, by slot.
        routing: of the tokens.
    """
    out = torch.empty(routing.num_rows, dtype=torch.float32, device=act.device)
    _weigh(act.contiguous(), grad, scale, out, routing)
    return out


def weigh(act: Tensor, scale: Tensor, routing: Routing) -> Tensor:
    """``act[row] * scale[slot]`` for grouped rows, ``[T * k, I]``."""
    act = act.contiguous()
    out = torch.empty_like(act)
    _weigh(act, None, scale, out, routing)
    return out
