"""A progress bar that counts steps and shows the peak memory."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar


class StepProgressBar(RichProgressBar):
    """Rich's bar over the Trainer's ``max_steps``, with the loss and the peak memory in GB (1e9 bytes).

    Where ``max_epochs`` limits the run too, it is Lightning's own: a bar of batches for each epoch. On a CPU the peak
    comes from a `MemoryProfiler` among the callbacks, once it has measured; on CUDA from the caching allocator.
    """

    @property
    def _counts_steps(self) -> bool:
        return self.trainer.max_steps > 0 and self.trainer.max_epochs == -1

    @property
    def total_train_batches(self) -> int | float:
        # Lightning's own sets batches of the epoch against the steps that are left: "6/2" in a run that goes on.
        return self.trainer.max_steps if self._counts_steps else super().total_train_batches

    def _update(self, progress_bar_id: Any, current: int, visible: bool = True, hard: bool = False) -> None:
        if self._counts_steps and progress_bar_id is not None and progress_bar_id == self.train_progress_bar_id:
            current = self.trainer.global_step
        super()._update(progress_bar_id, current, visible, hard)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._counts_steps and self.train_progress_bar_id is not None:
            return  # one bar for all epochs
        super().on_train_epoch_start(trainer, pl_module)
        self._update(self.train_progress_bar_id, 0)

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning's own says "Epoch 0/-2" where only max_steps is set; the bar itself counts the steps.
        if self._counts_steps:
            return "Training"
        last = self.trainer.max_epochs
        return f"Epoch {current_epoch + 1}" + (f" of {last}" if last and last > 0 else "")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = dict(super().get_metrics(trainer, pl_module))
        metrics.pop("v_num", None)
        peak = _peak_bytes(trainer)
        if peak:
            metrics["peak_gb"] = f"{peak / 1e9:.2f}"
        return metrics


def _peak_bytes(trainer: Trainer) -> int | None:
    if trainer.strategy.root_device.type == "cuda":
        return torch.cuda.max_memory_allocated(trainer.strategy.root_device)
    peaks = (getattr(callback, "current_peak_bytes", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return next((peak for peak in peaks if peak), None)
