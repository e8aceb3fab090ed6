"""The training step in which some tensors are updated inside backward.

One ordinary optimizer holds all parameters. A post-accumulate-grad hook on each released tensor lets that
optimizer step just this tensor, the moment its gradient is complete, and drops the gradient. When backward ends,
only the other tensors still have gradients, so the ordinary clip and the ordinary ``optimizer.step()`` touch only
them. This file knows torch and nothing above it: strategies, the mixin and a plain loop all drive this one piece.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sonar import messages
from lightning_sonar.clipping import ClipAlgorithm, check_clip, clip_norm_, clip_value_, with_gradients
from lightning_sonar.hooks import is_released
from lightning_sonar.host_hooks import HostHooks
from lightning_sonar.modes import mode_name
from lightning_sonar.optim.offload import HostStates
from lightning_sonar.protocols import Accumulation, Observer, Ranks
from lightning_sonar.two_pass import TwoPass

__all__ = ["Accumulation", "InBackward", "Observer", "Ranks", "is_released"]


class InBackward(HostHooks):
    """Hooks on the tensors that step inside backward, and the step around them. Made by `release_in_backward`.

    Attributes:
        mode: which tensors step in backward and which are clipped.
        observers: called as the step goes on; see `Observer`.
        clip_value: if set, each released gradient is clipped element-wise to it before its update, as
            ``clip_grad_value_`` clips the others afterwards.
        max_norm: the largest norm, for modes with an ``expert_clip``; 0 clips nothing. To be said before backward,
            which `train_step` does.
        leaf_of: if set, says what stands for a released tensor in the graph where that is not the tensor itself: what
            the second backward of exact clipping is run for. Dense gradients are then kept from the first one, since
            nothing is known to stand for theirs.
        ranks: if set, averages each released gradient over ranks before anything is done with it.
        norms_due: whether the norms of this step's gradients are measured, if it was asked for at all.
    """

    # What one can ask.

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
        """How many steps were left out because the loss was not finite. Reads the device."""
        return self._guard.skipped_steps

    @property
    def skipped_tensors(self) -> int:
        """How many updates of one tensor were left out for gradients that are not finite. Reads the device.

        Tensors that are left out together, see ``check`` of `release_in_backward`, all count.
        """
        return self._guard.skipped_tensors

    @property
    def host_states(self) -> HostStates | None:
        """What keeps optimizer states in host memory, with ``expert_state_device="cpu"``."""
        return self._states

    @property
    def host_sums(self) -> list[Tensor]:
        """The buffers in host memory of ``accumulation="host"`` that there are so far."""
        return [] if self._sums is None else self._sums.buffers

    def grad_norms(self) -> dict[str, Tensor]:
        """Norms of the last step's gradients before clipping: ``experts``, ``dense``, ``total``, float32 and 0-dim.

        Gathered in the hooks, without a device sync. Of the last step for which `norms_due` was set. Empty unless made
        with ``measure_norms=True``.
        """
        return {} if self._norms is None else dict(self._norms.last)

    def state_dict(self) -> dict[str, float]:
        """What the next step needs of this one besides parameters and optimizer: plain numbers, often none."""
        return self._expert_clip.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take what `state_dict` returned, in whatever mode."""
        self._expert_clip.load_state_dict(dict(state))

    # The step.

    def backward(self, loss: Tensor, run: Callable[..., Any] | None = None, *, last: bool = True) -> None:
        """Run backward; released tensors are updated in it.

        Args:
            loss: 0-dim; looked at for NaN and infinity before anything is updated.
            run: what runs backward, by default ``loss.backward``. Exact clipping runs it twice, and passes
                ``retain_graph=True`` in the first pass and ``inputs=[...]`` in the second one.
            last: whether this is the last microbatch before the step. With ``"exact"`` and ``"host"`` accumulation
                tensors are updated in the last one only, by the sum.

        Raises:
            FloatingPointError: if the loss (or a checked gradient) is not finite and ``on_nonfinite="raise"``.
            RuntimeError: if a released tensor gets its gradient twice; see `release_in_backward`.
        """
        self._keep_up()
        self._enter("backward")
        if self._sums is not None:
            self._sums.drop_if_zeroed()
        self._guard.look_at(loss, self._live_optimizer(), updated=self._hooks_now > 0)
        if self.accumulation == "per_microbatch":
            self._fired.clear()
        if not last:
            with self.accumulate():
                self._run(run or loss.backward)
            return
        limit = self._limit()
        if self._two_pass is None or self._accumulating or self._guard.skipping or not limit:
            self._run(run or loss.backward)
        elif self._on_sums:
            self._run_on_sums(self._two_pass, run or loss.backward)
        else:
            self._run_twice(self._two_pass, run or loss.backward)
        self._act_on_left()
        if not self._accumulating and self._leaves_out():
            self._drop_gradients()

    def clip_(self, max_norm: float, algorithm: ClipAlgorithm = "norm") -> Tensor | None:
        """Clip what backward has left, in the mode's scope.

        Args:
            max_norm: the largest norm (or, for ``"value"``, the largest element); 0 or less clips nothing.
            algorithm: ``"norm"``: the global norm over the mode's ``clip`` scope; with exact clipping, the norm that
                the first backward pass measured. ``"value"``: element-wise, over all gradients there are; the
                released ones were clipped to `clip_value` in their hooks.

        Returns:
            The norm before clipping, 0-dim, in the gradients' dtype; ``None`` if no norm was taken.
        """
        self._enter("clip")
        if self._norms is not None and self.norms_due:
            self._norms.gather((t, self.is_expert(t)) for t in self._parameters())
        norm = None
        check_clip(self.mode, max_norm, algorithm)
        self._refuse_late(max_norm, algorithm)
        if max_norm > 0:
            tensors = with_gradients(self._parameters())
            self._expert_clip.after_backward(tensors, self._guard.incomplete)
            if algorithm == "value":
                clip_value_(tensors, max_norm)
            elif self._two_pass is not None and self._two_pass.norm is not None:
                norm = self._two_pass.clip_rest_(tensors, max_norm)
            else:
                norm = clip_norm_([t for t in tensors if self.mode.clips(self.is_expert(t))], max_norm)
        self._enter("step")
        # Gradients that no hook has used: under exact accumulation, and of tensors that the last backward left out.
        self._step_streamed()
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
        check_clip(self.mode, max_norm, algorithm)
        self.clip_value = max_norm if algorithm == "value" and max_norm > 0 else None
        self.max_norm = max_norm if algorithm == "norm" else 0.0
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

        With ``accumulation="host"`` they move them to the host; with ``"per_microbatch"`` they act in each backward.
        """
        self._warn_exact()
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def agree_by(self, agree: Callable[[Tensor], Tensor]) -> None:
        """Let all ranks skip the same steps: ``agree`` takes this rank's flag and returns the largest of all ranks'."""
        self._guard.agree = agree

    def finish_backward(self) -> None:
        """With `ranks`, as the last thing inside backward: update what had to wait for other ranks."""
        if self.ranks is not None and not (self._accumulating and self.accumulation != "per_microbatch"):
            self._bring_left()
            self._act_on(self.ranks.finish())

    def abandon_step(self) -> None:
        """Forget a step that an exception broke off, so that the next one can begin.

        What was updated in it stays updated; gradients are dropped.
        """
        self._guard.withdraw(self._live_optimizer())
        self._drop_gradients()
        if self.ranks is not None:
            self.ranks.forget()
        self._expert_clip.abandon()
        if self._states is not None:
            self._states.abandon()
        self._pending.clear()
        self._fired.clear()
        self._hooks_now = 0

    # Inside.

    def _leaves_out(self) -> bool:
        return self._guard.leaves_out(self._parameters(), self._live_optimizer(), updated=self._hooks_now > 0)

    def _drop_gradients(self) -> None:
        for tensor in self._parameters():
            tensor.grad = None
        if self._sums is not None:
            self._sums.clear()

    def _refuse_late(self, asked: float, algorithm: ClipAlgorithm) -> None:
        inside = algorithm == "value" or self.mode.expert_clip != "none"
        used = self.clip_value if algorithm == "value" else self.max_norm
        if self._fired and inside and asked != (used or 0.0):
            raise RuntimeError(messages.late_clip(algorithm, asked, used, len(self._fired)))

    def _act_on_left(self) -> None:
        """Act on released tensors that earlier microbatches have reached and the last one has not."""
        if self._accumulating or self.ranks is not None:
            return
        self._inside = True
        try:
            self._act_on([t for t in self._parameters() if id(t) in self._group_index and t.grad is not None])
        finally:
            self._inside = False

    def _run_twice(self, two: TwoPass, run: Callable[..., Any]) -> None:
        tensors = list(self._parameters())
        if self._fired:
            raise RuntimeError(messages.after_updates(len(self._fired)))
        if not two.begin(tensors, self._group_index):
            self._run(run)
            return
        with two.first_pass(), _explained(messages.why_not_twice):
            self._run(partial(run, retain_graph=True))
        two.end_first_pass(tensors)
        if two.bad and self._guard.judge(two.bad, self._live_optimizer()):
            return
        again = two.to_form_again(tensors)
        leaves = again if self.leaf_of is None else [self.leaf_of(tensor) for tensor in again]
        if not leaves:
            return
        with _explained(messages.why_not_twice):
            self._run(partial(run, inputs=leaves))
        wanted = [tensor for tensor in again if id(tensor) in self._group_index]
        missing = [self._name(tensor) for tensor in wanted if id(tensor) not in self._fired]
        if missing:
            raise RuntimeError(messages.missing_in_second_pass(missing, len(wanted) - len(missing)))

    def _run_on_sums(self, two: TwoPass, run: Callable[..., Any]) -> None:
        """Measure the sums in the last microbatch's only backward; they are in host memory, and come back from there.

        Dense gradients stay: those of earlier microbatches are in them.
        """
        tensors = list(self._parameters())
        if not two.begin(tensors, self._group_index):
            self._run(run)
            return
        with two.first_pass():
            self._run(run)
        two.end_first_pass(tensors)
        if two.bad and self._guard.judge(two.bad, self._live_optimizer()):
            return
        self._inside = True
        try:
            self._bring_left(averaged=True)
        finally:
            self._inside = False

    def _run(self, run: Callable[[], Any]) -> None:
        self._inside = True
        try:
            with _explained(lambda error: messages.why_changed(error) if self._hooks_now else None):
                run()
            self._bring_left()
            if self._accumulating and self._sums is not None:
                self._sums.note(t for t in self._parameters() if id(t) not in self._group_index)
        finally:
            self._inside = False

    def _warn_exact(self) -> None:
        if self._warned or self.accumulation != "exact" or self.mode.in_backward == "none":
            return
        self._warned = True
        warnings.warn(
            messages.saving_lost(mode_name(self.mode), self._two_pass is not None),
            stacklevel=3,
        )


@contextmanager
def _explained(explain: Callable[[str], str | None]) -> Iterator[None]:
    """Errors of torch's that ``explain`` knows say what they come from here."""
    try:
        yield
    except RuntimeError as error:
        why = explain(str(error))
        if why is None:
            raise
        raise RuntimeError(why) from error
