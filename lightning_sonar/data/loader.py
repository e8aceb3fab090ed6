"""A shuffling loader that can be saved in the middle of an epoch and go on with the very next batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from lightning_sonar.data.errors import DataError


class ShuffledBatches(Sampler[list[int]]):
    """Full batches of indices in an order that is a function of the seed and the epoch alone.

    Args:
        size: number of examples.
        batch_size: examples a batch; the last, smaller one is left out.
        seed: decides every epoch's order.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        super().__init__()
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.epoch = 0
        self.first = 0

    def __len__(self) -> int:
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Drawn from a seed, so that epochs of neighbouring seeds do not repeat one another.
        seeds = torch.randint(2**62, (self.epoch + 1,), generator=torch.Generator().manual_seed(self.seed))
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(int(seeds[self.epoch]))).tolist()
        for batch in range(self.first, len(self)):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]


class ResumableLoader(DataLoader[Any]):
    """A DataLoader over `ShuffledBatches` with ``state_dict`` and ``load_state_dict``, which Lightning calls.

    The state counts the batches that were handed out, not those that workers have prepared ahead.
    """

    def __init__(self, dataset: Any, batches: ShuffledBatches, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, **options)
        self.batches = batches
        self.handed_out = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.batches.first = self.handed_out
        for batch in super().__iter__():
            self.handed_out += 1
            yield batch
        self.batches.epoch += 1
        self.handed_out = 0

    def state_dict(self) -> dict[str, int]:
        """Epoch and number of its batches that were handed out, and what the order depends on."""
        return {
            "epoch": self.batches.epoch,
            "handed_out": self.handed_out,
            "seed": self.batches.seed,
            "size": self.batches.size,
            "batch_size": self.batches.batch_size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state was taken.

        Raises:
            DataError: if data, batch size or seed are others than those of the state.
        """
        mine = self.state_dict()
        other = [
            f"{key} was {state[key]} and is {mine[key]}"
            for key in ("size", "batch_size", "seed")
            if state[key] != mine[key]
        ]
        if other:
            raise DataError(
                f"The checkpoint's training data cannot be continued: {'; '.join(other)}. Resume with the same data, "
                "data.batch_size and seed, or start a new run from the checkpoint's weights."
            )
        self.batches.epoch, self.handed_out = state["epoch"], state["handed_out"]
        if self.handed_out >= len(self.batches):  # the epoch was over
            self.batches.epoch, self.handed_out = self.batches.epoch + 1, 0
