"""Host memory that training keeps beside the device's: pinned for CUDA, ordinary on a CPU, and known as such.

On a CPU, and on fake tensors, device and host are one kind of memory, and only a mark tells them apart: what counts
device memory asks `is_host`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

_marked: dict[int, weakref.ref[torch.UntypedStorage]] = {}


class _Making(threading.local):
    """Whether what this thread allocates now is host memory, for those who see it born."""

    on = False


_making = _Making()


def is_host(storage: torch.UntypedStorage) -> bool:
    """Whether the storage was made here, and so is no memory of the device."""
    if _making.on:
        _mark(storage)
    ref = _marked.get(storage._cdata)
    return ref is not None and ref() is storage


def host_empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Host memory that is not filled, of the shape and strides of ``tensor``; pinned if that is on CUDA.

    Args:
        tensor: a plain tensor; a shard's local one.
        dtype: of the result; None is the tensor's.
    """
    pinned = tensor.is_cuda
    return _made(lambda: torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=pinned, requires_grad=False))


def host_empty(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Host memory that is not filled, ``[count]``."""
    return _made(lambda: torch.empty(count, dtype=dtype, device="cpu", pin_memory=pinned))


def _made(make: Callable[[], Tensor]) -> Tensor:
    _making.on = True
    try:
        made = make()
    finally:
        _making.on = False
    _mark(made.untyped_storage())
    return made


def _mark(storage: torch.UntypedStorage) -> None:
    address = storage._cdata

    def forget(ref: weakref.ref[torch.UntypedStorage]) -> None:
        if _marked.get(address) is ref:
            del _marked[address]

    known = _marked.get(address)
    if known is None or known() is not storage:
        _marked[address] = weakref.ref(storage, forget)
