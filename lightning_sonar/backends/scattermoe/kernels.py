"""The ScatterMoE products as Triton kernels: rows are gathered and scattered while they are multiplied.

The idea is ScatterMoE's (arXiv 2403.08245): tokens are never copied into an order by expert and never padded; a sorted
index says which row comes next. Importing this module needs Triton; `functional.py` calls it.

Rows exist in three orders. *Slots* are the (token, k) pairs as the router gave them, slot ``token * k + i``. *Grouped*
rows are the slots sorted by expert; `order[position]` is the slot. *Token* rows are shared by the k slots of a token.
Pairs whose expert is the number of experts (ids that expert parallelism leaves to other ranks) form one more group at
the end, whose products are zero.

Sums are in fp32 and in a fixed order, there are no atomics, and offsets are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_sonar.optim.kernels import _round

__all__ = [
    "GROUPED",
    "INTERPRETED",
    "SLOT",
    "TOKEN",
    "bias_grad_kernel",
    "product_kernel",
    "weigh_kernel",
    "weight_grad_kernel",
]

GROUPED = tl.constexpr(0)
SLOT = tl.constexpr(1)
TOKEN = tl.constexpr(2)


@triton.jit
def _row(
    order_ptr: tl.tensor, position: tl.tensor, inside: tl.tensor, BY: tl.constexpr, TOP_K: tl.constexpr
) -> tl.tensor:
    # Where the row at a grouped position lies in memory.
    if BY == GROUPED:
        return position.to(tl.int64)
    slot = tl.load(order_ptr + position.to(tl.int64), mask=inside, other=0)
    if BY == TOKEN:
        return slot // TOP_K
    return slot


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, sums: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    if INTERPRETED:
        # The interpreter multiplies the bits of bf16 numbers as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def product_kernel(
    a_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    num_cols: tl.tensor,
    depth: tl.tensor,
    stride_a: tl.tensor,
    stride_we: tl.tensor,
    stride_wk: tl.tensor,
    stride_wn: tl.tensor,
    A_BY: tl.constexpr,
    OUT_BY: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One block of ``out[row] = (a[row] @ w[expert] + bias[expert]) * scale[slot]``; see `functional.product`.

    `offsets_ptr` has where each expert's grouped rows start, and where the last one's end: ``[num_experts + 1]``.
    The grid is an upper bound, so that no count has to travel to the host; blocks past the last row do nothing.
    """
    blocks_n = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0)
    block = pid // blocks_n

    # Each program finds its group itself: blocks before it, summed over groups. GROUPS is a power of two.
    group_index = tl.arange(0, GROUPS).to(tl.int64)
    group_start = tl.load(offsets_ptr + group_index, mask=group_index <= num_experts, other=num_rows)
    group_end = tl.load(offsets_ptr + (group_index + 1), mask=group_index < num_experts, other=num_rows)
    blocks = (group_end - group_start + BLOCK_M - 1) // BLOCK_M
    passed = tl.cumsum(blocks, 0) <= block
    group = tl.sum(passed.to(tl.int32), 0)
    if group > num_experts:
        return
    first = block - tl.sum(tl.where(passed, blocks, 0), 0)
    here = group_index == group
    start = tl.sum(tl.where(here, group_start, 0), 0) + first * BLOCK_M
    end = tl.sum(tl.where(here, group_end, 0), 0)
    is_expert = group < num_experts

    position = start + tl.arange(0, BLOCK_M)
    inside = position < end
    col = (pid % blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_row = _row(order_ptr, position, inside, A_BY, TOP_K)
    a_ptrs = a_ptr + a_row[:, None] * stride_a + k[None, :]
    w_ptrs = w_ptr + group.to(tl.int64) * stride_we + k[:, None] * stride_wk + col[None, :] * stride_wn
    a_step = tl.full((), BLOCK_K, tl.int64)
    w_step = a_step * stride_wk

    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    a_mask = inside[:, None]
    w_mask = (col < num_cols)[None, :]
    for done in range(0, tl.where(is_expert, depth, 0), BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=a_mask, other=0.0)
            w = tl.load(w_ptrs, mask=w_mask, other=0.0)
        else:
            left = k < depth - done
            a = tl.load(a_ptrs, mask=a_mask & left[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=w_mask & left[:, None], other=0.0)
        # Under autocast the weight is fp32 and the rows are not: rounded here, no copy of the weight is ever made.
        sums = _dot(a, _round(w.to(tl.float32), a_ptr, INTERPRETED) if w.dtype != a.dtype else w, sums, INTERPRETED)
        a_ptrs += a_step
        w_ptrs += w_step

    if HAS_BIAS:
        bias_ptrs = bias_ptr + group.to(tl.int64) * num_cols + col
        bias = tl.load(bias_ptrs, mask=col < tl.where(is_expert, num_cols, 0), other=0.0).to(tl.float32)
        sums += bias[None, :]
    if HAS_SCALE:
        slot = _row(order_ptr, position, inside, SLOT, TOP_K)
        sums *= tl.load(scale_ptr + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
    out_row = _row(order_ptr, position, inside, OUT_BY, TOP_K)
    out_ptrs = out_ptr + out_row[:, None] * num_cols + col[None, :]
    tl.store(out_ptrs, _round(sums, out_ptr, INTERPRETED), mask=a_mask & w_mask)


@triton.jit
def weight_grad_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_a: tl.tensor,
    num_b: tl.tensor,
    A_BY: tl.constexpr,
    B_BY: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One block of ``out[expert] = a[rows of the expert].T @ b[rows of the expert]``, ``[num_a, num_b]``.

    The expert's rows are taken in grouped order, so the sum is the same each time; without rows it is zero.
    """
    blocks_b = tl.cdiv(num_b, BLOCK_B)
    per_expert = tl.cdiv(num_a, BLOCK_A) * blocks_b
    pid = tl.program_id(0)
    expert = pid // per_expert
    within = pid % per_expert
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)

    a_col = (within // blocks_b).to(tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)
    b_col = (within % blocks_b).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    a_mask = (a_col < num_a)[:, None]
    b_mask = (b_col < num_b)[None, :]
    sums = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    for first in range(start, end, BLOCK_R):
        position = first + tl.arange(0, BLOCK_R)
        inside = position < end
        a_row = _row(order_ptr, position, inside, A_BY, TOP_K)
        b_row = _row(order_ptr, position, inside, B_BY, TOP_K)
        a = tl.load(a_ptr + a_row[None, :] * num_a + a_col[:, None], mask=a_mask & inside[None, :], other=0.0)
        b = tl.load(b_ptr + b_row[:, None] * num_b + b_col[None, :], mask=b_mask & inside[:, None], other=0.0)
        sums = _dot(a, b, sums, INTERPRETED)

    out_row = expert.to(tl.int64) * num_a + a_col
    out_ptrs = out_ptr + out_row[:, None] * num_b + b_col[None, :]
    tl.store(out_ptrs, _round(sums, out_ptr, INTERPRETED), mask=a_mask & b_mask)


@triton.jit
def bias_grad_kernel(
    a_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_cols: tl.tensor,
    A_BY: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One block of ``out[expert] = sum of a[row] * scale[slot]`` over the expert's rows, in grouped order."""
    blocks_n = tl.cdiv(num_cols, BLOCK_N)
    expert = tl.program_id(0) // blocks_n
    col = (tl.program_id(0) % blocks_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(start, end, BLOCK_R):
        position = first + tl.arange(0, BLOCK_R)
        inside = position < end
        row = _row(order_ptr, position, inside, A_BY, TOP_K)
        a_ptrs = a_ptr + row[:, None] * num_cols + col[None, :]
        a = tl.load(a_ptrs, mask=inside[:, None] & (col < num_cols)[None, :], other=0.0).to(tl.float32)
        if HAS_SCALE:
            slot = _row(order_ptr, position, inside, SLOT, TOP_K)
            a *= tl.load(scale_ptr + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        sums += tl.sum(a, 0)
    tl.store(out_ptr + expert.to(tl.int64) * num_cols + col, _round(sums, out_ptr, INTERPRETED), mask=col < num_cols)


@triton.jit
def weigh_kernel(
    act_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    scale_grad_ptr: tl.tensor,
    weighed_ptr: tl.tensor,
    order_ptr: tl.tensor,
    num_cols: tl.tensor,
    HAS_GRAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """One grouped row of the routing weights' part in backward.

    With `HAS_GRAD`, the gradient of the slot's weight, ``act . grad``, and `grad` scaled by the weight, in place;
    without, ``weighed = act * weight``.
    """
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + position)
    scale = tl.load(scale_ptr + slot).to(tl.float32)
    products = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for first in range(0, num_cols, BLOCK_N):  # pyright: ignore[reportArgumentType]
        col = first + tl.arange(0, BLOCK_N)
        inside = col < num_cols
        offset = position * num_cols + col
        act = tl.load(act_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if HAS_GRAD:
            grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            products += act * grad
            tl.store(grad_ptr + offset, _round(grad * scale, grad_ptr, INTERPRETED), mask=inside)
        else:
            tl.store(weighed_ptr + offset, _round(act * scale, weighed_ptr, INTERPRETED), mask=inside)
    if HAS_GRAD:
        tl.store(scale_grad_ptr + slot, tl.sum(products, 0))


# Whether kernels run in the interpreter is settled when they are decorated, not when they are launched.
INTERPRETED = not isinstance(product_kernel, triton.runtime.JITFunction)
