"""The hooks: what happens when the gradient of a tensor is complete inside backward.

`in_backward` has the step around them. This file knows torch and nothing above it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sonar import messages
from lightning_sonar.clipping import GradNorms, clip_value_
from lightning_sonar.expert_clip import POLICIES, Unclipped
from lightning_sonar.members import Members
from lightning_sonar.modes import Mode
from lightning_sonar.nonfinite import NonfiniteGuard
from lightning_sonar.optim.step_one import Group, owner_of, step_slice, step_tensor
from lightning_sonar.protocols import Accumulation, Observer, Ranks
from lightning_sonar.two_pass import TwoPass

_released: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def is_released(tensor: Tensor) -> bool:
    """Whether some handle updates the tensor inside backward."""
    return tensor in _released


class GradientHooks:
    """Hooks on the tensors that step inside backward, and the books of the step under way; see `InBackward`."""

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
        self.max_norm: float | None = None
        self.leaf_of: Callable[[Tensor], Tensor] | None = None
        self.ranks: Ranks | None = None
        # The hooks hold this object, and a parameter holds its hooks in C++ where the garbage collector cannot see
        # them: a strong reference from here to a parameter or the optimizer would keep the whole model alive.
        self._optimizer = weakref.ref(optimizer)
        self._members = Members(experts, names)
        self._handles: list[Any] = []
        self._hooks: dict[int, list[Any]] = {}
        self._group_index: dict[int, tuple[int, int]] = {}
        self._pending: dict[int, dict[str, Any]] = {}
        self._fired: set[int] = set()
        self._hooks_now = 0
        self._hooks_last = 0
        self._accumulating = False
        self._inside = False
        self._warned = False
        self._warned_bare = False
        self._warned_dense = False
        self._guard = guard
        self.norms_due = True
        self._norms = GradNorms() if measure_norms else None
        self._two_pass = TwoPass(True, guard.checks_gradients) if mode.expert_clip == "exact" else None
        self._expert_clip: Unclipped = self._two_pass or POLICIES[mode.expert_clip]()

    @property
    def experts(self) -> dict[str, Tensor]:
        """The expert tensors that are still alive, frozen ones included, by name."""
        return self._members.experts

    def is_expert(self, tensor: Tensor) -> bool:
        return self._members.is_expert(tensor)

    def remove(self) -> None:
        """Take the hooks off. May be called more than once."""
        for handle in [*self._handles, *(each for hooks in self._hooks.values() for each in hooks)]:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self.observers.clear()
        for tensor in [t for t, owner in _released.items() if owner() is self]:
            del _released[tensor]
        optimizer = self._optimizer()
        if optimizer is not None:
            self._guard.withdraw(optimizer)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the hooks on; `release_in_backward` does."""
        self._keep_up()
        # The hook's owner is the optimizer, so a method bound to this object makes no cycle through it.
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._on_step))

    # Tensors come and go.

    def _keep_up(self) -> None:
        """Between steps: put hooks on what trains by now, and behind those that others have put on since."""
        for tensor in self._members.new(self._parameters()):
            for book in (self._group_index, self._hooks):
                book.pop(id(tensor), None)  # of a tensor that is gone, if it had this id
            if self.mode.steps_in_backward(self.is_expert(tensor)):
                self._release(tensor)
            elif self._two_pass is not None:
                self._handles.append(tensor.register_post_accumulate_grad_hook(self._on_dense))
        for tensor in self._parameters():
            if id(tensor) in self._hooks and not self._acts_last(tensor) and is_released(tensor):
                self._put_hooks_on(tensor)

    def _release(self, tensor: Tensor) -> None:
        if is_released(tensor) and _released[tensor]() not in (None, self):
            raise ValueError(messages.released_already(self._name(tensor)))
        self._group_index[id(tensor)] = 0, 0  # looked up when it is needed
        _released[tensor] = weakref.ref(self)
        self._put_hooks_on(tensor)
        if self.ranks is not None:
            self.ranks.admit(self._name(tensor), tensor)

    def _put_hooks_on(self, tensor: Tensor) -> None:
        for handle in self._hooks.get(id(tensor), ()):
            handle.remove()
        self._hooks[id(tensor)] = [
            tensor.register_post_accumulate_grad_hook(partial(self._on_gradient, part)) for part in self._parts(tensor)
        ]

    def _acts_last(self, tensor: Tensor) -> bool:
        """Whether nobody's hook comes after ours, which takes the gradient away; torch lists hooks in private only."""
        mine, all_hooks = self._hooks[id(tensor)], getattr(tensor, "_post_accumulate_grad_hooks", None)
        return not mine or not all_hooks or next(reversed(all_hooks)) == mine[-1].id

    # A gradient is complete.

    def _on_gradient(self, part: int | None, tensor: Tensor) -> None:
        """The hook. `part` is the expert it updates, or None for the whole tensor. Must return None."""
        if tensor.grad is None or self._group_of(tensor) is None:
            return
        if self._accumulating and self.accumulation != "per_microbatch":
            self._hold(tensor)
            return
        if not part:
            if not self._acts_last(tensor):
                raise RuntimeError(messages.later_hook(self._name(tensor)))
            self._complete(tensor)
        if self.ranks is None:
            self._act(part, tensor)
        elif not part:  # of a tensor's slices the first hook updates all, once they are averaged
            self._act_on(self.ranks.take(tensor))

    def _on_dense(self, tensor: Tensor) -> None:
        """The hook of tensors that step after backward, in exact clipping. Must return None."""
        two = self._two_pass
        # What averages dense gradients over ranks wants them once a step, and to stay.
        may_free = self.ranks is None and self.leaf_of is None and not self._on_sums and not _has_other_hooks(tensor)
        if two is not None and two.measuring and two.frees_dense and may_free and tensor.grad is not None:
            two.measure(tensor)

    def _hold(self, tensor: Tensor) -> None:
        """Keep a gradient that is not its step's last: where it is, unless it is moved to the host."""

    def _complete(self, tensor: Tensor) -> None:
        """Make the last microbatch's gradient the step's: it is, unless earlier ones have gone to the host."""

    def _keep_average(self, tensor: Tensor) -> None:
        """What was averaged over ranks is measured, and needed again when the norm is known."""

    @property
    def _on_sums(self) -> bool:
        """Whether expert gradients of earlier microbatches wait in host memory."""
        return False

    @property
    def _measuring(self) -> bool:
        return self._two_pass is not None and self._two_pass.measuring

    def _act_on(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            for part in self._parts(tensor):
                self._act(part, tensor)

    def _parts(self, tensor: Tensor) -> Iterable[int | None]:
        return range(tensor.shape[0]) if self.mode.granularity == "expert" else (None,)

    def _act(self, part: int | None, tensor: Tensor) -> None:
        grad = tensor.grad
        if grad is None:
            return
        two = self._two_pass
        if two is not None and two.whole:
            return
        if not part:
            self._check(tensor, grad)
            self._show(tensor, grad)
            if two is not None and two.measuring:
                self._keep_average(tensor)
                two.measure(tensor)
                return
            self._fired.add(id(tensor))
        self._hooks_now += 1
        last = part is None or part == tensor.shape[0] - 1
        if not self._guard.skipping:
            self._update(part, tensor)
        if last:
            self._pending.pop(id(tensor), None)
            tensor.grad = None

    def _check(self, tensor: Tensor, grad: Tensor) -> None:
        if not self._inside:
            if self.accumulation == "per_microbatch":
                raise RuntimeError(
                    messages.bare_backward("accumulation='per_microbatch' needs to know where a backward begins")
                )
            if self._two_pass is not None:
                raise RuntimeError(messages.bare_backward("expert_clip='exact' runs backward twice"))
            self._warn_bare()
        two = self._two_pass
        if id(tensor) in self._fired or (two is not None and two.measuring and two.has_measured(tensor)):
            raise RuntimeError(messages.second_gradient(self._name(tensor)))
        if grad.requires_grad:
            raise RuntimeError(messages.create_graph(self._name(tensor)))
        if tensor.dtype == torch.float16:
            raise ValueError(messages.float16(self._name(tensor)))

    def _show(self, tensor: Tensor, grad: Tensor) -> None:
        for observer in self.observers:
            observer.on_gradient(tensor)
        # Of two passes the first one counts.
        if self._norms is not None and self.norms_due and (self._two_pass is None or self._two_pass.norm is None):
            self._norms.released(grad, self.is_expert(tensor))

    def _update(self, part: int | None, tensor: Tensor) -> None:
        optimizer = self._live_optimizer()
        pending = self._pending.setdefault(id(tensor), {})
        if not part:
            pending["attributes"] = self._attributes(tensor, optimizer)
        if pending["attributes"] is not None:
            self._step(part, tensor, pending)

    def _step(self, part: int | None, tensor: Tensor, pending: dict[str, Any]) -> None:
        optimizer = self._live_optimizer()
        group, attributes = self._group_of(tensor), pending["attributes"]
        if group is None:
            return
        if part is None:
            step_tensor(optimizer, group, tensor, **attributes)
        else:
            step_slice(optimizer, group, tensor, part, pending.setdefault("slices", {}), **attributes)
        # A fused update does not bump the version counter, and a second backward through a graph that saved the
        # old weight would then silently use the new one.
        torch.autograd.graph.increment_version(tensor)

    def _group_of(self, tensor: Tensor) -> Group | None:
        """The live group that holds the tensor; groups may have been added or moved. None if it was taken out."""
        groups = self._live_optimizer().param_groups
        index, position = self._group_index[id(tensor)]
        if index >= len(groups) or not _holds(groups[index], position, tensor):
            # All at once: to look for each alone takes the square of their number.
            places = {id(t): (i, j) for i, group in enumerate(groups) for j, t in enumerate(group["params"])}
            if id(tensor) not in places:
                return None
            self._group_index.update((key, places[key]) for key in self._group_index.keys() & places.keys())
            index, position = places[id(tensor)]
        return groups[index]

    def _attributes(self, tensor: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """What the copy that updates the tensor is told; None if the tensor is left out."""
        found = self._guard.attributes(tensor, optimizer, updated=self._hooks_now > 1)
        if found is not None and self.clip_value is not None:
            # Not before the guard has looked: clipping would make a number of an infinity.
            clip_value_([tensor], self.clip_value)
        limit = self._limit()
        if found is None or not limit:
            return found
        return {**found, **self._expert_clip.before_update(tensor, limit, owner_of(optimizer, tensor))}

    def _limit(self) -> float:
        """What expert gradients are clipped to inside backward; 0 for not at all."""
        if self.mode.expert_clip == "none":
            return 0.0
        if self.max_norm is None:
            raise RuntimeError(messages.no_max_norm(self.mode.expert_clip))
        return max(self.max_norm, 0.0)

    def _warn_bare(self) -> None:
        if self._warned_bare or self._guard.on_nonfinite == "ignore":
            return
        self._warned_bare = True
        warnings.warn(messages.BARE_BACKWARD, stacklevel=2)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer is about to step what has a gradient."""

    def _on_step(self, *_: Any) -> None:
        """The optimizer has stepped: the step is whole."""
        two = self._two_pass
        unclipped = two is not None and two.norm is not None and not two.clipped
        if (unclipped or self._expert_clip.waiting) and not self._warned_dense:
            self._warned_dense = True
            text = messages.DENSE_LEFT_UNCLIPPED if unclipped else messages.LAGGED_WITHOUT_CLIP
            warnings.warn(text, stacklevel=2)
        self._expert_clip.abandon()
        self._guard.end_step(self._live_optimizer())
        self._fired.clear()
        self._hooks_last, self._hooks_now = self._hooks_now, 0
        self._keep_up()  # for those who call loss.backward() themselves
        self._enter("done")

    # The optimizer and its tensors.

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
        return self._members.name(tensor)


def _holds(group: Group, position: int, tensor: Tensor) -> bool:
    return position < len(group["params"]) and group["params"][position] is tensor


def _has_other_hooks(tensor: Tensor) -> bool:
    """Whether somebody else looks at the complete gradient, who would find it gone."""
    return len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()) > 1
