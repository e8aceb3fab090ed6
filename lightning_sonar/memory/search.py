"""What fits a device: combinations of mode, optimizer, checkpointing, loss and batch, the best first.

Arithmetic prunes what cannot fit at any batch. For the rest, peak memory is nearly a straight line over the number of
tokens once mode, checkpointing and loss are fixed: a line through two simulations guesses the largest batch, and only a
simulation of that very batch lets it into the list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_sonar.memory.cards import CONTEXT_BYTES, fits
from lightning_sonar.memory.planner import MemoryPlan

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)

# What a mode gives up, least first; of two that give up the same, the faster one by the paper.
MODE_ORDER = ("standard", "sonar", "in_backward_all")


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


@dataclass(frozen=True)
class Found:
    """A combination that fits, with the plan that says so."""

    candidate: Candidate
    plan: MemoryPlan


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
    floor: Callable[[Candidate], int] | None = None,
) -> list[Found]:
    """Combinations that fit ``device_bytes``, the best first; each was simulated.

    Better is: a mode that gives up less, then an optimizer that stands earlier in ``optimizers``, then no
    checkpointing, then the whole loss; of each such kind only the largest batch that fits is listed.

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

    Returns:
        At most ``wanted`` combinations; empty if nothing fits.
    """
    kinds = [
        Candidate(mode, optimizer, ckpt, loss, batch_sizes[0])
        for mode, optimizer, ckpt, loss in itertools.product(modes, optimizers, checkpointing, losses)
    ]
    found: list[Found] = []
    for kind in kinds:
        if len(found) == wanted:
            break
        if floor is not None and not fits(floor(kind), device_bytes, context_bytes):
            continue
        best = _largest(simulate, kind, batch_sizes, device_bytes, context_bytes)
        if best is not None and not _dominated(best, found):
            found.append(best)
    return found


def _largest(
    simulate: Simulate, kind: Candidate, batch_sizes: Sequence[int], device_bytes: int, context_bytes: int
) -> Found | None:
    """The largest batch of a kind that fits, by a straight line through two simulations and a third to confirm."""
    plans: dict[int, MemoryPlan] = {}

    def plan(batch: int) -> MemoryPlan:
        if batch not in plans:
            plans[batch] = simulate(replace(kind, batch_size=batch))
        return plans[batch]

    def good(batch: int) -> bool:
        return fits(plan(batch).reserved_bytes, device_bytes, context_bytes)

    if not good(batch_sizes[0]):
        return None
    low, high = 0, len(batch_sizes) - 1
    while low < high:  # the last one known to fit, the last one not known not to
        guess = _line(plans, batch_sizes, device_bytes - context_bytes)
        middle = min(max(low + 1, guess), high) if guess is not None else high
        if good(batch_sizes[middle]):
            low = middle
        else:
            high = middle - 1
    batch = batch_sizes[low]
    return Found(replace(kind, batch_size=batch), plan(batch))


def _line(plans: dict[int, MemoryPlan], batch_sizes: Sequence[int], room: int) -> int | None:
    """Index of the largest batch that a line through the two largest batches so far lets in; None with one only."""
    if len(plans) < 2:
        return None
    (a, first), (b, second) = sorted(plans.items())[-2:]
    slope = max(1.0, (second.reserved_bytes - first.reserved_bytes) / (b - a))
    reach = a + (room - first.reserved_bytes) / slope
    return sum(batch <= reach for batch in batch_sizes) - 1


def _dominated(one: Found, others: Iterable[Found]) -> bool:
    """Whether an earlier entry of the same mode and optimizer already takes at least as large a batch."""
    return any(
        other.candidate.mode == one.candidate.mode
        and other.candidate.optimizer == one.candidate.optimizer
        and other.candidate.batch_size >= one.candidate.batch_size
        for other in others
    )
