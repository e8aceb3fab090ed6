"""A Lightning callback that says where the memory of a training step goes, and how long a step takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sonar.memory.report import CUDA_ALLOCATOR, MemoryReport, write_atomically
from lightning_sonar.memory.timing import StepTimes
from lightning_sonar.memory.watch import Watch

# A manual loop that steps its optimizers behind Lightning's back shows no end of a step. After this many
# batches each batch counts as one, so that a watched step cannot go on for ever.
_BATCHES_WITHOUT_STEP = 64


class MemoryProfiler(pl.Callback):
    """Measures a few training steps: peak memory by phase and by content, and step times of all the others.

    Works with any strategy, in automatic and manual optimization, with gradient accumulation (a step is then
    all its batches), with validation in between, and in several fits one after the other. With a Sonar-MoE
    strategy phases and gradients are reported by the step itself, to the event. With any other strategy they
    come from Lightning's hooks, and some bounds are approximate: in automatic optimization nothing is called
    between clipping and the update, so with ``gradient_clip_val`` both are counted as ``clip`` and without it
    both as ``step``; gradients get their label when backward has ended.

    Only ``steps`` steps are watched, so the rest of the training runs at its own speed; in the watched ones
    each operation takes some tens of microseconds longer. What code under ``torch.compile`` allocates counts
    in the peaks on CUDA (as ``untracked``) but is not seen elsewhere; the report says so. On CUDA the peaks
    are those of the caching allocator, whose counters are reset at each phase: another reader of
    ``torch.cuda.max_memory_allocated`` in the same process is disturbed in the watched steps.

    After the fit `report` holds the result. It stays None, with a warning, where no step was watched, and
    where the fit failed: there are no half reports.

    Args:
        warmup: optimizer steps to let pass first. A fit too short for ``warmup + steps`` shortens it.
        steps: optimizer steps to watch, one after another.
        dirpath: folder for ``memory.json`` and ``memory.png``, written by rank 0 when training ends; None
            writes nothing.
        figure: whether to draw ``memory.png``.

    Example::

        profiler = MemoryProfiler(dirpath="out")
        L.Trainer(callbacks=[profiler], max_steps=20).fit(model, data)
        print(profiler.report.peak_bytes, profiler.report.split)
    """

    def __init__(
        self,
        warmup: int = 3,
        steps: int = 2,
        dirpath: str | Path | None = None,
        figure: bool = True,
    ) -> None:
        super().__init__()
        for name, value, least in (("warmup", warmup, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"MemoryProfiler({name}={value!r}): expected a whole number of optimizer steps, at least {least}."
                )
        self.warmup = warmup
        self.steps = steps
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.figure = figure
        self.report: MemoryReport | None = None
        self._reset()

    @property
    def current_peak_bytes(self) -> int | None:
        """Highest peak of the steps watched so far in bytes, for a progress bar; None before the first."""
        return self._best.peak_bytes if self._best is not None else None

    def _reset(self) -> None:
        self._best: MemoryReport | None = None
        self._watch: Watch | None = None
        self._engine: Any = None
        self._experts: set[int] = set()
        self._times: StepTimes | None = None
        self._passed = 0  # optimizer steps that ended in this fit
        self._profiled = 0
        self._warmup = self.warmup
        self._batches = 0  # batches since the last step
        self._global_step = 0
        self._every_batch = False

    # -- Lightning's hooks -------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave()
        self._reset()
        self.report = None
        self._warmup = min(self.warmup, self._longest_warmup(trainer))
        self._global_step = trainer.global_step
        self._times = StepTimes(trainer.strategy.root_device)
        self._engine = getattr(trainer.strategy, "in_backward", None)
        if self._engine is not None:
            self._engine.observers.append(self)
            experts = self._engine.experts
            tensors = experts.values() if isinstance(experts, Mapping) else experts.tensors
        else:
            tensors = _expert_tensors_of(pl_module)
        self._experts = {id(tensor) for tensor in tensors}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        due = self._passed >= self._warmup and self._profiled < self.steps
        if self._watch is None and due and self._batches == 0:
            self._watch = Watch(trainer, pl_module, self._experts)
        if self._watch is not None:
            self._watch.begin(batch)
        elif self._times is not None:
            self._times.begin()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._watch is not None:
            self._watch.mark("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._watch is not None and self._engine is None:
            self._watch.label_gradients()
            self._watch.mark("clip")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # By hand, clipping is over by now; in automatic optimization it comes after this hook.
        clips = pl_module.automatic_optimization and trainer.gradient_clip_val
        if self._watch is not None and self._engine is None and not clips:
            self._watch.mark("step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is not None:
            self._watch.end()
        elif self._times is not None:
            self._times.end()
        self._batches += 1
        if not pl_module.automatic_optimization and self._batches >= _BATCHES_WITHOUT_STEP:
            self._every_batch = True
        if trainer.global_step != self._global_step or self._every_batch:
            self._global_step = trainer.global_step
            self._step_ended()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        notes: list[str] = []
        if self._watch is not None and self._watch.saw_backward and self._best is None:
            notes.append("Training ended before the optimizer stepped in the step that was watched.")
            self._step_ended()
        self._leave()
        best, times = self._best, self._times
        if best is None or times is None:
            rank_zero_warn(
                "MemoryProfiler watched no training step, so there is no memory report: found "
                f"{self._passed} optimizer step(s), expected at least one after the warm-up of "
                f"{self._warmup}. Train for more steps or pass a smaller warmup."
            )
            return
        if self._warmup < self.warmup:
            notes.append(
                f"Training was too short for {self.warmup} warm-up steps; {self._warmup} came before the "
                "first watched step."
            )
        if self._profiled < self.steps:
            notes.append(f"{self._profiled} step(s) were watched, {self.steps} were asked for.")
        if best.source != CUDA_ALLOCATOR and any(_is_compiled(module) for module in pl_module.modules()):
            notes.append(
                "Parts of the model are compiled, and what compiled code allocates is not seen on this "
                "device: the figures are too low. Measure without torch.compile."
            )
        values, warm = times.summary(self._warmup)
        if not warm:
            notes.append("No step was timed after the warm-up; step_time_ms is from warm-up steps, if any.")
        fields = vars(best) | {
            "step_time_ms": values,
            "profiled_steps": self._profiled,
            "warmup_steps": self._warmup,
            "notes": best.notes + notes,
        }
        self.report = MemoryReport(**fields)
        if self.dirpath is not None and trainer.is_global_zero:
            self._write(self.report, self.dirpath)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave()

    # -- called by the step (see `in_backward`) ----------------------------------------------------------

    def on_phase(self, phase: str) -> None:
        """The training step enters a phase: ``backward``, ``clip``, ``step`` or ``done``."""
        if self._watch is not None:
            if phase in ("clip", "step", "done"):
                self._watch.label_gradients()
            self._watch.mark(phase)

    def on_gradient(self, tensor: Tensor) -> None:
        """The gradient of ``tensor`` is complete and about to be used and freed inside backward."""
        if self._watch is not None:
            self._watch.label_gradient(tensor)

    # -- inside ------------------------------------------------------------------------------------------

    def _longest_warmup(self, trainer: pl.Trainer) -> int:
        """How many steps may pass so that ``steps`` are left to watch."""
        batches = trainer.num_training_batches / max(1, trainer.accumulate_grad_batches)
        epochs = trainer.max_epochs
        total = math.inf
        if epochs is not None and epochs != -1 and batches != math.inf:
            total = epochs * math.ceil(batches)
        if trainer.max_steps != -1:
            # By hand each optimizer's step counts, so several optimizers reach max_steps in fewer batches.
            total = min(total, trainer.max_steps // max(1, len(trainer.optimizers)))
        left = total - trainer.global_step
        if left == math.inf:
            return self.warmup
        return max(1 if left > 1 else 0, int(left) - self.steps)

    def _step_ended(self) -> None:
        if self._watch is not None:
            hooks = int(getattr(self._engine, "hooks_fired", 0))
            report = self._watch.report(hooks, self._passed)
            self._watch.close()
            self._watch = None
            self._profiled += 1
            if self._best is None or report.peak_bytes > self._best.peak_bytes:
                self._best = report
        elif self._times is not None:
            self._times.step_ended(self._passed)
        self._passed += 1
        self._batches = 0

    def _leave(self) -> None:
        """Take everything off again, however the fit ended."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._engine is not None:
            if self in self._engine.observers:
                self._engine.observers.remove(self)
            self._engine = None

    def _write(self, report: MemoryReport, folder: Path) -> None:
        from lightning_sonar.memory.figure import draw_memory

        report.save(folder / "memory.json")
        if self.figure:
            write_atomically(folder / "memory.png", lambda path: draw_memory(report, path))


def _expert_tensors_of(module: pl.LightningModule) -> list[Tensor]:
    from lightning_sonar.experts import find_expert_tensors

    try:
        return list(find_expert_tensors(module).tensors)
    except ValueError:
        # A model without experts is nothing wrong here: all its gradients are dense.
        return []


def _is_compiled(module: torch.nn.Module) -> bool:
    # module.compile() leaves the first attribute, torch.compile(module) the second.
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
