"""An optimizer that allocates what another would, and updates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import ParamsT

from lightning_sonar.memory.optimizer_models.layouts import Buffer, Layout
from lightning_sonar.optim.quantised import chunks_of


class StandIn(torch.optim.Optimizer):
    """Allocates the states and temporaries of a low-bit optimizer. For fake tensors: no parameter is changed.

    Args:
        params: as for any torch optimizer.
        layout: what is allocated.
        lr: stands in the groups, for schedulers.
        settings: of the optimizer it stands for.
    """

    def __init__(self, params: ParamsT, layout: Layout, lr: float = 1e-3, **settings: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": settings.get("betas", (0.9, 0.999))})
        self.layout = layout
        self.settings = settings
        self._shared: dict[str, Tensor] = {}

    def make_states(self) -> None:
        """Create the state of every parameter that requires a gradient and has none yet."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.requires_grad:
                    self._state_of(tensor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Allocate what the update of every parameter that has a gradient would.

        Raises:
            TypeError: for a real parameter, which would go without its update.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                if not isinstance(tensor, FakeTensor):
                    raise TypeError(
                        f"{self.layout.name} (model) got a real tensor of shape {list(tensor.shape)}, expected a fake "
                        "one. It only allocates what the optimizer would, for memory plans."
                    )
                self._state_of(tensor)
                self._update(tensor)
        return loss

    def _state_of(self, tensor: Tensor) -> dict[str, Any]:
        state = self.state[tensor]
        if not state:
            if not self._shared:
                self._shared.update(_made(self.layout.shared(), tensor.device))
            state.update(self._shared)
            state.update(_made(self.layout.states(tensor, self.settings), tensor.device))
        return state

    def _update(self, tensor: Tensor) -> None:
        block = self.settings.get("block_size", self.layout.block)
        count = chunks_of(tensor, block, self.layout.chunk)
        elements = tensor.numel() // count
        for _ in range(count):
            buffers = self.layout.temporaries(tensor, elements, self.settings)
            if self.layout.copied(self.settings):
                buffers = [*buffers, (elements, tensor.dtype)]
            held = _made(dict(enumerate(buffers)), tensor.device)
            del held


def _made(buffers: dict[Any, Buffer], device: torch.device) -> dict[Any, Tensor]:
    return {name: torch.empty(count, dtype=dtype, device=device) for name, (count, dtype) in buffers.items()}
