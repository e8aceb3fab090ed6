"""The training step in which some tensors are updated inside backward.

One ordinary optimizer holds all parameters. A post-accumulate-grad hook on each released tensor lets that
optimizer step just this tensor, the moment its gradient is complete, and drops the gradient. When backward ends,
only the other tensors still have gradients, so the ordinary clip and the ordinary ``optimizer.step()`` touch only
them. This file knows torch and nothing above it: strategies, the mixin and a plain loop all drive this one piece.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sonar.clipping import ClipAlgorithm, GradNorms, check_clip, clip_norm_, clip_value_, with_gradients
from lightning_sonar.modes import Mode, mode_name
from lightning_sonar.nonfinite import NonfiniteGuard
from lightning_sonar.optim.step_one import Group, step_slice, step_tensor

Accumulation = Literal["exact", "per_microbatch"]

_released: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Observer(Protocol):
    """What may watch a step. It must not change anything."""

    def on_phase(self, phase: str) -> None:
        """The step enters ``"backward"``, ``"clip"``, ``"step"`` or ``"done"``."""

    def on_gradient(self, tensor: Tensor) -> None:
        """A released tensor's gradient is complete: before its update, and before it is freed."""


def is_released(tensor: Tensor) -> bool:
    """Whether some handle updates the tensor inside backward."""
    return tensor in _released


class InBackward:
    """Hooks on the tensors that step inside backward, and the step around them. Made by `release_in_backward`.

    Attributes:
        mode: which tensors step in backward and which are clipped.
        observers: called as the step goes on; see `Observer`.
        clip_value: if set, each released gradient is clipped element-wise to it before its update, as
            ``clip_grad_value_`` clips the others afterwards.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        experts: Mapping[str, Tensor],
        *,
        mode: Mode,
        names: Mapping[int, str],
        accumulation: Accumulation,
        guard: NonfiniteGuard,
        measure_norms: bool,
    ) -> None:
        self.mode = mode
        self.accumulation = accumulation
        self.observers: list[Observer] = []
        self.clip_value: float | None = None
        # The hooks hold this object, and a parameter holds its hooks in C++ where the garbage collector cannot see
        # them: a strong reference from here to a parameter or the optimizer would keep the whole model alive.
        self._optimizer = weakref.ref(optimizer)
        self._experts = {name: weakref.ref(tensor) for name, tensor in experts.items()}
        self._expert_ids = {id(tensor) for tensor in experts.values()}
        self._names = dict(names)
        self._handles: list[Any] = []
        self._group_index: dict[int, int] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        self._fired: set[int] = set()
        self._hooks_now = 0
        self._hooks_last = 0
        self._accumulating = False
        self._inside = False
        self._warned = False
        self._warned_bare = False
        self._guard = guard
        self._norms = GradNorms() if measure_norms else None

    # What one can ask.

    @property
    def experts(self) -> dict[str, Tensor]:
        """The expert tensors that are still alive, by name."""
        alive = ((name, ref()) for name, ref in self._experts.items())
        return {name: tensor for name, tensor in alive if tensor is not None}

    @property
    def hooks_fired(self) -> int:
        """How many hooks acted in the step under way, or in the last one between steps."""
        return self._hooks_now or self._hooks_last

    @property
    def accumulating(self) -> bool:
        """Whether the backward under way, or the next one, is not the last before a step."""
        return self._accumulating

    @property
    def mid_step(self) -> bool:
        """Whether some tensors have been updated for a step whose other tensors have not."""
        return bool(self._fired)

    @property
    def skipped_steps(self) -> int:
        """How many steps updated nothing because the loss was not finite. Reads the device."""
        return self._guard.skipped_steps

    @property
    def skipped_tensors(self) -> int:
        """How many updates of one tensor were left out because its gradient was not finite. Reads the device."""
        return self._guard.skipped_tensors

    def grad_norms(self) -> dict[str, Tensor]:
        """Norms of the last step's gradients before clipping: ``experts``, ``dense``, ``total``, float32 and 0-dim.

        Gathered in the hooks, without a device sync. Empty unless made with ``measure_norms=True``.
        """
        return {} if self._norms is None else dict(self._norms.last)

    def is_expert(self, tensor: Tensor) -> bool:
        return id(tensor) in self._expert_ids

    # The step.

    def backward(self, loss: Tensor, run: Callable[[], Any] | None = None, *, last: bool = True) -> None:
        """Run backward; released tensors are updated in it.

        Args:
            loss: 0-dim; looked at for NaN and infinity before anything is updated.
            run: what runs backward, by default ``loss.backward``.
            last: whether this is the last microbatch before the step. With exact accumulation the hooks act on
                the last one only, on the sum.

        Raises:
            FloatingPointError: if the loss (or a checked gradient) is not finite and ``on_nonfinite="raise"``.
            RuntimeError: if a released tensor gets its gradient twice; see `release_in_backward`.
        """
        self._enter("backward")
        self._guard.look_at(loss, self._live_optimizer())
        if self.accumulation == "per_microbatch":
            self._fired.clear()
        if not last:
            with self.accumulate():
                self._run(run or loss.backward)
            return
        self._run(run or loss.backward)
        if not self._accumulating and self._guard.leaves_out(self._parameters(), self._live_optimizer()):
            self._drop_gradients()

    def clip_(self, max_norm: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clip what backward has left, in the mode's scope.

        Args:
            max_norm: the largest norm (or, for ``"value"``, the largest element); 0 or less clips nothing.
            algorithm: ``"norm"``: the global norm over the mode's ``clip`` scope. ``"value"``: element-wise, over
                all gradients there are; the released ones were clipped to `clip_value` in their hooks.

        Returns:
            The norm before clipping, 0-dim, in the gradients' dtype; ``None`` if no norm was taken.
        """
        self._enter("clip")
        if self._norms is not None:
            self._norms.gather((t, self.is_expert(t)) for t in self._parameters())
        norm = None
        if max_norm > 0:
            tensors = with_gradients(self._parameters())
            if algorithm == "value":
                self._refuse_late_value(max_norm)
                clip_value_(tensors, max_norm)
            else:
                check_clip(self.mode, max_norm, algorithm)
                norm = clip_norm_([t for t in tensors if self.mode.clips(self.is_expert(t))], max_norm)
        self._enter("step")
        return norm

    def train_step(
        self,
        loss: Tensor,
        *,
        max_norm: float = 0.0,
        algorithm: ClipAlgorithm = "norm",
        last: bool = True,
    ) -> Tensor | None:
        """Backward, clip, step and zero the gradients: the whole step of a plain PyTorch loop.

        Returns:
            The norm that the clip measured, 0-dim, or ``None``.
        """
        self.clip_value = max_norm if algorithm == "value" and max_norm > 0 else None
        self.backward(loss, last=last)
        if not last:
            return None
        norm = self.clip_(max_norm, algorithm)
        optimizer = self._live_optimizer()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards run in this context only add to the gradients; the hooks wait for the one after it.

        With ``accumulation="per_microbatch"`` the hooks act in each of them.
        """
        self._warn_exact()
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def remove(self) -> None:
        """Take the hooks off. May be called more than once."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.observers.clear()
        for tensor in [t for t, owner in _released.items() if owner() is self]:
            del _released[tensor]
        optimizer = self._optimizer()
        if optimizer is not None:
            self._guard.withdraw(optimizer)

    def abandon_step(self) -> None:
        """Forget a step that an exception broke off, so that the next one can begin.

        What was updated in it stays updated; gradients are dropped.
        """
        self._guard.withdraw(self._live_optimizer())
        self._drop_gradients()
        self._pending.clear()
        self._fired.clear()
        self._hooks_now = 0

    # Inside.

    def _drop_gradients(self) -> None:
        for tensor in self._parameters():
            tensor.grad = None

    def _refuse_late_value(self, value: float) -> None:
        if self._fired and self.clip_value != value:
            used = "unclipped gradients" if self.clip_value is None else f"the value {self.clip_value}"
            raise RuntimeError(
                f"Clipping by value {value} was asked for after backward, but {len(self._fired)} tensors were updated "
                f"in it with {used}. Say it before: Trainer(gradient_clip_val=..., gradient_clip_algorithm='value'), "
                "or handle.clip_value = ... in a plain loop."
            )

    def _warn_bare(self) -> None:
        if self._warned_bare or self._guard.on_nonfinite == "ignore":
            return
        self._warned_bare = True
        warnings.warn(
            "loss.backward() was called directly, so nothing looked whether the loss is finite before tensors were "
            "updated. Call handle.backward(loss) or handle.train_step(loss), or choose on_nonfinite='ignore'.",
            stacklevel=2,
        )

    def _run(self, run: Callable[[], Any]) -> None:
        self._inside = True
        try:
            run()
        finally:
            self._inside = False

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the hooks on; `release_in_backward` does."""
        for index, group in enumerate(optimizer.param_groups):
            for tensor in group["params"]:
                if not tensor.requires_grad or not self.mode.steps_in_backward(self.is_expert(tensor)):
                    continue
                self._group_index[id(tensor)] = index
                _released[tensor] = weakref.ref(self)
                slices = range(tensor.shape[0]) if self.mode.granularity == "expert" else [None]
                for part in slices:
                    handle = tensor.register_post_accumulate_grad_hook(partial(self._on_gradient, part))
                    self._handles.append(handle)
        # The hook's owner is the optimizer, so a method bound to this object makes no cycle through it.
        self._handles.append(optimizer.register_step_post_hook(self._on_step))

    def _on_gradient(self, part: int | None, tensor: Tensor) -> None:
        """The hook. `part` is the expert it updates, or None for the whole tensor. Must return None."""
        if self._accumulating and self.accumulation == "exact":
            return
        grad = tensor.grad
        if grad is None:
            return
        if not part:
            self._begin(tensor, grad)
        self._hooks_now += 1
        last = part is None or part == tensor.shape[0] - 1
        if not self._guard.skipping:
            self._update(part, tensor)
        if last:
            self._pending.pop(id(tensor), None)
            tensor.grad = None

    def _begin(self, tensor: Tensor, grad: Tensor) -> None:
        if self.accumulation == "per_microbatch" and not self._inside:
            raise RuntimeError(
                "accumulation='per_microbatch' needs to know where a backward begins: call handle.backward(loss) "
                "or handle.train_step(loss) instead of loss.backward()."
            )
        if not self._inside:
            self._warn_bare()
        if id(tensor) in self._fired:
            raise RuntimeError(self._twice(tensor))
        if grad.requires_grad:
            raise RuntimeError(
                f"backward(create_graph=True) reached {self._name(tensor)}, which is updated inside backward: the "
                "graph of its gradient would be computed with a weight that has changed. Use torch.autograd.grad "
                "for the inner gradient, or mode='standard_no_expert_clip'."
            )
        self._fired.add(id(tensor))
        for observer in self.observers:
            observer.on_gradient(tensor)
        if self._norms is not None:
            self._norms.released(grad, self.is_expert(tensor))
        if self.clip_value is not None and not self._guard.skipping:
            clip_value_([tensor], self.clip_value)

    def _update(self, part: int | None, tensor: Tensor) -> None:
        optimizer = self._live_optimizer()
        group: Group = optimizer.param_groups[self._group_index[id(tensor)]]
        pending = self._pending.setdefault(id(tensor), {})
        if not part:
            pending["attributes"] = self._guard.attributes(tensor, optimizer)
        attributes = pending["attributes"]
        if attributes is None:
            return
        if part is None:
            step_tensor(optimizer, group, tensor, **attributes)
        else:
            step_slice(optimizer, group, tensor, part, pending.setdefault("slices", {}), **attributes)
        # A fused update does not bump the version counter, and a second backward through a graph that saved the
        # old weight would then silently use the new one.
        torch.autograd.graph.increment_version(tensor)

    def _on_step(self, *_: Any) -> None:
        """The optimizer has stepped: the step is whole."""
        self._guard.end_step(self._live_optimizer())
        self._fired.clear()
        self._hooks_last, self._hooks_now = self._hooks_now, 0
        self._enter("done")

    def _enter(self, phase: str) -> None:
        for observer in self.observers:
            observer.on_phase(phase)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self._live_optimizer().param_groups:
            yield from group["params"]

    def _live_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                "The optimizer that updates these tensors inside backward is gone, but its hooks are still on them. "
                "Keep the optimizer alive as long as the model trains, or call handle.remove()."
            )
        return optimizer

    def _name(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")

    def _twice(self, tensor: Tensor) -> str:
        return (
            f"{self._name(tensor)} got a second gradient before the step that its first one belongs to had ended; it "
            "was already updated, so this gradient would be applied as a step of its own. If you accumulate over "
            "several backwards, put all but the last into `with handle.accumulate():` (in a SonarMoEMixin module "
            "`with self.accumulate():`), or choose accumulation='per_microbatch'. If you do not, call "
            "optimizer.step() after each backward. If the tensor is used twice under reentrant activation "
            "checkpointing, use checkpoint(..., use_reentrant=False). If an exception broke the last step off, call "
            "handle.abandon_step(). If nothing of this fits, "
            "mode='standard_no_expert_clip' does without hooks."
        )

    def _warn_exact(self) -> None:
        if self._warned or self.accumulation != "exact" or self.mode.in_backward == "none":
            return
        self._warned = True
        warnings.warn(
            "Gradients are accumulated over several backwards, so they stay alive between them and the memory that "
            f"mode {mode_name(self.mode)!r} saves is lost; the updates are exact. accumulation='per_microbatch' "
            "updates experts once a microbatch instead, which saves the memory and changes the training.",
            stacklevel=3,
        )
