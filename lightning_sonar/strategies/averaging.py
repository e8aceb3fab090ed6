"""Averaging gradients over ranks inside backward, in one order on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sonar.strategies.groups import OwnGroup


class RankAverage:
    """Averages the gradients of tensors that are hidden from DDP, over a process group of its own.

    Collectives must come in one order on every rank, and a rank may get its gradients in another order, or not at
    all where its batch did not use a tensor. So a gradient waits until those before it have been averaged, and what
    is missing when backward ends takes part with zeros. The order is that of the parameters, backwards, and after
    the first backward the one in which rank 0 got them, as in DDP's buckets.

    The average is DDP's: each rank multiplies by one over the number of ranks, then they are summed in the
    gradient's dtype.

    Args:
        tensors: name to tensor, any shapes, in the order of the model's parameters; equal on every rank.
        ranks: the process group of this one object.
        find_unused: let tensors be unused on some ranks, as DDP's ``find_unused_parameters`` does. One small
            collective more a tensor tells whether any rank used it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], ranks: OwnGroup, find_unused: bool = False) -> None:
        self.group = ranks.group
        self.find_unused = find_unused
        self._size = dist.get_world_size(self.group)
        # Weak: hooks hold this object, and a parameter holds its hooks where no garbage collector sees them.
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._order = [weakref.ref(tensor) for tensor in reversed(list(tensors.values()))]
        # In the order in which they came.
        self._arrived: dict[int, None] = {}
        self._next = 0
        self._settled = False

    def take(self, tensor: Tensor) -> list[Tensor]:
        """A gradient is complete on this rank.

        Returns:
            The tensors, in order, whose ``.grad`` is now the average and may be used; none if this one has to wait.
        """
        if id(tensor) in self._arrived:
            raise RuntimeError(
                f"{self._name(tensor)} got its gradient twice in one backward, so its average over ranks is not known "
                "when the first one comes. If it is used twice under reentrant activation checkpointing, use "
                "checkpoint(..., use_reentrant=False)."
            )
        self._arrived[id(tensor)] = None
        return self._average_arrived()

    def finish(self) -> list[Tensor]:
        """End a step's last backward: average what waits, and zeros for what this rank did not use.

        Returns:
            The tensors, in order, whose ``.grad`` is now the average.

        Raises:
            RuntimeError: if a gradient is missing and ``find_unused`` is off.
        """
        training = [tensor for tensor in (ref() for ref in self._order) if _trains(tensor)]
        missing = [tensor for tensor in training if id(tensor) not in self._arrived and tensor.grad is None]
        if missing and not self.find_unused:
            names = ", ".join(self._name(tensor) for tensor in missing[:3])
            raise RuntimeError(
                f"{len(missing)} of {len(self._order)} tensors that are updated inside backward got no gradient on "
                f"rank {dist.get_rank()}, {names} among them; the other ranks wait for it. If the loss does not use "
                "them in every step, pass SonarMoEDDPStrategy(find_unused_parameters=True). If they never train, set "
                "requires_grad to False."
            )
        done: list[Tensor] = []
        while (tensor := self._upcoming()) is not None:
            # One that has not arrived may hold what earlier microbatches have accumulated.
            used = tensor.grad is not None
            if not used:
                tensor.grad = torch.zeros_like(tensor)
            if self._average(tensor, used):
                done.append(tensor)
            else:
                tensor.grad = None
        self._settle()
        self.forget()
        return done

    def admit(self, name: str, tensor: Tensor) -> None:
        """From now on average this tensor too, after all others. Every rank has to say so, in one order."""
        self._names[id(tensor)] = name
        self._order.append(weakref.ref(tensor))

    def forget(self) -> None:
        """Forget what has arrived in this backward, which an exception may have broken off."""
        self._arrived, self._next = {}, 0

    def _average_arrived(self) -> list[Tensor]:
        done: list[Tensor] = []
        while (tensor := self._upcoming()) is not None and id(tensor) in self._arrived:
            done.append(tensor)
            self._average(tensor, used=True)
        return done

    def _upcoming(self) -> Tensor | None:
        """The tensor whose turn it is; one that has been frozen since would be waited for, and has none."""
        while self._next < len(self._order):
            tensor = self._order[self._next]()
            if _trains(tensor):
                return tensor
            self._next += 1
        return None

    def _average(self, tensor: Tensor, used: bool) -> bool:
        """Average one gradient in place; returns whether any rank used the tensor. Reads the device if not `used`."""
        self._next += 1
        grad = tensor.grad
        if grad is None:
            raise RuntimeError(
                f"The gradient of {self._name(tensor)} was taken away while it waited for other ranks. Gradients of "
                "tensors that are updated inside backward belong to the strategy until backward ends."
            )
        flag = torch.tensor(float(used), device=grad.device) if self.find_unused else None
        with torch.no_grad():
            grad.mul_(1.0 / self._size)
            # Collectives want one stretch of memory. The gradient's own strides stay: they are its parameter's.
            whole = grad.contiguous() if grad.layout is torch.strided else grad
            dist.all_reduce(whole, group=self.group)
            if whole is not grad:
                grad.copy_(whole)
        if flag is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return used or (flag is not None and bool(flag.item()))

    def _settle(self) -> None:
        """After the first backward, take the order in which rank 0 got its gradients."""
        if self._settled:
            return
        self._settled = True
        order = [ref() for ref in self._order]
        place = {id(tensor): index for index, tensor in enumerate(order) if tensor is not None}
        arrived = [place[key] for key in self._arrived]
        came = set(arrived)
        wanted = [arrived + [index for index in range(len(order)) if index not in came]]
        dist.broadcast_object_list(wanted, src=dist.get_global_rank(self.group, 0), group=self.group)
        self._order = [self._order[index] for index in wanted[0]]

    def _name(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")


def _trains(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.requires_grad
