"""How an expert gradient is clipped inside backward, before its own update: by its own norm, or by the last step's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_sonar.clipping import coefficient, global_norm, scale_, tensor_norm
from lightning_sonar.modes import ExpertClip, Mode
from lightning_sonar.sharded import is_sharded, norm_part, settle, whole

Attributes = dict[str, Any]


class Unclipped:
    """The paper's: expert gradients are not clipped. The others say what they do differently."""

    def before_update(self, tensor: Tensor, max_norm: float, optimizer: torch.optim.Optimizer) -> Attributes:
        """Clip the complete gradient of ``tensor`` in place, or say how the optimizer is to scale it.

        Nothing waits for the device.

        Args:
            tensor: an expert tensor ``[E, ...]`` with ``.grad``.
            max_norm: the largest norm, more than 0.
            optimizer: the optimizer whose copy will update it.

        Returns:
            Attributes of that copy; see `step_tensor`.
        """
        return {}

    def after_backward(self, others: Iterable[Tensor], skipped: Tensor | None) -> None:
        """Take note of the gradients that backward has left, before they are clipped.

        Args:
            others: tensors, whose gradients are there if they have one.
            skipped: 0-dim: unless it is zero, this step leaves out some update, or all.
        """

    @property
    def waiting(self) -> bool:
        """Whether gradients of the step under way were noted, and `after_backward` has not been told of the others."""
        return False

    def abandon(self) -> None:
        """Forget the step under way."""

    def state_dict(self) -> dict[str, float]:
        """What the next step needs of this one; plain numbers. Reads the device."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take what `state_dict` returned, of this policy or another one."""


class PerTensor(Unclipped):
    """Each tensor by the norm of its own gradient, as ``clip_grad_norm_([tensor], max_norm)`` does."""

    def before_update(self, tensor: Tensor, max_norm: float, optimizer: torch.optim.Optimizer) -> Attributes:
        return scaling(tensor, max_norm, whole(tensor_norm(gradient(tensor))), optimizer)


class PerExpert(Unclipped):
    """Each expert's slice by its own norm; norms, coefficients and products are in the gradient's dtype."""

    def before_update(self, tensor: Tensor, max_norm: float, optimizer: torch.optim.Optimizer) -> Attributes:
        grad = gradient(tensor)
        norms = torch.linalg.vector_norm(grad, dim=tuple(range(1, grad.ndim)), keepdim=True)  # [E, 1, ...]
        grad.mul_(coefficient(max_norm, norms))
        return {}


class Lagged(Unclipped):
    """Every tensor by the global norm of the step before, float32. The first step is not clipped.

    The expert part of the norm is a sum of squares that `FusedAdamW` accumulates while it updates; other optimizers
    and sharded tensors cost one more look at each gradient. A norm that is not finite, or of a step that leaves some
    update out, is not used: the one before it stays.
    """

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._sums: dict[torch.device, Tensor] = {}
        self._parts: list[Tensor] = []

    def before_update(self, tensor: Tensor, max_norm: float, optimizer: torch.optim.Optimizer) -> Attributes:
        grad = gradient(tensor)
        device = grad.device
        attributes: Attributes = {}
        if scales_itself(optimizer) and not is_sharded(grad):
            if device not in self._sums:
                self._sums[device] = torch.zeros((), dtype=torch.float32, device=device)
            attributes["grad_sq_sum"] = self._sums[device]
        else:
            self._parts.append(norm_part(grad))
        if self._last is not None:
            self._last = self._last.to(device)
            if scales_itself(optimizer):
                attributes["gradient_scale"] = coefficient(max_norm, self._last)
            else:
                scale_([tensor], max_norm, self._last)
        return attributes

    def after_backward(self, others: Iterable[Tensor], skipped: Tensor | None) -> None:
        parts = [*settle(self._parts), *(total.sqrt() for total in self._sums.values())]
        rest = global_norm(others)
        self.abandon()
        if not parts:
            return
        if rest is not None:
            parts.append(rest)
        norm = torch.linalg.vector_norm(torch.stack([part.to(parts[0].device) for part in parts]))
        before = torch.full_like(norm, torch.inf) if self._last is None else self._last.to(norm.device)
        usable = torch.isfinite(norm) if skipped is None else torch.isfinite(norm) & (skipped.to(norm.device) == 0)
        norm = torch.where(usable, norm, before)
        # Of the first step, there is no norm before: one that clips nothing stands for it.
        self._last = torch.where(torch.isfinite(norm), norm, 0.0)

    @property
    def waiting(self) -> bool:
        return bool(self._sums or self._parts)

    def abandon(self) -> None:
        self._sums.clear()
        self._parts.clear()

    def state_dict(self) -> dict[str, float]:
        return {} if self._last is None else {"global_norm": float(self._last)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if "global_norm" in state:
            self._last = torch.tensor(state["global_norm"], dtype=torch.float32)


POLICIES: dict[ExpertClip, type[Unclipped]] = {
    "none": Unclipped,
    "lagged": Lagged,
    "per_tensor": PerTensor,
    "per_expert": PerExpert,
}
"""What clips inside one backward pass; ``"exact"`` takes two, see `TwoPass`."""


def check_accumulation(mode: Mode, accumulation: str) -> None:
    """Refuse a global norm over experts where their gradient is never whole.

    Raises:
        ValueError: saying how to go on.
    """
    if accumulation == "per_microbatch" and mode.expert_clip in ("exact", "lagged"):
        raise ValueError(
            f"expert_clip={mode.expert_clip!r} with accumulation='per_microbatch': experts are updated by each "
            "microbatch on its own, so there is no global norm of the whole step to clip them by. Use "
            "accumulation='host' or 'exact', or expert_clip='per_tensor' or 'per_expert'."
        )


def scaling(tensor: Tensor, max_norm: float, norm: Tensor, optimizer: torch.optim.Optimizer) -> Attributes:
    """Scale a gradient as ``clip_grad_norm_`` does for this norm, in the optimizer's own pass over it if it can."""
    scale = coefficient(max_norm, norm)
    # With another dtype, CUDA's mul_ rounds the coefficient first, and the fused update does not. It holds float32.
    if scales_itself(optimizer) and scale.dtype == gradient(tensor).dtype != torch.float64:
        return {"gradient_scale": scale.to(tensor.device)}
    scale_([tensor], max_norm, norm)
    return {}


def scales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer multiplies gradients by ``gradient_scale``, and the user has not set one."""
    return getattr(optimizer, "gradient_scale", False) is None


def gradient(tensor: Tensor) -> Tensor:
    """The gradient, which is there."""
    grad = tensor.grad
    if grad is None:
        raise RuntimeError(f"A tensor of shape {list(tensor.shape)} has no gradient; expected one inside its hook.")
    return grad
