"""A process group of one's own, and what ranks tell one another over it."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class OwnGroup:
    """All ranks, in a process group that nobody else uses: collectives of two users must not change places.

    Every rank makes it at the same time.

    Args:
        timeout: how long a rank waits for another before it gives up; None is torch's default.

    Attributes:
        group: for ``torch.distributed``.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.group: Any = dist.new_group(timeout=timeout)

    def agree(self, flag: Tensor) -> Tensor:
        """The largest of all ranks' flags, a new tensor. Nothing waits for a device."""
        flag = flag.clone()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return flag

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank the values of rank 0."""
        dist.broadcast(tensor.detach(), src=dist.get_global_rank(self.group, 0), group=self.group)

    def close(self) -> None:
        """Give the group back, unless an error is under way: another rank may be gone, and NCCL would wait for it."""
        if self.group is not None and dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group(self.group)
        self.group = None
