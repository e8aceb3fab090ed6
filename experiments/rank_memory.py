"""What each of several ranks needs, by arithmetic on the plan of one device."""

from __future__ import annotations

from lightning_sonar.memory.planner import PRECISIONS, MemoryPlan
from lightning_sonar.modes import MODES

MOST_RANKS = 8
"""The most ranks that are suggested: one node."""


def rank_bytes(plan: MemoryPlan, ranks: int, sharded: bool, device: str) -> int:
    """Peak bytes of each rank: an estimate, exact on one rank.

    Under FSDP2 it is `MemoryPlan.per_rank_bytes`. Under DDP each rank needs what one device needs, and on a GPU the
    buckets in which dense gradients are averaged. They are made before the steps that the tracker of other devices
    watches.

    Args:
        plan: the plan of one device.
        ranks: how many there are.
        sharded: FSDP2, or else DDP.
        device: type of the device.
    """
    if ranks == 1 or sharded:
        return plan.per_rank_bytes(ranks)
    return plan.peak_bytes + (bucket_bytes(plan) if device == "cuda" else 0)


def bucket_bytes(plan: MemoryPlan) -> int:
    """Bytes of DDP's buckets: as many as the gradients that are not updated inside backward."""
    mode = MODES.get(plan.mode)
    freed = 0
    if mode is not None:
        freed += plan.params_expert if mode.steps_in_backward(True) else 0
        freed += plan.params_total - plan.params_expert if mode.steps_in_backward(False) else 0
    return (plan.params_total - freed) * PRECISIONS[plan.precision].itemsize


def ranks_that_fit(plan: MemoryPlan, room: int) -> int | None:
    """The fewest ranks, at most `MOST_RANKS`, that each fit ``room`` bytes under FSDP2; None if no number does."""
    mode = MODES.get(plan.mode)
    if mode is not None and mode.granularity == "expert":  # FSDP2 refuses it
        return None
    return next((ranks for ranks in range(2, MOST_RANKS + 1) if plan.per_rank_bytes(ranks) <= room), None)
