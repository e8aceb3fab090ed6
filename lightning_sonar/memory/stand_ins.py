"""What fake tensors answer where a training step asks for values, and whom to tell when there is no answer."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

aten = torch.ops.aten

NO_ANSWER = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What is raised where values are needed that fake tensors do not have."""

_NO_ANSWER_TEXTS = (".numpy() is not supported for tensor subclasses", "Cannot access data pointer")
# Code that a user did not write: the line to name is the innermost one outside of it.
_FIT = (str(Path(__file__).with_name("simulate.py")), "_fit")
_INSTALLED = (*(str(Path(m.__file__ or "").parent) for m in (torch, lightning)), str(Path(__file__).parents[1]))


def number_of(value: Any) -> bool | float | int:
    """What ``item()`` returns: a constant's value, else 0, 1.0 (counts are divided by), or False unless it `holds`."""
    if getattr(value, "constant", None) is not None:
        return value.constant.item()
    if getattr(value, "holds", False):
        return True
    return False if value.dtype == torch.bool else 1.0 if value.dtype.is_floating_point else 0


def holds(func: Any, args: Any) -> bool:
    """Whether a truth value is True and not False: what says that numbers are finite, as torch composes it."""
    if func is aten.eq.Tensor:
        return args[0] is args[1]
    if func is aten.ne.Scalar:
        return args[1] == math.inf
    if func in (aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor):
        return all(getattr(value, "holds", False) for value in args[:2])
    return func in _SAME_TRUTH and getattr(args[0], "holds", False)


_SAME_TRUTH = (aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.view.default, aten.detach.default)


def _nonzero(num_experts: int, mask: Tensor) -> Tensor:
    # A list of experts that have tokens: all of them, but not the place that stands for none. A table of who goes to
    # one expert: its share. A longer list is of tokens, not of experts: all of them.
    count = mask.numel()
    hits = count if mask.dim() == 1 else math.ceil(count / num_experts)
    if mask.dim() == 1 and count <= num_experts + 1:
        hits = min(count, num_experts)
    return mask.new_empty((hits, mask.dim()), dtype=torch.int64)


def _index(num_experts: int, tensor: Tensor, indices: Any) -> Tensor:
    # A mask selects everything at the most.
    listed = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            listed += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            listed.append(index)
    return aten.index.Tensor(tensor, listed)


def _unique(num_experts: int, tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    counts = tensor.new_empty(tensor.numel(), dtype=torch.int64)
    return tensor.new_empty(tensor.numel()), counts.new_empty(tensor.shape), counts


def _unique_rows(num_experts: int, tensor: Tensor, dim: int, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    counts = tensor.new_empty(tensor.shape[dim], dtype=torch.int64)
    return torch.empty_like(tensor), torch.empty_like(counts), counts


def _masked_select(num_experts: int, tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)))


def _bincount(num_experts: int, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    kind = torch.int64 if weights is None else torch.float64
    return tensor.new_empty(max(minlength, num_experts), dtype=kind)


def _repeat(num_experts: int, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return repeats.new_empty(repeats.numel() if output_size is None else output_size)


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim.default: _unique_rows,
    aten.masked_select.default: _masked_select,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat,
    aten.equal.default: lambda num_experts, one, other: False,
}
"""By operation: what it returns under a fake mode, from the number of experts and its arguments. Where the size of the
result depends on values it is the largest one there can be; routing alone is uniform."""


def stand_in(func: Any, args: Any) -> Callable[..., Any] | None:
    """The entry of `STAND_INS` for an operation, or that of an index with masks in it; None if it needs none."""
    if func is aten.index.Tensor:
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return _index if masks else None
    return STAND_INS.get(func)


def copy_fake(self: FakeTensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a fake tensor, which has no storage that could be copied by bytes."""
    if id(self) not in memo:
        memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
    return memo[id(self)]


def users_line(frame: FrameType | None = None) -> str | None:
    """``file:line`` of the innermost caller within the fit that belongs to no installed library; None without."""
    frame = frame or sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _FIT:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _is_users(filename: str) -> bool:
    installed = filename.startswith((*_INSTALLED, "<")) or "site-packages" in filename
    return not installed and not filename.startswith(str(Path(traceback.__file__).parent))


def explained(error: Exception, last_read: str | None) -> Exception:
    """The error to raise in place of one that a simulated fit ended with.

    Args:
        error: what was raised. Where it has to do with values it becomes a `RuntimeError` that names the line; any
            other stays as it is, with a note if a number that was read may be the reason.
        last_read: where a user's line last read a number.
    """
    stack = traceback.extract_tb(error.__traceback__)
    start = max((index for index, f in enumerate(stack) if (f.filename, f.name) == _FIT), default=0)
    lines = [f for f in stack[start:] if _is_users(f.filename)]
    where = f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}" if lines else "a line of an installed library"
    if isinstance(error, NO_ANSWER) or any(text in str(error) for text in _NO_ANSWER_TEXTS):
        what = f"{error}".splitlines()[0]
        return RuntimeError(
            f"The step cannot be planned, because it reads values ({what}) at\n  {where}\nA plan has shapes and no "
            "values. Plan the module without that line: leave it out in a subclass that is made for the plan, or take "
            "the number from a shape."
        )
    if last_read is not None:
        error.add_note(
            f"This was raised while the step was planned on fake tensors. Numbers read from them are stand-ins (0, 1.0 "
            f"or False); the last one was read at {last_read}. If the step depends on it, take it from a shape, or "
            "give it as a plain number in a subclass that is made for the plan."
        )
    return error
