"""The hooks where host memory helps: gradients summed there over microbatches, optimizer states kept there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sonar import messages
from lightning_sonar.accumulate import HostSums
from lightning_sonar.hooks import GradientHooks
from lightning_sonar.modes import Mode
from lightning_sonar.optim.offload import HostStates
from lightning_sonar.optim.step_one import step_tensor
from lightning_sonar.protocols import Accumulation


class HostHooks(GradientHooks):
    """`GradientHooks` with ``accumulation="host"`` and ``expert_state_device="cpu"``; without them it adds nothing."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        experts: Mapping[str, Tensor],
        *,
        mode: Mode,
        accumulation: Accumulation,
        offload: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, experts, mode=mode, accumulation=accumulation, **kwargs)
        self._sums = HostSums() if accumulation == "host" and mode.in_backward != "none" else None
        self._states = HostStates(self.experts.values(), optimizer) if offload else None

    def _release(self, tensor: Tensor) -> None:
        super()._release(tensor)
        if self._states is not None and self.is_expert(tensor):
            self._states.keep(tensor)

    def remove(self) -> None:
        """Take the hooks off. May be called more than once."""
        super().remove()
        if self._sums is not None:
            self._sums.free()
        if self._states is not None:
            self._states.remove()

    # Sums.

    @property
    def _on_sums(self) -> bool:
        return self._sums is not None and self._sums.under_way

    def _hold(self, tensor: Tensor) -> None:
        if self._sums is None:
            return
        if tensor.grad is not None and tensor.grad.requires_grad:
            raise RuntimeError(messages.create_graph(self._name(tensor)))
        for observer in self.observers:
            observer.on_gradient(tensor)
        if self._guard.skipping:
            tensor.grad = None
        else:
            self._sums.add(tensor)

    def _complete(self, tensor: Tensor) -> None:
        sums = self._sums
        if sums is None or self._guard.skipping or (self._measuring and not sums.under_way):
            return
        # What is only measured now is brought back when the norm is known.
        sums.complete(tensor, keep=self._measuring)

    def _keep_average(self, tensor: Tensor) -> None:
        if self.ranks is not None and self._sums is not None and self._sums.begun(tensor):
            self._sums.store(tensor)

    def _bring_left(self, averaged: bool = False) -> None:
        """Act on sums whose tensors the last microbatch has not reached, or, `averaged`, that it has measured."""
        sums = self._sums
        if sums is None or not sums.under_way or self._accumulating:
            return
        if self._guard.skipping:
            sums.clear()
            return
        for tensor in list(self._parameters()):
            measured = self._two_pass is not None and self._measuring and self._two_pass.has_measured(tensor)
            if not sums.begun(tensor) or tensor.grad is not None or measured:
                continue
            sums.bring(tensor, keep=self._measuring)
            self._act_on([tensor] if averaged or self.ranks is None else self.ranks.take(tensor))

    # States.

    def _step(self, part: int | None, tensor: Tensor, pending: dict[str, Any]) -> None:
        states = self._states if self._states is not None and self._states.keeps(tensor) else None
        if states is not None and not part:
            states.fetch(tensor)
        super()._step(part, tensor, pending)
        if states is not None and (part is None or part == tensor.shape[0] - 1):
            states.put_back(tensor)

    def _step_streamed(self) -> None:
        """Step tensors whose states are in host memory, and which no hook has updated."""
        states, optimizer = self._states, self._live_optimizer()
        if states is None:
            return
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None or not states.keeps(tensor):
                    continue
                states.fetch(tensor)
                step_tensor(optimizer, group, tensor)
                torch.autograd.graph.increment_version(tensor)
                states.put_back(tensor)
                self._fired.add(id(tensor))
                tensor.grad = None

    # The step.

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            return  # a closure, in which the last backward is still to come
        self._bring_left()
        self._step_streamed()

    def _on_step(self, *args: Any) -> None:
        if self._sums is not None:
            self._sums.clear()
        if self._states is not None:
            self._states.end_step()
        super()._on_step(*args)
