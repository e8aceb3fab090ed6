"""Gradient norms and the clip at the end of backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_sonar.modes import Mode, mode_name

ClipAlgorithm = Literal["norm", "value"]


def check_clip(mode: Mode, max_norm: float | None, algorithm: str | None = "norm") -> None:
    """Refuse a global-norm clip where the mode leaves nothing to clip.

    Raises:
        ValueError: saying how to go on.
    """
    if mode.clip == "none" and max_norm and max_norm > 0 and algorithm != "value":
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
    return torch.nn.utils.clip_grad_norm_(tensors, max_norm)


def clip_value_(tensors: Sequence[Tensor], max_value: float) -> None:
    """Clip each element to ``[-max_value, max_value]``, as ``torch.nn.utils.clip_grad_value_`` does."""
    if tensors:  # torch's own function fails on nothing
        torch.nn.utils.clip_grad_value_(tensors, max_value)


def global_norm(tensors: Iterable[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, float32 and 0-dim; ``None`` where there is no gradient."""
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if not grads:
        return None
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
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
        self._released[is_expert].append(torch.linalg.vector_norm(grad, dtype=torch.float32))

    def gather(self, tensors: Iterable[tuple[Tensor, bool]]) -> None:
        """End the step: ``tensors`` are all parameters, each with whether it is an expert tensor."""
        left: dict[bool, list[Tensor]] = {True: [], False: []}
        for tensor, is_expert in tensors:
            left[is_expert].append(tensor)
        parts: list[Tensor] = []
        for is_expert, name in ((True, "experts"), (False, "dense")):
            norms = [*self._released[is_expert]]
            rest = global_norm(left[is_expert])
            if rest is not None:
                norms.append(rest.to(norms[0].device) if norms else rest)
            self.last[name] = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
            parts.append(self.last[name])
        self.last["total"] = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
        self._released = {True: [], False: []}


def is_nonfinite(tensor: Tensor) -> Tensor:
    """Whether a tensor holds a NaN or an infinity: float32, 0-dim, 1.0 or 0.0, on the tensor's device.

    ``aminmax`` carries a NaN through and needs no temporary of the tensor's size.
    """
    low, high = torch.aminmax(tensor.detach())
    return (~(torch.isfinite(low) & torch.isfinite(high))).float()
