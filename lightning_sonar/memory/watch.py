"""One optimizer step under watch: the tracker, the labels, and on CUDA the allocator's own peaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_sonar.in_backward import InBackward
from lightning_sonar.memory.report import (
    DENSE_GRADIENTS,
    EXPERT_GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    MemoryReport,
    report_of,
)
from lightning_sonar.memory.tracker import StorageTracker
from lightning_sonar.optim.states import state_tensors

HOST_SUMS = "host_sums"
"""What the book of host memory calls gradients that are summed there."""


class Watch:
    """One optimizer step under the tracker, over one or several batches.

    Args:
        trainer: the trainer of the fit; its optimizers' state is labelled.
        module: the module whose parameters and gradients are labelled.
        experts: ``id`` of each expert tensor.
        rounding: see `StorageTracker`; None is what the device's allocator does.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, experts: set[int], rounding: int | None = None
    ) -> None:
        self._module = module
        self._optimizers = trainer.optimizers
        self._experts = experts
        self._device = trainer.strategy.root_device
        self._cuda = self._device.type == "cuda"
        self._peaks: dict[str, int] = {}
        self._phase = ""
        self.saw_backward = False
        if rounding is None:
            rounding = 512 if self._cuda else 1
        self.tracker = StorageTracker(rounding=rounding, device=self._device)
        self._engine: InBackward | None = getattr(trainer.strategy, "in_backward", None)
        if self._engine is not None and self._engine.host_states is not None:
            self._engine.host_states.watchers.append(self._label_copies)

    def begin(self, batch: Any) -> None:
        """A batch begins, and with it the forward phase."""
        self.tracker.track(self._module.parameters(), PARAMETERS)
        self.tracker.track(self._module.buffers())
        self.label_gradients()
        self._label_state()
        if self._engine is not None:
            self.tracker.track(self._engine.host_sums, HOST_SUMS)
        self.tracker.track(_tensors_in(batch))
        self.tracker.start()
        self.mark("forward")

    def mark(self, phase: str) -> None:
        """A phase begins; naming the present one changes nothing."""
        if phase == self._phase:
            return
        self._read_allocator()
        self._phase = phase
        self.saw_backward |= phase == "backward"
        self.tracker.mark(phase)

    def end(self) -> None:
        """A batch ended; what happens until the next one is not part of the step."""
        self.label_gradients()
        self._label_state()
        self.mark("done")
        self._read_allocator()
        self.tracker.stop()

    def label_gradients(self) -> None:
        """Label every gradient that is alive."""
        for parameter in self._module.parameters():
            self.label_gradient(parameter)

    def label_gradient(self, tensor: Tensor) -> None:
        """Label the gradient of one tensor, if it has one."""
        if tensor.grad is not None:
            label = EXPERT_GRADIENTS if id(tensor) in self._experts else DENSE_GRADIENTS
            self.tracker.label(tensor.grad, label)

    def report(self, hooks: int, step: int) -> MemoryReport:
        """The figures of this step."""
        return report_of(
            self.tracker.ledger,
            device=str(self._device),
            hooks=hooks,
            allocator_peaks=self._peaks if self._cuda else None,
            step=step,
        )

    def close(self) -> None:
        """Switch the tracker off for good."""
        states = None if self._engine is None else self._engine.host_states
        if states is not None and self._label_copies in states.watchers:
            states.watchers.remove(self._label_copies)
        self._engine = None
        self.tracker.close()

    def _label_copies(self, copies: Iterable[Tensor]) -> None:
        self.tracker.track(copies, OPTIMIZER_STATE)

    def _label_state(self) -> None:
        for optimizer in self._optimizers:
            self.tracker.track(state_tensors(optimizer), OPTIMIZER_STATE)

    def _read_allocator(self) -> None:
        if self._cuda:
            if self._phase:
                peak = torch.cuda.max_memory_allocated(self._device)
                self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), peak)
            torch.cuda.reset_peak_memory_stats(self._device)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a batch: nested mappings, lists, tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
