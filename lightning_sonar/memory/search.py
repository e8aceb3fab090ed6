"""What fits a device: combinations of mode, optimizer, checkpointing, loss and batch, the best first.

Only a simulation lets a combination into the list, and arithmetic keeps most of them from being simulated. What cannot
fit at any batch is dropped at once. Of the rest the largest batch is guessed: from the plan that is nearest among those
there are by then, whose activations are scaled with the batch and whose states are exchanged; or, while there is none,
from an estimate by the model's configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightning_sonar.memory.cards import CONTEXT_BYTES, fits
from lightning_sonar.memory.planner import MemoryPlan

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)

# What a mode gives up, least first; of two that give up the same, the faster one by the paper.
MODE_ORDER = ("standard", "sonar", "in_backward_all")

CERTAIN = 1.03
"""A guess from a plan is trusted to say that something does not fit if it is this many times too large."""


@dataclass(frozen=True)
class Candidate:
    """One combination to try.

    Attributes:
        mode: name of a mode.
        optimizer: name of an optimizer configuration.
        checkpointing: activation checkpointing.
        loss: ``full`` or ``chunked``.
        batch_size: sequences in a microbatch.
    """

    mode: str
    optimizer: str
    checkpointing: bool
    loss: str
    batch_size: int


Simulate = Callable[[Candidate], MemoryPlan]
Bytes = Callable[[Candidate], int]


@dataclass(frozen=True)
class Found:
    """A combination that fits, with the plan that says so."""

    candidate: Candidate
    plan: MemoryPlan


@dataclass
class Tally:
    """How a search went.

    Attributes:
        simulated: the candidates that were simulated, in order.
        pruned: how many were not, because arithmetic said that they do not fit, or add nothing to what was found.
    """

    simulated: list[Candidate] = field(default_factory=list)
    pruned: int = 0


def search(
    simulate: Simulate,
    device_bytes: int,
    *,
    modes: Sequence[str] = MODE_ORDER,
    optimizers: Sequence[str] = ("fused_adamw",),
    checkpointing: Sequence[bool] = (False, True),
    losses: Sequence[str] = ("full", "chunked"),
    batch_sizes: Sequence[int] = BATCH_SIZES,
    context_bytes: int = CONTEXT_BYTES,
    wanted: int = 5,
    floor: Bytes | None = None,
    activations: Bytes | None = None,
    states: Bytes | None = None,
    tally: Tally | None = None,
) -> list[Found]:
    """Combinations that fit ``device_bytes``, the best first; each was simulated.

    Better is: a mode that gives up less, then an optimizer that stands earlier in ``optimizers``, then no
    checkpointing, then the whole loss; of each such kind only the largest batch that fits is listed, and only if it is
    larger than that of the kinds before it with the same mode and optimizer. That the next larger batch does not fit is
    simulated where it is close, and otherwise arithmetic on the plan of the largest.

    Args:
        simulate: plans one candidate.
        device_bytes: memory of the device.
        modes: names of modes, best first.
        optimizers: names of optimizer configurations, best first.
        checkpointing: which to try.
        losses: which to try.
        batch_sizes: which to try, ascending.
        context_bytes: see `CONTEXT_BYTES`.
        wanted: how many combinations to list at most.
        floor: bytes that a candidate needs whatever its batch, by arithmetic; what cannot fit is not simulated.
        activations: roughly the bytes that grow with the batch; used for the first guesses alone.
        states: bytes of a candidate's optimizer states; without it they count as equal.
        tally: filled in with how the search went.

    Returns:
        At most ``wanted`` combinations; empty if nothing fits.
    """
    tally = tally if tally is not None else Tally()
    guess = _Guess(floor or (lambda c: 0), activations, states or (lambda c: 0))
    room = device_bytes - context_bytes
    found: list[Found] = []
    for mode, optimizer, ckpt, loss in itertools.product(modes, optimizers, checkpointing, losses):
        if len(found) == wanted:
            break
        kind = Candidate(mode, optimizer, ckpt, loss, batch_sizes[0])
        reached = _reached(kind, found)
        larger = [replace(kind, batch_size=batch) for batch in batch_sizes if batch > reached]
        before = len(tally.simulated)
        # Two or three plans tell as a rule: one at the guess, one beside it.
        best = _largest(larger, room, guess, simulate, tally) if larger else None
        tally.pruned += len(larger) - (len(tally.simulated) - before)
        if best is not None and fits(best.plan.reserved_bytes, device_bytes, context_bytes):
            found.append(best)
    return found


def _largest(larger: Sequence[Candidate], room: int, guess: _Guess, simulate: Simulate, tally: Tally) -> Found | None:
    """The largest batch of a kind that fits, among candidates in ascending order."""
    best: Found | None = None
    low, high = -1, len(larger)  # the last one known to fit, the first one known not to
    while high - low > 1:
        sure = [guess.is_too_large(candidate, room) for candidate in larger[low + 1 : high]]
        if all(sure):
            break
        high = low + 1 + len(sure) - sure[::-1].index(False)
        likely = sum(guess(candidate) <= room for candidate in larger[low + 1 : high])
        # If none is likely, none of the larger ones is, so the smallest decides.
        place = low + max(likely, 1)
        candidate = larger[place]
        plan = simulate(candidate)
        tally.simulated.append(candidate)
        guess.plans[candidate] = plan
        if plan.reserved_bytes <= room:
            low, best = place, Found(candidate, plan)
        else:
            high = place
    return best


@dataclass
class _Guess:
    """What a candidate would reserve, from the nearest plan.

    Attributes:
        floor: see `search`.
        activations: see `search`.
        states: see `search`.
        plans: what was simulated so far.
    """

    floor: Bytes
    activations: Bytes | None
    states: Bytes
    plans: dict[Candidate, MemoryPlan] = field(default_factory=dict)

    def __call__(self, candidate: Candidate) -> float:
        near = self._nearest(candidate)
        if near is not None:
            return self._from(near, candidate)
        if self.activations is None:
            # The smallest batch comes first where nothing is known.
            return 0 if candidate.batch_size == 1 else float("inf")
        # Activations are at their most when the gradients that a mode keeps are still to come.
        without = self.floor(replace(candidate, mode=MODE_ORDER[-1]))
        return max(self.floor(candidate), without + self.activations(candidate))

    def is_too_large(self, candidate: Candidate, room: int) -> bool:
        """Whether a candidate need not be simulated: it is above its floor, or far above by a plan of its own group."""
        if self.floor(candidate) > room:
            return True
        near = self._nearest(candidate)
        # A plan of another mode, or of a larger batch, is good for a guess only.
        if near is None or near.mode != candidate.mode or near.batch_size > candidate.batch_size:
            return False
        return self._from(near, candidate) > room * CERTAIN

    def _nearest(self, candidate: Candidate) -> Candidate | None:
        """A plan with the same activations: of its own kind if there is one, and of a similar batch."""
        group = [c for c in self.plans if (c.checkpointing, c.loss) == (candidate.checkpointing, candidate.loss)]

        def distance(other: Candidate) -> tuple[bool, bool, float]:
            ratio = max(other.batch_size, candidate.batch_size) / min(other.batch_size, candidate.batch_size)
            return (other.mode != candidate.mode, other.optimizer != candidate.optimizer, ratio)

        return min(group, key=distance, default=None)

    def _from(self, near: Candidate, candidate: Candidate) -> float:
        same = [c for c in self.plans if replace(c, batch_size=near.batch_size) == near]
        if len(same) > 1 and near.mode == candidate.mode:
            # Two plans of one kind: a straight line through those beside the candidate.
            same.sort(key=lambda c: abs(c.batch_size - candidate.batch_size))
            (x1, y1), (x2, y2) = ((c.batch_size, self.plans[c].reserved_bytes) for c in same[:2])
            line = y1 + (candidate.batch_size - x1) * (y2 - y1) / (x2 - x1)
            return line + self.states(candidate) - self.states(near)
        plan, times = self.plans[near], candidate.batch_size / near.batch_size
        moments = list(zip(plan.curve["live_bytes"], plan.curve["sharded_bytes"], strict=True))
        exchanged = self.states(candidate) - self.states(near)
        spread = plan.reserved_bytes - plan.peak_bytes
        peak = max((held + (live - held) * times for live, held in moments), default=plan.peak_bytes)
        if near.mode != candidate.mode:
            # The same forward, and other gradients: at the least what is there when backward begins.
            most = max((live - held for live, held in moments), default=0)
            start = min((held for _, held in moments), default=0)
            peak = max(start + most * times, self.floor(candidate) - exchanged)
        return peak + exchanged + spread


def _reached(kind: Candidate, found: Iterable[Found]) -> int:
    """The largest batch that an earlier entry of the same mode and optimizer takes."""
    same = [f.candidate for f in found if (f.candidate.mode, f.candidate.optimizer) == (kind.mode, kind.optimizer)]
    return max((candidate.batch_size for candidate in same), default=0)
