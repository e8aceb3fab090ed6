"""A Lightning callback that says where the memory of a training step goes, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sonar.memory.diagnosis import resident_memory
from lightning_sonar.memory.explain import explain
from lightning_sonar.memory.fit import expert_ids, longest_warmup
from lightning_sonar.memory.out_of_memory import OutOfMemory, is_out_of_memory
from lightning_sonar.memory.ranks import of_all_ranks
from lightning_sonar.memory.report import CUDA_ALLOCATOR, MemoryReport, prediction_gap, write_atomically
from lightning_sonar.memory.snapshot import AllocatorHistory, possible
from lightning_sonar.memory.timing import StepTimes
from lightning_sonar.memory.watch import Watch
from lightning_sonar.unsuitable import is_compiled

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
    each operation takes some tens of microseconds longer. On the tiny OLMoE on a CPU, with steps of 0.6 s, the
    callback took 0.1 ms of each unwatched step (0.02%), and watched steps took about 1.2 times as long. What code
    under ``torch.compile`` allocates counts in the peaks on CUDA (as ``untracked``) but is not seen elsewhere; the
    report says so. On CUDA the peaks are those of the caching allocator, whose counters are reset at each phase:
    another reader of ``torch.cuda.max_memory_allocated`` in the same process is disturbed in the watched steps.

    After the fit `report` holds the result, with the peaks of all ranks beside those of its own. It stays None,
    with a warning, where no step was watched, and where the fit failed: there are no half reports.

    A fit that runs out of memory ends with the exception it ends with anyway. A note on it, which is logged as
    well, says in which phase it was, what the memory was made of, and which change would have fitted.

    Args:
        warmup: optimizer steps to let pass first. A fit too short for ``warmup + steps`` shortens it.
        steps: optimizer steps to watch, one after another.
        dirpath: folder for ``memory.json`` and ``memory.png``, written by rank 0 when training ends; None
            writes nothing. With it, a fit that runs out of memory leaves ``out_of_memory.json`` and on CUDA
            ``out_of_memory_snapshot.pickle``, ranks other than 0 with their number in the name.
        figure: whether to draw ``memory.png``.
        snapshot: record the CUDA allocator's history over the watched steps, the newest 100,000 events, and write
            ``memory_snapshot.pickle`` on rank 0, which pytorch.org/memory_viz opens. On other devices a note in
            the report says that there is none.
        advise: called with the `OutOfMemory` of a failed fit; its lines stand in the message before what simple
            arithmetic says.

    Attributes:
        report: the result of the last fit, or None.
        out_of_memory: what is known of a fit that ran out of memory, or None.
        predicted_peak_bytes: may be set before a fit; the report then has the gap between it and the measured
            peak, and a gap above 5% is a warning.

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
        snapshot: bool = False,
        advise: Callable[[OutOfMemory], list[str]] | None = None,
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
        self.snapshot = snapshot
        self.advise = advise
        self.predicted_peak_bytes: int | None = None
        self.report: MemoryReport | None = None
        self.out_of_memory: OutOfMemory | None = None
        self._history = AllocatorHistory()
        self._phase = ""
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
        self._resident_bytes = 0  # when the step began

    # -- Lightning's hooks -------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        predicted = self.predicted_peak_bytes
        if predicted is not None and not predicted > 0:
            raise ValueError(
                f"MemoryProfiler.predicted_peak_bytes = {predicted!r}: expected bytes, more than 0, or None."
            )
        self._phase = "setup"
        self.out_of_memory = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave()
        self._reset()
        self.report = None
        self._warmup = min(self.warmup, longest_warmup(trainer, self.warmup, self.steps))
        self._global_step = trainer.global_step
        self._times = StepTimes(trainer.strategy.root_device)
        self._engine = getattr(trainer.strategy, "in_backward", None)
        if self._engine is not None:
            self._engine.observers.append(self)
        self._experts = expert_ids(self._engine, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batches == 0:
            self._resident_bytes = resident_memory(trainer.strategy.root_device)
        due = self._passed >= self._warmup and self._profiled < self.steps
        if self._watch is None and due and self._batches == 0:
            self._watch = Watch(trainer, pl_module, self._experts)
            if self.snapshot and self.dirpath and trainer.is_global_zero and possible(trainer.strategy.root_device):
                self._history.start()
        self._phase = "forward"
        if self._watch is not None:
            self._watch.begin(batch)
        elif self._times is not None:
            self._times.begin()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._phase = "backward"
        if self._watch is not None:
            self._watch.mark("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._engine is None:
            self._phase = "clip"
            if self._watch is not None:
                self._watch.label_gradients()
                self._watch.mark("clip")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # By hand, clipping is over by now; in automatic optimization it comes after this hook.
        clips = pl_module.automatic_optimization and trainer.gradient_clip_val
        if self._engine is None and not clips:
            self._phase = "step"
            if self._watch is not None:
                self._watch.mark("step")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._phase = "done"
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

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._phase = "validation"

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._phase = "done"

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._phase = "after training"
        notes: list[str] = []
        if self._watch is not None and self._watch.saw_backward and self._best is None:
            notes.append("Training ended before the optimizer stepped in the step that was watched.")
            self._step_ended()
        self._write_snapshot()
        self._leave()
        best, times = self._best, self._times
        peaks = None if best is None else (best.peak_bytes, best.peak_expert_gradient_bytes)
        ranks = of_all_ranks(peaks, trainer.world_size)
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
        if best.source != CUDA_ALLOCATOR and any(is_compiled(module) for module in pl_module.modules()):
            notes.append(
                "Parts of the model are compiled, and what compiled code allocates is not seen on this "
                "device: the figures are too low. Measure without torch.compile."
            )
        values, warm = times.summary(self._warmup)
        if not warm:
            notes.append("No step was timed after the warm-up; step_time_ms is from warm-up steps, if any.")
        notes += self._snapshot_notes(trainer)
        gap = prediction_gap(best.peak_bytes, self.predicted_peak_bytes, notes)
        fields = vars(best) | {
            "step_time_ms": values,
            "profiled_steps": self._profiled,
            "warmup_steps": self._warmup,
            "notes": best.notes + notes,
            "peak_bytes_per_rank": ranks and [rank and rank[0] for rank in ranks],
            "peak_expert_gradient_bytes_per_rank": ranks and [rank and rank[1] for rank in ranks],
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "prediction_gap": gap,
        }
        self.report = MemoryReport(**fields)
        if self.dirpath is not None and trainer.is_global_zero:
            self._write(self.report, self.dirpath)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        try:
            if is_out_of_memory(exception):
                self._explain(trainer, pl_module, exception)
        except Exception as trouble:
            # The exception under way is what the user must see, whatever goes wrong here.
            exception.add_note(
                f"MemoryProfiler could not say all about the memory: {type(trouble).__name__}: {trouble}"
            )
        finally:
            self._leave()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave()

    # -- called by the step (see `in_backward`) ----------------------------------------------------------

    def on_phase(self, phase: str) -> None:
        """The training step enters a phase: ``backward``, ``clip``, ``step`` or ``done``."""
        self._phase = phase
        if self._watch is not None:
            if phase in ("clip", "step", "done"):
                self._watch.label_gradients()
            self._watch.mark(phase)

    def on_gradient(self, tensor: Tensor) -> None:
        """The gradient of ``tensor`` is complete and about to be used and freed inside backward."""
        if self._watch is not None:
            self._watch.label_gradient(tensor)

    # -- inside ------------------------------------------------------------------------------------------

    def _step_ended(self) -> None:
        if self._watch is not None:
            hooks = int(getattr(self._engine, "hooks_fired", 0))
            report = self._watch.report(hooks, self._passed)
            self._watch.close()
            self._watch = None
            self._profiled += 1
            if self._profiled >= self.steps:
                self._write_snapshot()
            if self._best is None or report.peak_bytes > self._best.peak_bytes:
                self._best = report
        elif self._times is not None:
            self._times.step_ended(self._passed)
        self._passed += 1
        self._batches = 0

    def _leave(self) -> None:
        """Take everything off again, however the fit ended."""
        self._history.stop()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._engine is not None:
            if self in self._engine.observers:
                self._engine.observers.remove(self)
            self._engine = None

    def _write_snapshot(self) -> None:
        if self._history.open and self.dirpath is not None:
            self._history.write(self.dirpath / "memory_snapshot.pickle")

    def _snapshot_notes(self, trainer: pl.Trainer) -> list[str]:
        if not self.snapshot:
            return []
        if not possible(trainer.strategy.root_device):
            return ["No CUDA device: no snapshot of the allocator's history."]
        return [] if self.dirpath else ["snapshot=True wrote nothing, because MemoryProfiler has no dirpath."]

    def _explain(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        watch = self._watch
        if watch is not None:
            watch.label_gradients()
            watch.close()
        self.out_of_memory = explain(
            exception,
            trainer,
            pl_module,
            dirpath=self.dirpath,
            advise=self.advise,
            phase=self._phase,
            step=self._passed,
            ledger=None if watch is None else watch.tracker.ledger,
            resident_bytes=self._resident_bytes,
        )

    def _write(self, report: MemoryReport, folder: Path) -> None:
        from lightning_sonar.memory.figure import draw_memory

        report.save(folder / "memory.json")
        if self.figure:
            write_atomically(folder / "memory.png", lambda path: draw_memory(report, path))
