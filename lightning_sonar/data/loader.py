"""A shuffling loader that can be saved in the middle of an epoch and go on with the very next batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_sonar.data.errors import DataError


class Share(NamedTuple):
    """Whose part of the data this is: ``rank`` from 0 to ``ranks - 1``.

    ``parallel``: whether Lightning, too, would share the data out; it would for any parallel strategy, on one rank too.
    """

    rank: int
    ranks: int
    parallel: bool = False


ALL = Share(0, 1)


class SharedOut(DistributedSampler[Any]):
    """Tells Lightning that a loader's batches are shared out among the ranks already; hands out nothing itself."""

    def __init__(self, dataset: Any, share: Share) -> None:
        super().__init__(dataset, num_replicas=share.ranks, rank=share.rank, shuffle=False)


def even_batches(size: int, batch_size: int, share: Share) -> list[list[int]]:
    """A rank's batches of held-out examples, in order: equally many on every rank, each example on one of them.

    Forward passes of several ranks wait for one another, so none may have a batch more than the others; nor may an
    example count twice. So batches differ in size instead, by one. With fewer examples than ranks every rank has all.
    """
    mine = list(range(share.rank, size, share.ranks)) if size >= share.ranks else list(range(size))
    most = -(-size // share.ranks) if size >= share.ranks else size
    # Every rank has at least `most - 1` examples, so none of its batches is empty.
    count = min(-(-most // batch_size), len(mine))
    if size >= share.ranks:
        count = min(count, size // share.ranks)
    bounds = [len(mine) * index // count for index in range(count + 1)]
    return [mine[start:end] for start, end in itertools.pairwise(bounds)]


class ShuffledBatches(Sampler[list[int]]):
    """Full batches of indices in an order that is a function of the seed and the epoch alone.

    Several ranks take turns: of N ranks, rank r has batches r, r + N, r + 2N and so on. What is left over when not all
    have one is left out.

    Args:
        size: number of examples.
        batch_size: examples a batch; the last, smaller one is left out.
        seed: decides every epoch's order.
        share: this rank and how many there are.
    """

    def __init__(self, size: int, batch_size: int, seed: int, share: Share = ALL) -> None:
        super().__init__()
        self.size, self.batch_size, self.seed, self.share = size, batch_size, seed, share
        self.epoch = 0
        self.first = 0

    def __len__(self) -> int:
        return self.size // self.batch_size // self.share.ranks

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for turn in range(self.first, len(self)):
            batch = turn * self.share.ranks + self.share.rank
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]

    def _order(self) -> list[int]:
        # Drawn from a seed, so that epochs of neighbouring seeds do not repeat one another.
        seeds = torch.randint(2**62, (self.epoch + 1,), generator=torch.Generator().manual_seed(self.seed))
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(int(seeds[self.epoch]))).tolist()


def share_out(loader: DataLoader[Any], dataset: Any, share: Share) -> None:
    """Keep Lightning from sharing out among the ranks what is shared out already."""
    if share.parallel:
        # DataLoader forbids the attribute to be set, because it would change nothing about the batches.
        vars(loader)["sampler"] = SharedOut(dataset, share)


class ResumableLoader(DataLoader[Any]):
    """A DataLoader over `ShuffledBatches` with ``state_dict`` and ``load_state_dict``, which Lightning calls.

    The state counts the batches that were handed out, not those that workers have prepared ahead.
    """

    def __init__(self, dataset: Any, batches: ShuffledBatches, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=batches, **options)
        share_out(self, dataset, batches.share)
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
        """Epoch and number of its batches that were handed out to all ranks, and what the order depends on."""
        return {
            "epoch": self.batches.epoch,
            "handed_out": self.handed_out * self.batches.share.ranks,
            "seed": self.batches.seed,
            "size": self.batches.size,
            "batch_size": self.batches.batch_size,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state was taken, on however many ranks.

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
        self.batches.epoch, self.handed_out = state["epoch"], state["handed_out"] // self.batches.share.ranks
        if self.handed_out >= len(self.batches):  # the epoch was over
            self.batches.epoch, self.handed_out = self.batches.epoch + 1, 0
