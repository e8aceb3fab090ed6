"""Peers that update every parameter inside backward: PyTorch's tutorial pattern and torch-optimi."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.peers.base import Batch, PlainLoop, Plan, shares, trained
from lightning_sonar.optim.states import state_tensors


class TutorialHooks(PlainLoop):
    """One optimizer for each parameter, stepped in a hook: PyTorch's tutorial on optimizer steps in backward."""

    name = "tutorial"
    label = "PyTorch tutorial: an optimizer a parameter, in hooks"
    clips = False

    def begin(self, model: nn.Module, plan: Plan) -> _TutorialRun:
        return _TutorialRun(model)

    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1.0, fused=True)


class _TutorialRun:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        owned = {p: torch.optim.AdamW([p], lr=1.0, fused=True) for p in trained(model)}
        self.optimizers = list(owned.values())

        def hook(parameter: Tensor) -> None:
            optimizer = owned[parameter]  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()

        self.handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in owned]

    def states(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            yield from state_tensors(optimizer)

    def step(self, microbatches: Sequence[Batch], max_norm: float | None) -> None:
        for loss in shares(self.model, microbatches):
            loss.backward()
        if max_norm:  # what a user would write; no gradient is left for it
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


class OptimiRelease(PlainLoop):
    """torch-optimi's AdamW with gradient release, without Kahan sums, which would be a third state."""

    name = "optimi"
    label = "torch-optimi AdamW, gradient_release"
    package = "torch-optimi"
    module = "optimi"
    clips = False
    note = (
        "accumulates into its moments, by its own account an approximation; after load_state_dict its hooks read a "
        "copy of the parameter group, which no scheduler reaches"
    )

    def begin(self, model: nn.Module, plan: Plan) -> _OptimiRun:
        return _OptimiRun(model, self._make(trained(model), gradient_release=True))

    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self._make(parameters)

    def _make(self, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        import optimi  # type: ignore[import-not-found]

        # torch's own values, which optimi's defaults are not.
        return optimi.AdamW(
            parameters, lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, kahan_sum=False, **options
        )


class _OptimiRun:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import optimi  # type: ignore[import-not-found]

        self.model = model
        self.optimizer: Any = optimizer
        self.optimizers = [optimizer]
        optimi.prepare_for_gradient_release(model, optimizer)
        self._remove = optimi.remove_gradient_release

    def states(self) -> Iterator[Tensor]:
        for state in self.optimizer.state.values():
            # Beside them stands the group, and in it every parameter.
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def step(self, microbatches: Sequence[Batch], max_norm: float | None) -> None:
        for index, loss in enumerate(shares(self.model, microbatches), 1):
            self.optimizer.optimizer_accumulation = index < len(microbatches)
            loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def close(self) -> None:
        self._remove(self.model)
