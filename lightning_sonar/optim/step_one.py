"""Step one tensor, or one expert's slice of it, of any ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_sonar.optim.update import is_dense, same_strides

Group = dict[str, Any]

# Element-wise: the update of an element reads that element's parameter, gradient and state, and scalars.
ELEMENT_WISE = frozenset(
    [
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "FusedAdamW", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    ]
)


class Part(NamedTuple):
    """Whose part a stepping copy updates: set on it as ``part_of``, for optimizers that ask where an element lies.

    ``offset`` is in elements of the memory of ``tensor``, a parameter of ``optimizer``.
    """

    optimizer: Any
    tensor: Tensor
    offset: int


def owner_of(optimizer: torch.optim.Optimizer, tensor: Tensor) -> torch.optim.Optimizer:
    """The optimizer that updates ``tensor``: of one made of several, which has ``child_of``, the child."""
    child_of = getattr(optimizer, "child_of", None)
    return optimizer if child_of is None else child_of(tensor)


def is_element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether stepping the slices of a tensor one by one equals stepping the tensor at once.

    True for the optimizers that are known to be, and for any that says so with ``element_wise = True``.
    """
    declared = getattr(optimizer, "element_wise", None)
    if declared is not None:
        return bool(declared)
    kind = type(optimizer)
    ours = kind.__module__.startswith(("torch.optim", "lightning_sonar."))
    return ours and kind.__name__ in ELEMENT_WISE


def step_tensor(optimizer: torch.optim.Optimizer, group: Group, tensor: Tensor, **attributes: Any) -> None:
    """Run the optimizer's own ``step`` on one parameter that has a gradient.

    Everything is read from the live optimizer at each call: a scheduler changes ``group`` in place and
    ``load_state_dict`` replaces ``optimizer.state``, so nothing may be remembered between calls.

    Args:
        optimizer: the optimizer that owns ``tensor``.
        group: the live parameter group that holds ``tensor``; its hyperparameters are used.
        tensor: the parameter to update in place, any shape, with ``.grad`` set.
        attributes: set on the stepping copy only (``found_inf``, ``gradient_scale``, ``grad_sq_sum``).
    """
    optimizer = owner_of(optimizer, tensor)
    grad = tensor.grad
    if grad is not None and group.get("fused") and type(grad) is Tensor and not same_strides(tensor, grad):
        # torch's fused kernels do not notice, and pair a weight with another one's gradient.
        tensor.grad = torch.empty_like(tensor, dtype=grad.dtype).copy_(grad)
    clone = narrowed(optimizer, group, tensor, attributes)
    clone.part_of = Part(optimizer, tensor, 0)
    clone.state = optimizer.state
    clone.step()


def step_slice(
    optimizer: torch.optim.Optimizer,
    group: Group,
    tensor: Tensor,
    index: int,
    pending: dict[str, Any],
    **attributes: Any,
) -> None:
    """Update slice ``index`` of a parameter ``[E, ...]`` as part of one step of the whole tensor.

    Where slices would not round as the whole tensor does (see `_steps_whole`), the last call steps the whole.
    State tensors shaped like the parameter are sliced; all others (the step count) are shared: each slice starts
    from their value before the step, and the last slice's result is kept. Call it for 0 to E-1, in any order.

    Args:
        optimizer: an element-wise optimizer that owns ``tensor``.
        group: the live parameter group that holds ``tensor``.
        tensor: the parameter ``[E, ...]`` with ``.grad`` set.
        index: which slice.
        pending: a dict that is empty at the first slice of a step; this function keeps its books in it.
        attributes: set on the stepping copy only.
    """
    optimizer = owner_of(optimizer, tensor)
    pending["done"] = pending.get("done", 0) + 1
    last = pending["done"] == tensor.shape[0]
    if _steps_whole(group, tensor):
        if last:
            step_tensor(optimizer, group, tensor, **attributes)
            pending.clear()
        return
    part = tensor.detach()[index]
    grad = cast(Tensor, tensor.grad)
    part.grad = grad[index]
    live = optimizer.state.get(tensor) or {}
    whole: dict[str, Any] = pending.setdefault("whole", dict(live))
    clone = narrowed(optimizer, group, part, attributes)
    clone.part_of = Part(optimizer, tensor, index * tensor.stride(0))
    clone.state = defaultdict(dict)
    if live:
        clone.state[part] = {
            key: value[index] if _is_batched(value, tensor) else _copy(value) for key, value in live.items()
        }
    clone.step()
    for key, value in clone.state[part].items():
        if isinstance(value, Tensor) and value.shape == part.shape and part.ndim > 0:
            if key not in whole:
                whole[key] = torch.empty_like(tensor, dtype=value.dtype, device=value.device)
            if not _shares_storage(whole[key], value):
                whole[key][index].copy_(value)
        else:
            pending.setdefault("shared", {})[key] = value
    if last:
        shared = pending.get("shared", {})
        _keep(optimizer, tensor, {key: {**whole, **shared}[key] for key in clone.state[part]})
        pending.clear()


def narrowed(
    optimizer: torch.optim.Optimizer,
    group: Group,
    tensor: Tensor,
    attributes: dict[str, Any],
    kind: type[torch.optim.Optimizer] | None = None,
) -> Any:
    """A shallow copy of ``optimizer`` whose only parameter is ``tensor``; of the base class ``kind``, if given."""
    clone: Any = object.__new__(kind or type(optimizer))
    # A scheduler patches `step` on the instance and users hang hooks on it: both speak of whole steps.
    clone.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    clone._optimizer_step_pre_hooks = OrderedDict()
    clone._optimizer_step_post_hooks = OrderedDict()
    clone.param_groups = [{**group, "params": [tensor]}]
    clone.__dict__.update(attributes)
    return clone


def _steps_whole(group: Group, tensor: Tensor) -> bool:
    """Whether a fused kernel would update slices of this tensor differently from the tensor.

    It walks memory, so a slice with gaps in it, as where the experts are not the outermost dimension, is no task for
    it. On a CPU its vector body and the scalar tail of a run do not round alike, and a slice has a tail of its own
    unless it is a whole number of vectors (32 bfloat16 or 16 float32 elements with AVX-512).
    """
    if not group.get("fused"):
        return False
    return not is_dense(tensor[0]) or (tensor.device.type == "cpu" and tensor[0].numel() % 32 != 0)


def _is_batched(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _shares_storage(whole: Tensor, part: Tensor) -> bool:
    return whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def _keep(optimizer: torch.optim.Optimizer, tensor: Tensor, after: dict[str, Any]) -> None:
    """Make `after` the live state, in place where there is one: others may hold its tensors."""
    state = optimizer.state[tensor]
    for key, value in after.items():
        if isinstance(state.get(key), Tensor) and isinstance(value, Tensor):
            if state[key] is not value:
                state[key].copy_(value)
        else:
            state[key] = value
