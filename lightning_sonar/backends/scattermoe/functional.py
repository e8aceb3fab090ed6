"""The experts' two products as autograd functions: one weight, and one weight gradient, each.

They are two so that ``down_proj``'s gradient is complete, and a hook may have stepped and freed it, before
``gate_up_proj``'s is allocated. What lies between them, activation and gate, is recomputed in backward from the first
product's result, so three activations are kept for a layer: its input ``[T, H]``, that result ``[T * k, 2I]`` and the
routing weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sonar.backends.scattermoe.launch import (
    SLOT,
    TOKEN,
    Routing,
    bias_grad,
    product,
    route,
    scale_grad,
    weigh,
    weight_grad,
)

__all__ = ["Gate", "Routing", "down", "route", "up"]

Gate = Callable[[Tensor], Tensor]


def _once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, refused where a graph of it is wanted.

    torch's decorator of this name raises only if the incoming gradient needs one itself; otherwise the terms that run
    through this backward would be missing from a second derivative without a word.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Any:
        # The engine enables gradients in a backward only for create_graph=True; checkpointing does not change that.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backend='scattermoe' has no second derivative, and backward was called with create_graph=True. "
                "Leave create_graph out, or use backend='grouped_mm'."
            )
        return backward(ctx, *grads)

    return checked


def _by_depth(weight: Tensor, transposed: bool) -> Tensor:
    """``[E, K, N]``, whichever way round the parameter lies; a view."""
    return weight if transposed else weight.transpose(1, 2)


def _wanted(ctx: Any, count: int) -> list[bool]:
    """Which of the first ``count`` inputs this backward is to give a gradient.

    ``needs_input_grad`` is settled in forward. A backward with ``inputs=`` may want less, and a weight's gradient that
    nobody wants is the largest tensor of the layer.
    """
    wanted = []
    # Tensors only have an edge; the optional one, the bias, is the last of those counted.
    for needs, (node, _) in zip(ctx.needs_input_grad[:count], ctx.next_functions, strict=False):
        try:
            wanted.append(needs and node is not None and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # autograd.grad() does not tell of leaves
            wanted.append(needs)
    return [*wanted, *[False] * (count - len(wanted))]


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, transposed: bool
    ) -> Tensor:
        ctx.top_k, ctx.transposed = routing.top_k, transposed
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(hidden, weight, routing.order, routing.offsets)
        return product(hidden, _by_depth(weight, transposed), routing, a_by=TOKEN, bias=bias)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, order, offsets = ctx.saved_tensors
        routing = Routing(order, offsets, ctx.top_k)
        hidden_grad = w_grad = b_grad = None
        needs_hidden, needs_weight, needs_bias = _wanted(ctx, 3)
        if needs_hidden:
            slots = product(grad, _by_depth(weight, ctx.transposed).transpose(1, 2), routing, out_by=SLOT)
            hidden_grad = slots.view(*hidden.shape[:1], ctx.top_k, hidden.shape[1]).sum(1)
            del slots
        if needs_bias:
            b_grad = bias_grad(grad, routing, ctx.bias_dtype)
        if needs_weight:
            if ctx.transposed:
                w_grad = weight_grad(hidden, grad, routing, weight.dtype, a_by=TOKEN)
            else:
                w_grad = weight_grad(grad, hidden, routing, weight.dtype, b_by=TOKEN)
        return hidden_grad, w_grad, b_grad, None, None


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        pre: Tensor,
        top_k_weights: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        top_k_index: Tensor,
        routing: Routing,
        gate: Gate,
        transposed: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.top_k, ctx.gate, ctx.transposed = routing.top_k, gate, transposed
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.autocast = (torch.is_autocast_enabled(pre.device.type), torch.get_autocast_dtype(pre.device.type))
        # Only the routing weights' gradient needs the bias, and with it which expert a slot went to.
        ctx.save_for_backward(
            pre, top_k_weights, weight, bias, None if bias is None else top_k_index, routing.order, routing.offsets
        )
        act = gate(pre)
        scale = top_k_weights.reshape(-1)
        slots = product(act, _by_depth(weight, transposed), routing, out_by=SLOT, bias=bias, scale=scale)
        return slots.view(*top_k_weights.shape, slots.shape[1]).sum(1, dtype=dtype)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        pre, top_k_weights, weight, bias, top_k_index, order, offsets = ctx.saved_tensors
        needs_pre, needs_scale, needs_weight, needs_bias = _wanted(ctx, 4)
        routing = Routing(order, offsets, ctx.top_k)
        scale = top_k_weights.reshape(-1)
        pre_grad = scale_gradient = w_grad = b_grad = None
        enabled, autocast_dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(pre.device.type, dtype=autocast_dtype, enabled=enabled):
            leaf = pre.detach().requires_grad_(needs_pre)
            act = ctx.gate(leaf)
        rows = grad.to(act.dtype)  # [T, H]

        if needs_pre or needs_scale:
            # Before the routing weights: such a row times its activation is the gradient of the row's weight, which
            # saves keeping the slots' outputs [T * k, H].
            act_grad = product(rows, _by_depth(weight, ctx.transposed).transpose(1, 2), routing, a_by=TOKEN)
            by_slot = scale_grad(act.detach(), act_grad, scale, routing).view(top_k_weights.shape)
            if needs_scale:
                if bias is not None:
                    by_slot = by_slot + _bias_part(rows, bias, top_k_index)
                scale_gradient = by_slot.to(top_k_weights.dtype)
            if needs_pre:
                (pre_grad,) = torch.autograd.grad(act, leaf, act_grad)
            del act_grad
        act = act.detach()
        if needs_bias:
            b_grad = bias_grad(rows, routing, ctx.bias_dtype, a_by=TOKEN, scale=scale)
        if needs_weight:
            # A copy: the gate may have given back what autograd keeps, or the saved tensor itself.
            act = weigh(act, scale, routing)
            if ctx.transposed:
                w_grad = weight_grad(act, rows, routing, weight.dtype, b_by=TOKEN)
            else:
                w_grad = weight_grad(rows, act, routing, weight.dtype, a_by=TOKEN)
        return pre_grad, scale_gradient, w_grad, b_grad, None, None, None, None, None


def _bias_part(rows: Tensor, bias: Tensor, top_k_index: Tensor) -> Tensor:
    """``rows[t] . bias[top_k_index[t, i]]``, ``[T, k]`` in fp32; zero for ids of no expert here."""
    by_expert = rows.float() @ bias.float().t()  # [T, E]
    last = bias.shape[0] - 1
    part = by_expert.gather(1, top_k_index.long().clamp(0, last))
    return part.masked_fill((top_k_index < 0) | (top_k_index > last), 0.0)


def up(hidden: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, *, transposed: bool = False) -> Tensor:
    """Every slot's token times its expert's first weight.

    Args:
        hidden: ``[T, H]``, bf16 or fp32.
        weight: ``[E, N, H]``, or ``[E, H, N]`` if transposed; of ``hidden``'s dtype or fp32.
        bias: ``[E, N]`` or ``None``.
        routing: of the tokens.
        transposed: which way round the weight lies.

    Returns:
        ``[T * k, N]`` in grouped order, in ``hidden``'s dtype.
    """
    return _Up.apply(hidden, weight, bias, routing, transposed)


def down(
    pre: Tensor,
    top_k_weights: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k_index: Tensor,
    routing: Routing,
    gate: Gate,
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``sum over k of top_k_weights * (gate(pre) times the expert's second weight + bias)``.

    Args:
        pre: result of `up`, ``[T * k, N]``.
        top_k_weights: ``[T, k]``.
        weight: ``[E, H, I]``, or ``[E, I, H]`` if transposed.
        bias: ``[E, H]`` or ``None``.
        top_k_index: experts of the tokens, ``[T, k]``.
        routing: of the tokens.
        gate: from ``pre`` to ``[T * k, I]``, row by row; called again in backward, and without parameters of its own.
        transposed: which way round the weight lies.
        dtype: of the result; by default that of ``pre``.

    Returns:
        ``[T, H]``.
    """
    return _Down.apply(pre, top_k_weights, weight, bias, top_k_index, routing, gate, transposed, dtype or pre.dtype)
