"""liger-kernel's fused linear cross-entropy, if it is installed and the device has it.

Its own autograd function makes all gradients in the forward, keeps them until backward and scales them in place there,
so that a second backward over the same graph would scale twice. Here it runs once without gradients in the forward, and
once more in the backward: one more product, and nothing of the weight's size alive in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_sonar.losses import IGNORED


@cache
def _fused() -> Callable[..., Tensor] | None:
    try:
        from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
            liger_fused_linear_cross_entropy,
        )
    except ImportError:
        return None
    # Before 0.6.4 the weight's gradient could only be summed over chunks in its own dtype, rounding at each.
    if "accum_dtype" not in inspect.signature(liger_fused_linear_cross_entropy).parameters:
        return None
    return liger_fused_linear_cross_entropy


def liger_takes(hidden: Tensor) -> bool:
    """Whether liger-kernel is installed, new enough (0.6.4), and has a kernel for the device of ``hidden``."""
    return hidden.device.type == "cuda" and _fused() is not None


def liger_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Tensor,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """The mean loss by liger's kernel, float32 and 0-dim; 0 if no token counts.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``.
        bias: ``[V]`` or ``None``.
        wanted: int64 ``[N]``, the token to predict at each position, `IGNORED` where none counts.
        dtype: what the products run in.
        scale: factor on the logits. The kernel knows none, so ``hidden`` and ``bias`` are scaled before it.
        softcap: as in `chunked_cross_entropy`.
    """
    if scale != 1.0:
        hidden = hidden * scale
        bias = None if bias is None else bias * scale
    return _Liger.apply(hidden, weight, bias, wanted, dtype, softcap).float()


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, dtype: torch.dtype, softcap: float | None
) -> Tensor:
    fused = _fused()
    if fused is None:
        raise RuntimeError("liger-kernel 0.6.4 or newer is not installed. Install lightning-sonar[liger].")
    return fused(
        hidden.to(dtype),
        weight.to(dtype),
        wanted,
        bias=None if bias is None else bias.to(dtype),
        ignore_index=IGNORED,
        reduction="mean",
        softcap=softcap,
        accum_dtype=torch.float32,
    )


class _Liger(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Tensor,
        dtype: torch.dtype,
        softcap: float | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, wanted)
        ctx.settings = dtype, softcap
        # Detached, or the kernel would make gradients now.
        return _run(hidden.detach(), weight.detach(), None if bias is None else bias.detach(), wanted, dtype, softcap)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator makes ctx positional
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        *inputs, wanted = ctx.saved_tensors
        # The kernel makes no gradient at all unless the hidden states ask for theirs.
        needed = ctx.needs_input_grad[:3]
        asks = (True, *needed[1:])
        leaves = [None if t is None else t.detach().requires_grad_(ask) for t, ask in zip(inputs, asks, strict=True)]
        with torch.enable_grad(), torch.autocast(wanted.device.type, enabled=False):
            loss = _run(*leaves, wanted, *ctx.settings)  # type: ignore[arg-type]
        asked = [leaf for leaf, need in zip(leaves, needed, strict=True) if need and leaf is not None]
        # With a gradient of 1 the kernel leaves its gradients as they are; they are scaled here, once.
        found = iter(torch.autograd.grad(loss, asked))
        made = [next(found).mul_(grad_outputs[0]) if need else None for need in needed]
        return (*made, None, None, None)
