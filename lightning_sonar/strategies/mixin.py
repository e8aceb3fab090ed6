"""What every SonarMoE strategy does, whatever it runs on."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from lightning_sonar.clipping import ClipAlgorithm, check_clip
from lightning_sonar.expert_clip import check_accumulation
from lightning_sonar.experts import ExpertTensors, NoExpertsError, find_expert_tensors
from lightning_sonar.in_backward import Accumulation, InBackward
from lightning_sonar.modes import ExpertClip, Mode, resolve_mode
from lightning_sonar.nonfinite import Check, OnNonfinite, check_nonfinite
from lightning_sonar.optim.offload import check_state_device
from lightning_sonar.optim.states import make_states
from lightning_sonar.release import release_in_backward
from lightning_sonar.strategies.checkpoints import AtomicCheckpointIO, refuse_broken_off, refuse_in_mid_step
from lightning_sonar.strategies.requeue import RequeueBetweenSteps, requeue_between_steps
from lightning_sonar.unsuitable import refuse_lost_router_loss

STATE_KEY = "lightning_sonar"
"""Where a checkpoint holds `InBackward.state_dict`, if that is not empty."""

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy as _Base
else:
    _Base = object


class SonarMoEStrategyMixin(_Base):
    """In-backward updates for a Lightning strategy, in automatic and in manual optimization.

    The hooks go on in ``setup_optimizers`` and come off in ``teardown``. Between them the Trainer's own clip is
    replaced by one that knows the mode's scope, because ``standard_no_expert_clip`` clips only some of the gradients
    that are there, and because Lightning refuses to clip for fused optimizers under bf16-mixed.

    Args:
        mode: a name from `MODES`, or a `Mode`.
        experts: ``"auto"``, or regular expressions over parameter names; see `find_expert_tensors`.
        expert_clip: how expert gradients are clipped inside backward, in the place of the mode's own; see `Mode`.
            ``SonarMoEStrategy(expert_clip="exact")`` is mode ``sonar_exact_clip``.
        accumulation: see `release_in_backward`.
        on_nonfinite: see `release_in_backward`.
        check: see `release_in_backward`.
        log_grad_norm: log the true norms of expert and dense gradients before clipping, as ``grad_norm/experts``,
            ``grad_norm/dense`` and ``grad_norm/total``: in every step, or with a number in every so-many-th. Reads
            each gradient once more in these steps.
        expert_state_device: see `release_in_backward`. Checkpoints are ordinary. After a fit the optimizer's states of
            expert tensors are in ordinary host memory.

    Attributes:
        in_backward: the handle of the fit under way, or None.
        last_norm: the norm that the last clip measured, 0-dim, or None.
        grad_norms: with ``log_grad_norm``, the norms last measured; see `InBackward.grad_norms`.
        skipped_steps: after a fit, how many of its steps updated nothing because their loss was not finite.
        skipped_tensors: after a fit, how many updates of one tensor ``check="gradient"`` left out.
        microbatches: the Trainer's ``accumulate_grad_batches``, which `SonarMoEMixin.sonar_step` applies.
    """

    def __init__(
        self,
        *args: Any,
        mode: str | Mode = "sonar",
        experts: str | Sequence[str] = "auto",
        expert_clip: ExpertClip | None = None,
        accumulation: Accumulation = "exact",
        on_nonfinite: OnNonfinite = "skip",
        check: Check = "loss",
        log_grad_norm: bool | int = False,
        expert_state_device: Literal["cpu"] | None = None,
        **kwargs: Any,
    ) -> None:
        # Lightning's own writer builds the file in memory first.
        kwargs["checkpoint_io"] = kwargs.get("checkpoint_io") or AtomicCheckpointIO()
        super().__init__(*args, **kwargs)
        self.mode = resolve_mode(mode, expert_clip)
        check_accumulation(self.mode, accumulation)
        check_state_device(self.mode, expert_state_device)
        check_nonfinite(on_nonfinite, check)
        self.expert_state_device: Literal["cpu"] | None = expert_state_device
        self.experts = experts
        self.accumulation: Accumulation = accumulation
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.check: Check = check
        self.log_grad_norm = log_grad_norm
        self.in_backward: InBackward | None = None
        self.last_norm: Tensor | None = None
        self.grad_norms: dict[str, Tensor] = {}
        self.skipped_steps = 0
        self.skipped_tensors = 0
        self._trainer: Trainer | None = None
        self._taken_clip: float | None = None
        self.microbatches = 1
        self._clipped = False
        self._resumed: dict[str, float] = {}
        self._requeue: RequeueBetweenSteps | None = None

    # Lightning calls these, in this order.

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        trainer = model.trainer
        if model.automatic_optimization or not trainer.training:
            return
        # Lightning refuses these with manual optimization, because nobody would apply them. We do, and the mixin.
        self._trainer = trainer
        if trainer.gradient_clip_val:
            self._taken_clip = float(trainer.gradient_clip_val)
            trainer.gradient_clip_val = None
        if hasattr(model, "sonar_step"):
            self.microbatches = trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = 1

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self._refuse(trainer)
        model = self.lightning_module
        assert model is not None
        handle = release_in_backward(
            self.optimizers[0],
            self._find_experts(model),
            mode=self.mode,
            accumulation=self.accumulation,
            on_nonfinite=self.on_nonfinite,
            check=self.check,
            measure_norms=self.log_grad_norm > 0,
            names={id(parameter): name for name, parameter in model.named_parameters()},
            expert_state_device=self.expert_state_device,
        )
        self._tell_clip(handle, trainer)
        if trainer.ckpt_path is not None:
            handle.load_state_dict(self._resumed)
        self._resumed = {}
        self.in_backward = handle
        self._requeue = requeue_between_steps(trainer)
        self.last_norm, self.grad_norms, self.skipped_steps, self.skipped_tensors = None, {}, 0, 0
        # State from the start: memory does not grow after the first step, and resuming needs no more than training.
        make_states(self.optimizers[0])
        if handle.host_states is not None:
            handle.host_states.set_aside()  # Lightning moves to the device what it finds when this is done
        self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
        self.precision_plugin.backward = self._run_backward  # type: ignore[method-assign]

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.in_backward is not None and self.in_backward.host_states is not None:
            self.in_backward.host_states.take_again()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = None if self.in_backward is None else self.in_backward.host_states
        if states is None or isinstance(self, ModelParallelStrategy):  # that one has loaded them with the model
            super().load_optimizer_state_dict(checkpoint)
            return
        # Lightning's own would move all states to the device.
        self.optimizers[0].load_state_dict(checkpoint["optimizer_states"][0])
        states.move_others(self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        self._clipped = False
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        handle = self.in_backward
        module = self.lightning_module
        if handle is not None and module is not None and not module.automatic_optimization:
            # After the closure, which may hold the backward, as in automatic optimization.
            closure = partial(self._clip_after, closure, optimizer)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if handle is not None:
            # Lightning would keep the gradients until after the next forward: memory at the worst moment.
            optimizer.zero_grad(set_to_none=True)
            if self.log_grad_norm and handle.norms_due and module is not None:
                self.grad_norms = handle.grad_norms()
                module.log_dict({f"grad_norm/{part}": norm for part, norm in self.grad_norms.items()})
        return output

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if refuse_in_mid_step(self.in_backward, filepath):
            warnings.warn(
                f"{filepath} was not written: training stopped between backward and the optimizer's step, where expert "
                "tensors are one step ahead of dense parameters. Resume from the checkpoint before it.",
                stacklevel=2,
            )
            return
        module = self.lightning_module
        if module is not None and refuse_broken_off(module.trainer, filepath):
            warnings.warn(
                f"{filepath} was not written: training stopped in the middle of a step, whose data a resumed run would "
                "leave out. Resume from the checkpoint before it.",
                stacklevel=2,
            )
            return
        state = {} if self.in_backward is None else self.in_backward.state_dict()
        if state:
            checkpoint = {**checkpoint, STATE_KEY: state}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._resumed = dict(checkpoint.get(STATE_KEY, {}))
        return checkpoint

    def teardown(self) -> None:
        handle, self.in_backward = self.in_backward, None
        if handle is not None:
            self.skipped_steps, self.skipped_tensors = handle.skipped_steps, handle.skipped_tensors
            if self.skipped_steps or self.skipped_tensors:
                warnings.warn(
                    f"{self.skipped_steps} training steps updated nothing because their loss was not finite, and "
                    f"{self.skipped_tensors} updates of single tensors were left out.",
                    stacklevel=2,
                )
            handle.remove()
            for name in ("clip_gradients", "backward"):
                vars(self.precision_plugin).pop(name, None)
        if self._requeue is not None:
            self._requeue.remove()
            self._requeue = None
        if self._trainer is not None:
            if self._taken_clip is not None:
                self._trainer.gradient_clip_val = self._taken_clip
            if self.microbatches != 1:
                self._trainer.accumulate_grad_batches = self.microbatches
            self._trainer, self._taken_clip, self.microbatches = None, None, 1
        super().teardown()

    # Inside.

    def _find_experts(self, model: LightningModule) -> ExpertTensors:
        try:
            return find_expert_tensors(model, self.experts)
        except NoExpertsError as error:
            if error.frozen and any(isinstance(each, BaseFinetuning) for each in _callbacks(model)):
                return error.found  # it will unfreeze them
            # Where all is clipped, or no expert trains, it makes no difference which tensors the experts are.
            if self.mode.in_backward != "none" or not (error.frozen or self.mode.clip in ("all", "none")):
                raise
            return error.found

    def _run_backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the place of the precision plugin's method of this name: in it, hooks before and after run once.

        Exact clipping runs backward twice, and neither callbacks nor DDP are to see more than one.
        """
        handle, plugin = self.in_backward, self.precision_plugin
        assert handle is not None

        def run(**more: Any) -> None:
            type(plugin).backward(plugin, tensor, model, optimizer, *args, **{**kwargs, **more})

        trainer = model.trainer
        handle.norms_due = (trainer.global_step + 1) % max(int(self.log_grad_norm), 1) == 0
        if model.automatic_optimization:  # a callback may change the value between steps
            self._tell_clip(handle, trainer)
        last = not (model.automatic_optimization and trainer.fit_loop._should_accumulate())
        handle.backward(tensor, run, last=last)

    def _clip_after(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
        output = closure()
        if not self._clipped:
            self._clip_gradients(optimizer)
        return output

    def _clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        """Takes the place of the precision plugin's method of this name."""
        handle = self.in_backward
        assert handle is not None
        self._clipped = True
        if self._taken_clip is not None and not clip_val:
            clip_val = self._taken_clip
            gradient_clip_algorithm = self._algorithm(self._trainer)
        algorithm: ClipAlgorithm = "value" if "value" in str(gradient_clip_algorithm).lower() else "norm"
        self.last_norm = handle.clip_(float(clip_val or 0.0), algorithm)

    def _tell_clip(self, handle: InBackward, trainer: Trainer) -> None:
        by_value = self._algorithm(trainer) == "value"
        value = self._clip_val(trainer)
        handle.clip_value = value if by_value else None
        handle.max_norm = 0.0 if by_value else float(value or 0.0)

    def _clip_val(self, trainer: Trainer) -> float | None:
        return self._taken_clip if self._taken_clip is not None else trainer.gradient_clip_val

    def _algorithm(self, trainer: Trainer | None) -> str:
        algorithm = None if trainer is None else trainer.gradient_clip_algorithm
        return "norm" if algorithm is None else str(getattr(algorithm, "value", algorithm))

    def _refuse(self, trainer: Trainer) -> None:
        """What cannot work is refused before anything is trained."""
        if len(self.optimizers) != 1:
            raise ValueError(
                f"{type(self).__name__} drives one optimizer over all parameters; configure_optimizers returned "
                f"{len(self.optimizers)}. Put their parameters into groups of one optimizer."
            )
        precision = str(getattr(self.precision_plugin, "precision", "32"))
        if precision.startswith("16") or getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"precision={precision!r}: float16 gradients need loss scaling, and a step inside backward cannot be "
                "undone when the scale proves too large. Use precision='bf16-true', 'bf16-mixed' or 32."
            )
        check_clip(self.mode, self._clip_val(trainer), self._algorithm(trainer))
        if self.lightning_module is not None:
            refuse_lost_router_loss(self.lightning_module)
        if self.mode.expert_clip != "none" and not self._clip_val(trainer):
            warnings.warn(
                f"expert_clip={self.mode.expert_clip!r} has nothing to clip to: set Trainer(gradient_clip_val=...). "
                "Nothing is clipped.",
                stacklevel=2,
            )
        if self.mode.expert_clip == "exact" and self.lightning_module is not None:
            taken = inspect.signature(self.lightning_module.backward).parameters
            any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
            if not any_name and not {"retain_graph", "inputs"} <= taken.keys():
                raise ValueError(
                    f"{type(self.lightning_module).__name__}.backward takes {', '.join(taken)}; expert_clip='exact' "
                    "runs it twice and passes retain_graph=True, then inputs=[...]. Define it as `def backward(self, "
                    "loss, *args, **kwargs)` and hand them on to loss.backward, or choose another expert_clip."
                )


def _callbacks(model: LightningModule) -> list[Any]:
    return getattr(model.trainer, "callbacks", [])
