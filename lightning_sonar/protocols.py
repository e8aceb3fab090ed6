"""What the step inside backward asks of those it works with."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Accumulation = Literal["exact", "host", "per_microbatch"]


class Observer(Protocol):
    """What may watch a step. It must not change anything."""

    def on_phase(self, phase: str) -> None:
        """The step enters ``"backward"``, ``"clip"``, ``"step"`` or ``"done"``."""

    def on_gradient(self, tensor: Tensor) -> None:
        """A released tensor's gradient is complete: before its update, and before it is freed.

        With ``accumulation="host"`` also that of each earlier microbatch, before it goes to the host.
        """


class Ranks(Protocol):
    """What averages released gradients over ranks; `lightning_sonar.strategies.averaging.RankAverage` does."""

    def take(self, tensor: Tensor) -> list[Tensor]:
        """A gradient is complete on this rank; returns the tensors whose gradients are averaged now."""
        ...

    def finish(self) -> list[Tensor]:
        """Backward ends; returns the tensors whose gradients are averaged now."""
        ...

    def admit(self, name: str, tensor: Tensor) -> None:
        """A tensor is released that was not before, on every rank."""

    def forget(self) -> None:
        """Forget a backward that was broken off."""
