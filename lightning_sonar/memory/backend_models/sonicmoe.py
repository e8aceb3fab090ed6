"""SonicMoE's allocations: forward keeps the layer's input and the first product, backward recomputes the activation.

Source: Guo et al., "SonicMoE: Accelerating MoE with IO and Tile-aware Optimizations" (arXiv 2512.14080). Only shapes
are computed: on real tensors the results would be garbage, so real tensors are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class _Up(torch.autograd.Function):
    """Both halves of the first product, and the gated activation, which the kernel's epilogue writes beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.pairs = pairs
        both = x.new_empty(pairs, weight.shape[0])  # [T * k, 2I]
        activated = x.new_empty(pairs, weight.shape[0] // 2)  # [T * k, I]
        ctx.mark_non_differentiable(activated)
        return both, activated

    @staticmethod
    def backward(ctx: Any, grad_both: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_weight = torch.empty_like(weight)  # a view's strides: contiguous as [E, 2I, H]
        expanded = x.new_empty(ctx.pairs, x.shape[1])  # [T * k, H]
        grad_x = torch.empty_like(x)
        del expanded
        return grad_x, grad_weight, None


class _Down(torch.autograd.Function):
    """The second product and the weighted sum over each token's experts."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, activated: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
        ctx.save_for_backward(both, weight, scores)
        expanded = both.new_empty(both.shape[0], weight.shape[0])  # [T * k, H]
        out = both.new_empty(scores.shape[0], weight.shape[0])  # [T, H]
        del expanded
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:  # type: ignore[override]
        both, weight, scores = ctx.saved_tensors
        # One kernel gathers the output's gradient, forms both halves' gradient and the activation times its score.
        grad_both = torch.empty_like(both)
        activated = both.new_empty(both.shape[0], both.shape[1] // 2)
        grad_scores = torch.empty_like(scores)
        grad_weight = torch.empty_like(weight)
        del activated
        return grad_both, None, grad_weight, grad_scores


def sonicmoe_model_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module in shapes only.

    Args:
        self: the experts module, ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``.
        hidden_states: ``[T, H]``, fake.
        top_k_index: ``[T, k]``.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, H]``, fake.

    Raises:
        TypeError: for real tensors.
        ValueError: for experts without a gate, or stored transposed.
    """
    if not isinstance(hidden_states, FakeTensor):
        raise TypeError("This is a model of SonicMoE's memory, not SonicMoE; use backend='sonicmoe' to train with it.")
    if not self.has_gate or self.is_transposed:
        raise ValueError("The model of SonicMoE's memory covers gated experts stored as [E, 2I, H] and [E, H, I].")
    scores = top_k_weights.to(hidden_states.dtype)
    order = torch.empty(3, top_k_index.numel(), dtype=torch.int32)  # sorted rows and their way back
    # The package takes both weights as views, made before the first product. Backward therefore comes to the second
    # view only after the first product's backward, so the gradients of both tensors wait for each other. This is the
    # call that the paper measured; the adapter in `lightning_sonar.backends` lets the second view go first.
    up, down = self.gate_up_proj.permute(1, 2, 0), self.down_proj.permute(1, 2, 0)  # [2I, H, E], [H, I, E]
    both, activated = _Up.apply(hidden_states, up, order.shape[1])
    return _Down.apply(both, activated, down, scores)
