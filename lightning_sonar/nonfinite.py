"""What a step does when its loss or a gradient is NaN or infinite, without waiting for a device in the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sonar.clipping import is_nonfinite

OnNonfinite = Literal["skip", "raise", "ignore"]
Check = Literal["loss", "gradient"]

_UPDATED = {
    False: "nothing was updated in this step",
    True: "other tensors were updated in this step already",
}


def check_nonfinite(on_nonfinite: OnNonfinite, check: Check) -> None:
    """Refuse a check whose findings would be ignored.

    Raises:
        ValueError: naming both.
    """
    if check == "gradient" and on_nonfinite == "ignore":
        raise ValueError("check='gradient' looks for what on_nonfinite='ignore' ignores; leave one of them out.")


class NonfiniteGuard:
    """Decides, for the step under way, which updates are left out, and counts them.

    On a GPU the decision stays on the device: optimizers with fused updates read it as ``found_inf``. On a CPU, and
    for other optimizers, it is a Python bool, for which the loss is read once a backward.

    Attributes:
        skipping: whether nothing is updated in this step, as far as the host knows.
        flag: the same as a device flag, float32 and 0-dim, or None where the host knows.
        agree: if set, gives all ranks the same verdict: the largest of their flags.
    """

    def __init__(self, on_nonfinite: OnNonfinite, check: Check) -> None:
        check_nonfinite(on_nonfinite, check)
        self.on_nonfinite = on_nonfinite
        self.checks_gradients = check == "gradient"
        self.skipping = False
        self.flag: Tensor | None = None
        self.agree: Callable[[Tensor], Tensor] | None = None
        # Of a step whose gradients were all looked at before the first update.
        self._judged = False
        self._left_out = False
        self._bad_step: Tensor | None = None
        self._omitted: Tensor | None = None
        self._skipped_steps: int | Tensor = 0
        self._skipped_tensors: int | Tensor = 0

    @property
    def skipped_steps(self) -> int:
        return int(self._skipped_steps)

    @property
    def skipped_tensors(self) -> int:
        return int(self._skipped_tensors)

    @property
    def incomplete(self) -> Tensor | None:
        """Whether this step leaves out some update, 0-dim: not zero if so; None if nothing speaks for it so far."""
        found = [flag for flag in (self.flag, self._omitted) if flag is not None]
        if self.skipping:
            return torch.ones(())
        return torch.stack([flag.to(found[0].device) for flag in found]).amax() if found else None

    def look_at(self, loss: Tensor, optimizer: torch.optim.Optimizer, updated: bool) -> None:
        """Before a backward: is this loss finite? Several backwards of one step share the verdict.

        Args:
            loss: of this backward.
            optimizer: the one that will update.
            updated: whether some tensor was updated in this step already.

        Raises:
            FloatingPointError: if it is not and ``on_nonfinite="raise"``.
        """
        if self.on_nonfinite == "ignore":
            return
        bad = self._verdict(loss)
        if self.on_nonfinite == "raise":
            if bad.bool().item():
                raise FloatingPointError(
                    f"The loss is {loss.item()}{self._elsewhere(loss)}; {_UPDATED[updated]}. "
                    "on_nonfinite='skip' leaves such steps out and counts them."
                )
        elif _stays_on_device(loss, optimizer):
            self.flag = bad if self.flag is None else torch.maximum(self.flag, bad)
            optimizer.found_inf = self.flag  # type: ignore[attr-defined]
        else:
            self.skipping = self.skipping or bool(bad.bool().item())

    def attributes(self, tensor: Tensor, optimizer: torch.optim.Optimizer, updated: bool) -> dict[str, Any] | None:
        """What the update of one tensor inside backward is told, or None if it is left out.

        Args:
            tensor: the tensor, with its complete gradient.
            optimizer: the one that will update it.
            updated: whether another tensor was updated in this step already.

        Raises:
            FloatingPointError: if its gradient is checked, not finite and ``on_nonfinite="raise"``.
        """
        if self.skipping:
            return None
        if self._judged:
            return {} if self._bad_step is None else {"found_inf": self._bad_step}
        flag, grad = self.flag, tensor.grad
        if self.checks_gradients and grad is not None:
            bad = self._verdict(grad)
            what = f"The gradient of a tensor of shape {list(tensor.shape)}"
            self._raise_if(bad, what, updated)
            self._omit(bad)
            if not _stays_on_device(grad, optimizer):
                self._skipped_tensors = self._skipped_tensors + int(bad)
                return None if bad.bool().item() else {}
            self._skipped_tensors = self._skipped_tensors + self._under_finite_loss(bad)
            flag = bad if flag is None else torch.maximum(flag, bad)
        return {} if flag is None else {"found_inf": flag}

    def leaves_out(self, others: Iterable[Tensor], optimizer: torch.optim.Optimizer, updated: bool) -> bool:
        """After the last backward: whether the other tensors' gradients are to be dropped, so that nothing steps.

        With a device flag they are kept, and the optimizer reads the flag.

        Args:
            others: tensors that step after backward; those without a gradient are passed over.
            optimizer: the one that will update them.
            updated: whether some tensor was updated in this step already.

        Raises:
            FloatingPointError: if a gradient is checked, not finite and ``on_nonfinite="raise"``.
        """
        if self.checks_gradients and not self.skipping and not self._judged:
            found = [is_nonfinite(tensor.grad) for tensor in others if tensor.grad is not None]
            if found:
                return self._decide(found, optimizer, updated)
        return self.skipping or self._left_out

    def judge(self, found: list[Tensor], optimizer: torch.optim.Optimizer) -> bool:
        """Before anything is updated: are all gradients finite? Nothing is looked at again in this step.

        Args:
            found: for each gradient whether it is not finite, float32 and 0-dim, from `is_nonfinite`.
            optimizer: the one that will update.

        Returns:
            Whether the step is left out, as far as the host knows.

        Raises:
            FloatingPointError: if one is not and ``on_nonfinite="raise"``.
        """
        self._left_out = self._decide(found, optimizer, updated=False)
        self._judged = True
        return self._left_out

    def _decide(self, found: list[Tensor], optimizer: torch.optim.Optimizer, updated: bool) -> bool:
        bad = torch.stack([one.to(found[0].device) for one in found]).amax()
        bad = bad if self.agree is None else self.agree(bad)
        self._raise_if(bad, "The gradient of a parameter", updated)
        self._omit(bad)
        if not _stays_on_device(bad, optimizer):
            self._skipped_tensors = self._skipped_tensors + int(bad) * len(found)
            return bool(bad.bool().item())
        self._skipped_tensors = self._skipped_tensors + self._under_finite_loss(bad) * len(found)
        self._bad_step = bad if self.flag is None else torch.maximum(self.flag, bad)
        optimizer.found_inf = self._bad_step  # type: ignore[attr-defined]
        return False

    def _under_finite_loss(self, bad: Tensor) -> Tensor:
        """The verdict on a gradient, unless it follows from the loss: such a step is counted as one already."""
        return bad if self.flag is None else bad * (self.flag == 0).to(bad.device)

    def _omit(self, bad: Tensor) -> None:
        self._omitted = bad if self._omitted is None else torch.maximum(self._omitted, bad.to(self._omitted.device))

    def _verdict(self, tensor: Tensor) -> Tensor:
        bad = is_nonfinite(tensor)
        return bad if self.agree is None else self.agree(bad)

    def _elsewhere(self, loss: Tensor) -> str:
        return " here, and not finite on another rank" if bool(loss.isfinite()) else ""

    def _raise_if(self, bad: Tensor, what: str, updated: bool) -> None:
        if self.on_nonfinite == "raise" and bad.bool().item():
            raise FloatingPointError(
                f"{what} is not finite, though the loss is; it was not applied. {_UPDATED[updated].capitalize()}. "
                "on_nonfinite='skip' leaves such updates out and counts them."
            )

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count, and forget the verdict."""
        if self.flag is not None:
            self._skipped_steps = self._skipped_steps + self.flag
        elif self.skipping:
            self._skipped_steps = self._skipped_steps + 1
        self.withdraw(optimizer)

    def withdraw(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the verdict, and take the flag off the optimizer."""
        self.skipping, self.flag = False, None
        self._judged, self._left_out, self._bad_step, self._omitted = False, False, None, None
        if getattr(optimizer, "found_inf", None) is not None:
            optimizer.found_inf = None  # type: ignore[attr-defined]


def _stays_on_device(tensor: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the verdict can go to the optimizer as a device flag, so that nobody has to wait for it."""
    return tensor.device.type != "cpu" and all(group.get("fused") for group in optimizer.param_groups)
