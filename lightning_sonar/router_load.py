"""How evenly the router spreads tokens over the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sonar.experts import expert_parameters_of


class RouterLoad:
    """Token counts per expert, one row a layer, gathered by `watch_router_load`.

    Attributes:
        counts: for each experts module that ran, float32 ``[E]`` on its device: tokens routed to each expert.
    """

    def __init__(self) -> None:
        self.counts: list[Tensor] = []

    def summary(self) -> dict[str, Tensor]:
        """Means over layers, 0-dim float32, without a device sync; empty if nothing ran.

        ``max_over_mean``: tokens of the busiest expert over the mean (1 is perfectly even).
        ``unused``: how many experts got no token.
        """
        if not self.counts:
            return {}
        worst = torch.stack([count.max() / count.mean().clamp(min=1e-9) for count in self.counts])
        unused = torch.stack([(count == 0).sum().float() for count in self.counts])
        return {"max_over_mean": worst.mean(), "unused": unused.mean()}


@contextmanager
def watch_router_load(model: nn.Module) -> Iterator[RouterLoad]:
    """Count, for the forwards run in this context, how many tokens go to each expert.

    Works for modules behind transformers' experts dispatch, which are called with ``(hidden_states, top_k_index,
    top_k_weights)``; others are passed over.
    """
    load = RouterLoad()
    modules = [module for module in model.modules() if expert_parameters_of(module)]

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
        if isinstance(index, Tensor) and not index.is_floating_point():
            num_experts = expert_parameters_of(module)[0].shape[0]
            flat = index.detach().reshape(-1)  # [tokens * k]
            counts = torch.zeros(num_experts, device=index.device)
            load.counts.append(counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype)))

    handles = [module.register_forward_pre_hook(count, with_kwargs=True) for module in modules]
    try:
        yield load
    finally:
        for handle in handles:
            handle.remove()
