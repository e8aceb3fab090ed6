"""Gradients of several microbatches, summed in host memory: ``accumulation="host"``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_sonar.expert_clip import gradient
from lightning_sonar.host import host_empty, host_empty_like
from lightning_sonar.sharded import local

_CHUNK = 2**24
"""Elements that are added at a time: an addition of two dtypes first copies its operand into the wider one."""


class HostSums:
    """Sums of the gradients of tensors that are updated inside backward, one buffer a tensor.

    Sums are float32 (float64 of float64 gradients), added in the order of the microbatches: for float32 gradients they
    are those that ``.grad`` itself would hold, bit for bit; for bfloat16 each sum is rounded once, where ``.grad``
    would round at each addition. A buffer is made at the first sum of its tensor and used again in later steps. A
    sharded tensor's is that of this rank's shard. Where ``zero_grad`` between microbatches drops the gradients that are
    on the device, the sums go with them.

    On CUDA a gradient goes through one pinned buffer of its own dtype, on the current stream, and the host waits for
    each copy before it adds: the device's queue runs empty once a tensor and microbatch.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._begun: set[int] = set()
        self._beside: list[weakref.ref[Tensor]] = []
        self._staging: dict[torch.dtype, Tensor] = {}
        self._busy: torch.cuda.Event | None = None

    @property
    def under_way(self) -> bool:
        """Whether some gradient of the step under way waits here."""
        return bool(self._begun)

    @property
    def buffers(self) -> list[Tensor]:
        """All host memory held here."""
        return [*self._sums.values(), *self._staging.values()]

    def begun(self, tensor: Tensor) -> bool:
        """Whether a sum of this tensor waits here."""
        return id(tensor) in self._begun

    @torch.no_grad()
    def add(self, tensor: Tensor) -> None:
        """Add the gradient of ``tensor`` to its sum, and drop it."""
        self._add(tensor, self._to_host(local(gradient(tensor))))
        tensor.grad = None

    @torch.no_grad()
    def complete(self, tensor: Tensor, keep: bool = False) -> None:
        """Add the last gradient of ``tensor``, and write the sum, rounded to its dtype, into ``.grad`` in place.

        Args:
            tensor: a tensor with a gradient.
            keep: keep the sum here too, for `bring`; otherwise it is done with.
        """
        if not keep and not self.begun(tensor):
            return
        grad = local(gradient(tensor))
        self._add(tensor, self._to_host(grad))
        self._to_device(self._sums[id(tensor)], grad)
        if not keep:
            self._begun.discard(id(tensor))

    @torch.no_grad()
    def bring(self, tensor: Tensor, keep: bool = False) -> None:
        """Make ``.grad`` of a tensor that has none from its sum, rounded to the dtype of the tensor."""
        grad = torch.empty_like(tensor, requires_grad=False)
        self._to_device(self._sums[id(tensor)], local(grad))
        tensor.grad = grad
        if not keep:
            self._begun.discard(id(tensor))

    @torch.no_grad()
    def store(self, tensor: Tensor) -> None:
        """Put the gradient of ``tensor`` in the place of its sum."""
        self._begun.discard(id(tensor))
        self._add(tensor, self._to_host(local(gradient(tensor))))

    def note(self, others: Iterable[Tensor]) -> None:
        """A microbatch has ended: ``others`` keep their gradients on the device meanwhile."""
        self._beside = [weakref.ref(tensor) for tensor in others if tensor.grad is not None]

    def drop_if_zeroed(self) -> None:
        """Forget the sums if somebody has dropped all gradients since: he meant these too."""
        beside = [tensor for tensor in (ref() for ref in self._beside) if tensor is not None]
        if self.under_way and beside and all(tensor.grad is None for tensor in beside):
            self.clear()

    def clear(self) -> None:
        """Forget all sums; their buffers stay for the next ones."""
        self._begun.clear()
        self._beside = []

    def free(self) -> None:
        """Give the memory back."""
        self.clear()
        self._sums.clear()
        self._staging.clear()

    def _add(self, tensor: Tensor, grad: Tensor) -> None:
        key = id(tensor)
        if key not in self._sums:
            self._sums[key] = host_empty_like(
                local(gradient(tensor)), dtype=torch.promote_types(grad.dtype, torch.float32)
            )
        total = self._sums[key]
        if key not in self._begun:
            self._begun.add(key)
            total.copy_(grad)
        elif total.dtype == grad.dtype or not total.ndim:
            total.add_(grad)
        else:
            rows = max(1, _CHUNK * total.shape[0] // max(total.numel(), 1))
            for part, more in zip(total.split(rows), grad.split(rows), strict=True):
                part.add_(more)

    def _to_host(self, grad: Tensor) -> Tensor:
        """The gradient where the host can read it, in its dtype; valid until the next call."""
        if not grad.is_cuda:
            return grad
        staging = self._staging_of(grad)
        if self._busy is not None:
            torch.cuda.current_stream(grad.device).wait_event(self._busy)
        staging.copy_(grad, non_blocking=True)
        self._record(grad).synchronize()
        return staging

    def _to_device(self, total: Tensor, grad: Tensor) -> None:
        if not grad.is_cuda:
            grad.copy_(total)
            return
        staging = self._staging_of(grad)
        if self._busy is not None:
            # The host is about to write what an earlier copy may still read.
            self._busy.synchronize()
        # The conversion is the host's: on the device it would take memory of the wider dtype.
        staging.copy_(total)
        grad.copy_(staging, non_blocking=True)
        self._busy = self._record(grad)

    def _record(self, grad: Tensor) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(grad.device))
        return event

    def _staging_of(self, grad: Tensor) -> Tensor:
        """Pinned memory in the dtype, shape and strides of ``grad``; one stretch a dtype, as large as the largest."""
        flat = self._staging.get(grad.dtype)
        if flat is None or flat.numel() < grad.numel():
            flat = self._staging[grad.dtype] = host_empty(grad.numel(), grad.dtype, pinned=True)
        return flat[: grad.numel()].as_strided(grad.shape, torch.empty_like(grad, device="meta").stride())
