"""The fused AdamW update as one Triton kernel a tensor: 14 bytes moved per bf16 parameter, in a single pass.

Importing this module needs Triton; `adamw.py` does so only for tensors on a GPU. The arithmetic is that of
`reference.py`, bit for bit, and the random bits of stochastic rounding are those of `stochastic.py`. There is no
autotuning: it would run the in-place update many times.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sonar.optim.reference import log_beta
from lightning_sonar.optim.stochastic import LANES, StochasticRounding

__all__ = ["adamw_kernel", "block_size", "launch_adamw"]

NUM_WARPS = 4


@triton.jit
def _bias_correction(step: tl.tensor, log_beta: tl.tensor) -> tl.tensor:
    # The same operations as reference.bias_correction, which says why it is done this way.
    y = tl.maximum(step * log_beta, -32.0) * (1 / 64)
    series = y * (1 / 40320) + (1 / 5040)
    series = series * y + (1 / 720)
    series = series * y + (1 / 120)
    series = series * y + (1 / 24)
    series = series * y + (1 / 6)
    series = series * y + (1 / 2)
    m = y + (y * y) * series
    for _ in tl.static_range(6):  # pyright: ignore[reportGeneralTypeIssues]
        m = m * (m + 2.0)
    return -m


@triton.jit
def _round(x: tl.tensor, like_ptr: tl.tensor, ROUND_BY_BITS: tl.constexpr) -> tl.tensor:
    # fp32 to what like_ptr points to. A GPU rounds to nearest even; Triton's interpreter truncates to bf16,
    # so there it is spelled out.
    dtype: tl.constexpr = like_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    if ROUND_BY_BITS and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        # The sum could carry a NaN over into zero; setting a mantissa bit that stays keeps it a NaN.
        bits = tl.where(x == x, nearest, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)  # pyright: ignore[reportArgumentType]


@triton.jit
def _random_bits(
    seed: tl.tensor,
    position: tl.tensor,
    step: tl.tensor,
    first: tl.tensor,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    # StochasticRounding.bits_for, for BLOCK elements from `first` on: uint32 below 2**16.
    c2 = position.to(tl.uint32)
    c3 = step.to(tl.int32).to(tl.uint32)
    if ALIGNED:
        # One call for eight elements, which lie in one thread: nothing crosses between threads.
        groups = (first >> 3) + tl.arange(0, BLOCK // 8)
        r0, r1, r2, r3 = tl.philox(seed, groups.to(tl.uint32), (groups >> 32).to(tl.uint32), c2, c3)
        words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
        return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BLOCK])
    # A slice that begins inside a group of eight: one call for each element.
    places = first + tl.arange(0, BLOCK)
    groups = places >> 3
    lane = places & 7
    r0, r1, r2, r3 = tl.philox(seed, groups.to(tl.uint32), (groups >> 32).to(tl.uint32), c2, c3)
    word = tl.where(lane < 4, tl.where(lane < 2, r0, r1), tl.where(lane < 6, r2, r3))
    return tl.where((lane & 1) == 0, word & 0xFFFF, word >> 16)


@triton.jit
def _round_to_bf16(x: tl.tensor, random_bits: tl.tensor) -> tl.tensor:
    # stochastic.round_to_bf16, which says why it is done this way.
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(finite, bits + random_bits, tl.where(x == x, bits, bits | 0x400000))
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


# Not specialized: these differ from tensor to tensor, and every value of 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["seed", "position", "base"])
def adamw_kernel(
    param_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    step_ptr: tl.tensor,
    lr_ptr: tl.tensor,
    grad_scale_ptr: tl.tensor,
    found_inf_ptr: tl.tensor,
    grad_sq_ptr: tl.tensor,
    lr: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    log_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    log_beta2: tl.tensor,
    eps: tl.tensor,
    weight_decay: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    base: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    HAS_LR_TENSOR: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FLAG: tl.constexpr,
    HAS_SUM: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROUND_BY_BITS: tl.constexpr,
) -> None:
    """Update elements `[pid * BLOCK, (pid + 1) * BLOCK)` of `n`; arguments as in `launch_adamw`."""
    # 64-bit before the product: pid * BLOCK exceeds 2**31 in a tensor of more than 2**31 elements.
    block_start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = block_start + tl.arange(0, BLOCK)
    mask = offsets < n
    if HAS_FLAG:
        # With the flag up every lane is masked, so the block touches no memory. Broadcast before comparing:
        # the interpreter broadcasts a scalar comparison as floats.
        mask = mask & (tl.broadcast_to(tl.load(found_inf_ptr), [BLOCK]) == 0.0)
    if HAS_LR_TENSOR:
        lr = tl.load(lr_ptr)

    step = tl.load(step_ptr) + 1.0
    step_size = tl.div_rn(lr, _bias_correction(step, log_beta1))
    # A reciprocal for the block: a division for each element would cost a sixth of all instructions.
    to_unbiased = tl.div_rn(1.0, tl.sqrt_rn(_bias_correction(step, log_beta2)))

    p = tl.load(param_ptr + offsets, mask=mask).to(tl.float32)
    g = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    m = tl.load(exp_avg_ptr + offsets, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask).to(tl.float32)

    if HAS_SUM:
        # One partial sum a block: an atomic add would sum in another order each time.
        tl.store(grad_sq_ptr + tl.program_id(0), tl.sum(tl.where(mask, g * g, 0.0)))
    if HAS_SCALE:
        g = _round(g * tl.load(grad_scale_ptr), grad_ptr, ROUND_BY_BITS).to(tl.float32)
    if MAXIMIZE:
        g = -g
    p = p - (lr * weight_decay) * p
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    denominator = tl.sqrt_rn(v) * to_unbiased + eps
    p = p - tl.div_rn(step_size * m, denominator)

    if STOCHASTIC:
        random_bits = _random_bits(seed, position, step, base + block_start, BLOCK, ALIGNED)
        tl.store(param_ptr + offsets, _round_to_bf16(p, random_bits), mask=mask)
    else:
        tl.store(param_ptr + offsets, _round(p, param_ptr, ROUND_BY_BITS), mask=mask)
    tl.store(exp_avg_ptr + offsets, _round(m, exp_avg_ptr, ROUND_BY_BITS), mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, _round(v, exp_avg_sq_ptr, ROUND_BY_BITS), mask=mask)


# Whether the kernel runs in the interpreter is settled when it is decorated, not when it is launched.
_INTERPRETED = not isinstance(adamw_kernel, triton.runtime.JITFunction)


def block_size(backend: str) -> int:
    """Elements a program handles on Triton's `backend` ("cuda" or "hip").

    Eight bf16 elements, 128 bits, for each thread of four warps: a warp has 32 threads on NVIDIA, 64 on AMD.
    """
    return 2048 if backend == "hip" else 1024


def launch_adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_sq_sum: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> None:
    """One AdamW update in place, without a host sync; arguments and arithmetic as in `adamw_reference_`.

    The kernel walks memory, not indices: `param`, `grad` and both moments must have the same shape and
    strides and be dense, which the caller sees to. `step` and `grad_sq_sum` live on the device of `param`.
    `rounding` needs a bf16 `param`.
    """
    n = param.numel()
    scale = None if grad_scale is None else grad_scale.to(param.device, torch.float32)
    flag = None if found_inf is None else found_inf.to(param.device, torch.float32)
    rate = lr.to(param.device, torch.float32) if isinstance(lr, Tensor) else None
    if n:
        block = block_size("hip" if torch.version.hip else "cuda")
        blocks = triton.cdiv(n, block)
        partial = None if grad_sq_sum is None else torch.empty(blocks, dtype=torch.float32, device=param.device)
        # Triton launches on the current device. For a CPU tensor, in the interpreter, this changes nothing.
        with torch.cuda.device_of(param):
            launch: Any = adamw_kernel[(blocks,)]
            launch(
                param,
                grad,
                exp_avg,
                exp_avg_sq,
                step,
                # Whichever pointer is unused is never followed; `step` only fills its place.
                step if rate is None else rate,
                step if scale is None else scale,
                step if flag is None else flag,
                step if partial is None else partial,
                0.0 if isinstance(lr, Tensor) else float(lr),
                beta1,
                1.0 - beta1,
                log_beta(beta1),
                beta2,
                1.0 - beta2,
                log_beta(beta2),
                eps,
                weight_decay,
                0 if rounding is None else rounding.seed,
                0 if rounding is None else rounding.position,
                0 if rounding is None else rounding.offset,
                n,
                BLOCK=block,
                MAXIMIZE=maximize,
                HAS_LR_TENSOR=rate is not None,
                HAS_SCALE=scale is not None,
                HAS_FLAG=flag is not None,
                HAS_SUM=partial is not None,
                STOCHASTIC=rounding is not None,
                ALIGNED=rounding is None or rounding.offset % LANES == 0,
                ROUND_BY_BITS=_INTERPRETED,
                num_warps=NUM_WARPS,
                # Set, not left to Triton's default, which differs between versions: a fused multiply-add
                # would round differently from the reference.
                enable_fp_fusion=False,
            )
        if grad_sq_sum is not None and partial is not None:
            # Blocks that the flag stopped have written zero.
            grad_sq_sum.add_(partial.sum())
    # After the launch, on the same stream: the kernel has read the count before it moves on.
    step.add_(1.0 if flag is None else (flag == 0).reshape(step.shape))
