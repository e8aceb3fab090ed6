"""The fused AdamW update in plain torch: what `kernels.py` computes, one readable line per operation.

Every operation is a single IEEE-754 fp32 multiply, add, divide or square root in the kernel's order, so the
kernel (on a GPU or in Triton's interpreter) and this file agree bit for bit. It is also the path for devices
with neither Triton nor a fused kernel in torch, and for tensors whose strides a fused kernel cannot walk.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_sonar.optim.stochastic import StochasticRounding, round_to_bf16

__all__ = ["adamw_in_chunks_", "adamw_reference_", "bias_correction", "squared_norm"]

# Elements a chunk of `adamw_in_chunks_`: its temporaries take 40 bytes an element, 40 MiB in all.
CHUNK = 2**20

# expm1's Taylor coefficients from y**8 down to y**2. At |y| <= 1/2 the first one left out is below 2**-27.
_TAYLOR = (1 / 40320, 1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)

# exp(-32) is far below half an ulp of 1, so from here on the correction is 1 in fp32.
_LOWEST_EXPONENT = -32.0


def log_beta(beta: float) -> float:
    """Natural logarithm of `beta`, finite for 0 as well (small enough that the correction is exactly 1)."""
    return math.log(max(beta, 1e-30))


def bias_correction(step: Tensor, beta: float) -> Tensor:
    """`1 - beta**step` to within a few fp32 ulps, for any step from 1 on.

    `1 - exp2(step * log2(beta))` in fp32 cancels: at step 1 with beta 0.999 it is wrong by 6e-5. Here expm1
    is evaluated directly, at a 64th of the exponent, and doubled six times by `expm1(2y) = m * (m + 2)`.

    Args:
        step: fp32, any shape; the update's number, counted from 1.
        beta: decay rate in [0, 1).

    Returns:
        fp32, the shape of `step`.
    """
    exponent = (step * log_beta(beta)).clamp(min=_LOWEST_EXPONENT)
    y = exponent * (1 / 64)
    series = torch.full_like(y, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        series = series * y + coefficient
    m = y + (y * y) * series
    for _ in range(6):
        m = m * (m + 2.0)
    return -m


def _scalar(value: float | Tensor) -> Tensor:
    """`value` as an fp32 scalar tensor; a Python number stays on the CPU: torch treats that as a number."""
    return value.float() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


def _sqrt(value: Tensor) -> Tensor:
    """The correctly rounded root of an fp32 tensor.

    On CPUs torch's own may be an ulp off, in most builds for x86. A root in fp64 decides every fp32 rounding rightly.
    """
    return value.double().sqrt_().float() if value.device.type == "cpu" else value.sqrt()


def squared_norm(grad: Tensor) -> Tensor:
    """The sum of the squares of all elements, fp32 and 0-dim, without an fp32 copy of a bf16 gradient."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    return torch.linalg.vector_norm(grad, dtype=wide).square().float()


@torch.no_grad()
def adamw_reference_(
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
    """One AdamW update in place: fp32 arithmetic, one rounding (to nearest even) back to each tensor's dtype.

    With an fp64 tensor among them the arithmetic is fp64, but for the bias corrections.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the order of
    torch's CUDA kernel behind `torch.optim.AdamW(fused=True)`, which divides where this multiplies by
    `to_unbiased`: half an fp32 ulp of the denominator.

    Args:
        param: any shape, bf16 or fp32; updated in place.
        grad: the shape of `param`, bf16 or fp32; read only.
        exp_avg: first moment, the shape of `param`, bf16 or fp32; updated in place.
        exp_avg_sq: second moment, likewise.
        step: fp32 scalar, the number of updates made so far; advanced by one.
        lr: learning rate, a number or a scalar tensor.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        grad_scale: scalar; the gradient is multiplied by it and rounded to its own dtype before the update,
            as clipping would do.
        found_inf: scalar; where it is not zero nothing is written and `step` does not advance.
        grad_sq_sum: fp32, 0-dim; the sum of the squares of the gradient as it came (not scaled) is added to it.
        rounding: for a bf16 `param`: round it stochastically instead. Ignored for other dtypes.
    """
    go = None if found_inf is None else (found_inf.to(param.device) == 0).reshape(())
    double = any(tensor.dtype == torch.float64 for tensor in (param, grad, exp_avg, exp_avg_sq))
    wide = torch.float64 if double else torch.float32
    rate = _scalar(lr)
    next_step = step + 1.0
    step_size = rate / bias_correction(next_step, beta1)
    to_unbiased = 1.0 / _sqrt(bias_correction(next_step, beta2))

    if grad_sq_sum is not None:
        found = squared_norm(grad)
        grad_sq_sum.add_(found if go is None else torch.where(go, found, 0.0))
    g = grad.to(wide)
    if grad_scale is not None:
        g = (g * grad_scale.float().reshape(())).to(grad.dtype).to(wide)
    if maximize:
        g = -g
    p = param.to(wide)
    p = p - (rate * _scalar(weight_decay)) * p
    m = exp_avg.to(wide) * beta1 + g * (1.0 - beta1)
    v = exp_avg_sq.to(wide) * beta2 + (g * g) * (1.0 - beta2)
    p = p - (step_size * m) / ((v.sqrt() if double else _sqrt(v)) * to_unbiased + eps)

    for target, value in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
        if rounding is not None and target is param and param.dtype == torch.bfloat16:
            rounded = round_to_bf16(value, rounding.bits_for(param, next_step))
        else:
            rounded = value.to(target.dtype)
        target.copy_(rounded if go is None else torch.where(go, rounded, target))
    step.add_(1.0 if go is None else go)


@torch.no_grad()
def adamw_in_chunks_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    rounding: StochasticRounding,
    **settings: Any,
) -> None:
    """`adamw_reference_` on 2**20 elements at a time, so that its fp32 temporaries stay small whatever the tensor.

    Arguments as there. The tensors are dense and have the same strides; they are walked in memory order.
    """
    n = param.numel()
    runs = [tensor.as_strided((n,), (1,)) for tensor in (param, grad, exp_avg, exp_avg_sq)]
    # A plan wants to know what the chunks take, and each takes the same.
    end = min(n, CHUNK) if isinstance(param, FakeTensor) else n
    for first in range(0, max(end, 1), CHUNK):
        count = step.clone()
        here = dataclasses.replace(rounding, offset=rounding.offset + first)
        p, g, m, v = (run[first : first + CHUNK] for run in runs)
        adamw_reference_(p, g, m, v, count, rounding=here, **settings)
        if first + CHUNK >= end:
            step.copy_(count)
