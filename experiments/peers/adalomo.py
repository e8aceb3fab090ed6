"""lomo-optim's AdaLomo: updates in backward, with a factored second moment and no first one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from experiments.peers.base import Batch, CannotRunError, PlainLoop, Plan, shares


class AdaLomo(PlainLoop):
    """As shipped; and where that needs a CUDA device and there is none, with its state left where the model is."""

    name = "adalomo"
    label = "lomo-optim AdaLomo"
    package = "lomo-optim"
    module = "lomo_optim"
    state = "second moment, factored, fp32"

    def begin(self, model: nn.Module, plan: Plan) -> _AdaLomoRun:
        return _AdaLomoRun(model, plan)

    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        raise CannotRunError("AdaLomo has no step outside backward to compare with.")


class _AdaLomoRun:
    def __init__(self, model: nn.Module, plan: Plan) -> None:
        import lomo_optim  # type: ignore[import-not-found]

        self.model = model
        self.plan = plan
        self.done = plan.done
        self.said = ""

        def make() -> Any:
            return lomo_optim.AdaLomo(model, loss_scale=0, clip_grad_norm=plan.max_norm)

        try:
            self.optimizer = make()
        except (AssertionError, RuntimeError) as error:  # torch without CUDA, or CUDA without a device
            self.said = f"calls .cuda() ({first_line(error)}); with that left out, "
            with _state_stays():
                self.optimizer = make()
        # It takes its learning rate with the loss, so there is nothing for a scheduler to hold on to.
        self.optimizers: list[torch.optim.Optimizer] = []

    def states(self) -> Iterator[Tensor]:
        for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"):
            yield from getattr(self.optimizer, name).values()

    def step(self, microbatches: Sequence[Batch], max_norm: float | None) -> None:
        lr = self.plan.rate(self.done)
        try:
            for loss in shares(self.model, microbatches):
                if max_norm:
                    self.optimizer.grad_norm(loss)
                self.optimizer.fused_backward(loss, lr)
        except RuntimeError as error:
            shapes = sorted({tuple(p.shape) for p in self.model.parameters() if p.ndim == 3})
            raise CannotRunError(
                f"{self.said}its factored state, made for matrices, does not fit expert tensors {shapes}: "
                f"{first_line(error)}"
            ) from error
        self.done += 1

    def close(self) -> None:
        """Nothing: its hooks cannot be removed."""


@contextmanager
def _state_stays() -> Iterator[None]:
    with mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
        yield


def first_line(error: BaseException) -> str:
    """What an exception says, as far as a table has room for it."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
