"""What one may ask of any optimizer's state, whichever optimizer it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sonar.optim.adamw import FusedAdamW
from lightning_sonar.optim.low_bit import LowBit
from lightning_sonar.optim.parted import ExpertsAndDense
from lightning_sonar.optim.quantised import tensors_of


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create the states of an optimizer of this package; of others they appear at their first step."""
    if isinstance(optimizer, ExpertsAndDense):
        for child in optimizer.children:
            make_states(child)
    elif isinstance(optimizer, FusedAdamW):
        optimizer.init_state()
    elif hasattr(optimizer, "make_states"):
        optimizer.make_states()  # type: ignore[attr-defined]


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors that an optimizer's state consists of, also those that libraries keep in objects of their own."""
    yield from _inside(list(optimizer.state.values()))


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(item)
    else:
        yield from tensors_of(value)


def largest_update(optimizer: torch.optim.Optimizer) -> float | None:
    """The largest update of the last watched step as a share of the largest weight of its tensor.

    None if the optimizer watches nothing, or there is nothing new since the last call.
    """
    if isinstance(optimizer, ExpertsAndDense):
        found = [value for child in optimizer.children if (value := largest_update(child)) is not None]
        return max(found, default=None)
    return optimizer.watch.pop_largest() if isinstance(optimizer, LowBit) else None
