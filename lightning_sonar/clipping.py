"""Gradient norms and the clip at the end of backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from lightning_sonar.modes import Mode, mode_name
from lightning_sonar.sharded import by_mesh, norm_part, settle, stored, whole

ClipAlgorithm = Literal["norm", "value"]


def check_clip(mode: Mode, max_norm: float | None, algorithm: str | None = "norm") -> None:
    """Refuse a clip that the mode leaves nothing for, or that is asked for twice, or that is no number.

    Raises:
        ValueError: saying how to go on.
    """
    if max_norm is not None and math.isnan(max_norm):
        raise ValueError(
            "gradient_clip_val=nan: expected the largest norm (or, for gradient_clip_algorithm='value', the largest "
            "element) as a number, or None to clip nothing."
        )
    if mode.expert_clip != "none" and max_norm and max_norm > 0 and algorithm == "value":
        raise ValueError(
            f"gradient_clip_algorithm='value' with expert_clip={mode.expert_clip!r}: clipping by value is element-"
            "wise, so expert gradients get it inside backward like all others, and there is no norm to clip them by. "
            "Set expert_clip='none' or gradient_clip_algorithm='norm'."
        )
    if mode.clip == "none" and mode.expert_clip == "none" and max_norm and max_norm > 0 and algorithm != "value":
        raise ValueError(
            f"mode {mode_name(mode)!r} frees every gradient inside backward, so there is no global norm to clip by, "
            f"but gradient_clip_val={max_norm} was given. Set gradient_clip_val=None (trainer.gradient_clip_val=null), "
            "or choose mode='sonar', which clips the dense parameters."
        )


def with_gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of ``tensors`` that have a gradient now."""
    return [tensor for tensor in tensors if tensor.grad is not None]


def clip_norm_(tensors: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip by global norm, exactly as ``torch.nn.utils.clip_grad_norm_`` does.

    Args:
        tensors: parameters of any shape; those without a gradient are passed over.
        max_norm: the largest norm allowed.

    Returns:
        The norm before clipping, 0-dim, in the gradients' dtype (a bfloat16 norm is rounded).
    """
    groups = by_mesh(with_gradients(tensors))
    if len(groups) < 2:
        return whole(torch.nn.utils.clip_grad_norm_(tensors, max_norm))
    # No operator takes tensors of several meshes together.
    norms = [whole(torch.nn.utils.get_total_norm([t.grad for t in group if t.grad is not None])) for group in groups]
    norm = torch.linalg.vector_norm(torch.stack([part.to(norms[0].device) for part in norms]))
    for group in groups:
        scale_(group, max_norm, norm)
    return norm


def tensor_norm(grad: Tensor) -> Tensor:
    """The 2-norm of one gradient as ``clip_grad_norm_`` takes it: 0-dim, in the gradient's dtype.

    torch's foreach kernel does not sum in the order of ``vector_norm``, so the same one has to be called.
    """
    if _has_foreach_support([grad], grad.device):
        return torch._foreach_norm([grad], 2.0)[0]
    return torch.linalg.vector_norm(grad, 2.0)


def total_norm(norms: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None) -> Tensor:
    """The global norm of the gradients whose norms these are, as ``clip_grad_norm_`` takes it.

    Args:
        norms: from `tensor_norm`, 0-dim, in the optimizer's order of the tensors: the order rounds.
        dtypes: of the gradients, where some are complex and have a norm that is not.

    Returns:
        0-dim, on the device of the first; in the gradients' dtype if they have one in common.
    """
    dtypes = [norm.dtype for norm in norms] if dtypes is None else dtypes
    alike: list[Tensor | None] = [norm.new_empty((), dtype=dtype) for norm, dtype in zip(norms, dtypes, strict=True)]
    groups = _group_tensors_by_device_and_dtype([alike], with_indices=True)
    grouped = [norms[index] for _, indices in groups.values() for index in indices]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in grouped]), 2.0)


def coefficient(max_norm: float, norm: Tensor) -> Tensor:
    """What ``clip_grad_norm_`` multiplies gradients with, in the norm's shape, dtype and device; at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_(tensors: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place by the `coefficient` for a norm measured before, as ``clip_grad_norm_`` does.

    Each product is rounded to the gradient's own dtype.
    """
    torch.nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)


def clip_value_(tensors: Sequence[Tensor], max_value: float) -> None:
    """Clip each element to ``[-max_value, max_value]``, as ``torch.nn.utils.clip_grad_value_`` does."""
    if tensors:  # torch's own function fails on nothing
        torch.nn.utils.clip_grad_value_(tensors, max_value)


def global_norm(tensors: Iterable[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, float32 and 0-dim; ``None`` where there is no gradient."""
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if not grads:
        return None
    norms = settle(norm_part(grad) for grad in grads)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


class GradNorms:
    """The norms of a step's gradients before clipping, some of which are freed before the step ends.

    Attributes:
        last: ``experts``, ``dense`` and ``total`` of the last step, float32 and 0-dim.
    """

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}
        self._released: dict[bool, list[Tensor]] = {True: [], False: []}

    def released(self, grad: Tensor, is_expert: bool) -> None:
        """Measure a gradient that is about to be freed. Nothing waits for the device."""
        self._released[is_expert].append(norm_part(grad))

    def gather(self, tensors: Iterable[tuple[Tensor, bool]]) -> None:
        """End the step: ``tensors`` are all parameters, each with whether it is an expert tensor."""
        left: dict[bool, list[Tensor]] = {True: [], False: []}
        for tensor, is_expert in tensors:
            left[is_expert].append(tensor)
        parts: list[Tensor] = []
        for is_expert, name in ((True, "experts"), (False, "dense")):
            norms = settle(self._released[is_expert])
            rest = global_norm(left[is_expert])
            if rest is not None:
                norms.append(rest.to(norms[0].device) if norms else rest)
            self.last[name] = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
            parts.append(self.last[name])
        self.last["total"] = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
        self._released = {True: [], False: []}


def is_nonfinite(tensor: Tensor) -> Tensor:
    """Whether a tensor, or this rank's shard of it, holds a NaN or an infinity: float32, 0-dim, 1 or 0, on its device.

    ``aminmax`` carries a NaN through and needs no temporary of the tensor's size.
    """
    tensor = stored(tensor.detach())
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    low, high = torch.aminmax(tensor)
    return (~(torch.isfinite(low) & torch.isfinite(high))).float()
