"""One figure of every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def of_all_ranks(value: Any, world_size: int) -> list[Any] | None:
    """What each rank hands in, in order of rank; None where there is only one. Every rank must call it.

    Args:
        value: anything that can be pickled.
        world_size: how many ranks train together; a process group without them is somebody else's.
    """
    if world_size < 2 or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
