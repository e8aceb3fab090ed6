"""How large updates are, next to the weights they change; watched in some steps, without waiting for the device."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

LARGEST = 1.0
"""An update larger than the largest weight of its tensor is warned of."""


class UpdateWatch:
    """The largest update of a step, as a share of the largest weight of the same tensor.

    Quantised moments can give updates far larger than the weights: where a block of the second moment rounds to zero
    under a first moment that does not, as on heavy-tailed gradients of experts that few tokens reach.

    Args:
        every: watch each step whose number is a multiple of this; 0 watches none.
    """

    def __init__(self, every: int) -> None:
        if every < 0:
            raise ValueError(f"watch_every={every}: expected a number of steps, or 0 to watch none.")
        self.every = every
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._found: list[tuple[list[int], Tensor]] = []
        self._largest: float | None = None

    def wants(self, step: int) -> bool:
        """Whether the step with this number, from 1 up, is watched."""
        return self.every > 0 and step % self.every == 0

    def take(self, before: Tensor, after: Tensor) -> None:
        """A part of a tensor has been updated. ``before``, of its shape, is used up."""
        weight = torch.linalg.vector_norm(before, torch.inf)
        self._parts.append((torch.linalg.vector_norm(before.sub_(after), torch.inf), weight))

    def tensor_done(self, shape: torch.Size) -> None:
        """All parts of a tensor of this shape have been taken."""
        updates, weights = (torch.stack(part).amax().float() for part in zip(*self._parts, strict=True))
        # A tensor of zeros has to begin somewhere.
        self._found.append((list(shape), torch.where(weights == 0, 0.0, updates / weights)))
        self._parts.clear()

    def report(self) -> None:
        """The step is over: read the figures of a watched one, and warn if one is too large."""
        if not self._found:
            return
        device = self._found[0][1].device
        ratios = torch.stack([ratio.to(device) for _, ratio in self._found]).tolist()
        # A NaN is the largest of all.
        index = max(range(len(ratios)), key=lambda i: ratios[i] if ratios[i] == ratios[i] else torch.inf)
        shape, largest = self._found[index][0], float(ratios[index])
        self._largest = largest
        self._found.clear()
        if not largest <= LARGEST:
            warnings.warn(
                f"The largest update of a tensor of shape {shape} is {largest:.3g} times its largest weight. "
                "Quantised moments do this on heavy-tailed gradients; the weights may be lost. Go back to a checkpoint "
                "and use a lower learning rate, 4-bit states (which did not do it in our trials), or fused_adamw for "
                "these tensors.",
                stacklevel=2,
            )

    def pop_largest(self) -> float | None:
        """The largest ratio of the last watched step, once; None if there is nothing new."""
        largest, self._largest = self._largest, None
        return largest
