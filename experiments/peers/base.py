"""What the recipes share: a plan of steps, an observer of them, and a plain training loop."""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.measuring import loss_of
from lightning_sonar.memory.tracker import StorageTracker

Batch = dict[str, Tensor]

BF16_MOMENTS = "two moments, bf16"
EIGHT_BIT = "two moments, 8 bit"


class CannotRunError(RuntimeError):
    """A peer that does not run this model; the message is its row's reason."""


@dataclass(frozen=True)
class Plan:
    """The training asked of a recipe.

    Attributes:
        steps: the microbatches of each step; their losses are averaged.
        lrs: the learning rate of each step of the whole training, including those before a resumption.
        max_norm: the global norm to clip to; None for none.
        done: steps done before these ones.
        save_to: where to leave everything that resuming needs.
        resume_from: what such a plan has left; ``done`` steps were taken to get there.
    """

    steps: Sequence[Sequence[Batch]]
    lrs: Sequence[float]
    max_norm: float | None = None
    done: int = 0
    save_to: Path | None = None
    resume_from: Path | None = None

    def rate(self, step: int) -> float:
        """The learning rate of a step. A scheduler asks once more after the last one."""
        return self.lrs[min(step, len(self.lrs) - 1)]


class Observer:
    """Times every step, and counts the live storages of one of them.

    A step lasts from the end of the one before, so what a trainer does between steps counts too.

    Args:
        watch: the number of the step to put under the tracker; it and its time are no measure of speed.

    Attributes:
        ms: milliseconds of each step, in order, the watched one included.
        peak_bytes: the most bytes alive at once in the watched step; None before it.
    """

    def __init__(self, watch: int | None = None) -> None:
        self.ms: list[float] = []
        self.peak_bytes: int | None = None
        self._watch = watch
        self._tracker: StorageTracker | None = None
        self._ended: float | None = None

    def begin(self, model: nn.Module, states: Iterable[Tensor], batches: Sequence[Batch]) -> None:
        """A step begins."""
        if self._ended is None:
            self._ended = time.perf_counter()
        if len(self.ms) != self._watch:
            return
        tracker = self._tracker = StorageTracker()
        tracker.track([*model.parameters(), *model.buffers()])
        tracker.track(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        tracker.track(states)
        for batch in batches:
            tracker.track(batch.values())
        tracker.start()

    def end(self) -> None:
        """The step is over, its update done."""
        if self._tracker is not None:
            self.peak_bytes = self._tracker.ledger.peak_bytes
            self._tracker.close()
            self._tracker = None
        now = time.perf_counter()
        self.ms.append((now - (self._ended or now)) * 1e3)
        self._ended = now


class Recipe(ABC):
    """One way to train, and what is to be known of it before it runs.

    Attributes:
        name: of its row, for the command line.
        label: of its row, for people.
        package: its distribution, where it needs one of its own, and ``module``, what that is imported as.
        state: the optimizer state it keeps. Peaks are compared among those that keep the same.
        clips: whether it is given a norm to clip to in the benchmark; the check gives it one in any case.
        lr_factor: its usual learning rate in terms of AdamW's for all parameters.
        note: what a reader must know of its figures.
    """

    name: str
    label: str
    package: str | None = None
    module: str | None = None
    state: str = BF16_MOMENTS
    clips: bool = True
    lr_factor: float = 1.0
    note: str = ""

    def missing(self) -> str | None:
        """What to install before it can run, or None."""
        if self.module is None or importlib.util.find_spec(self.module) is not None:
            return None
        return f"{self.package} is not installed: pip install 'lightning-sonar[bench]'"

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model that is trained, made of the given one."""
        return model

    @abstractmethod
    def train(self, model: nn.Module, plan: Plan, observer: Observer) -> None:
        """Train a prepared model in place.

        Raises:
            CannotRunError: where the peer does not run this model.
        """

    @abstractmethod
    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer whose ordinary steps after backward its weights are compared with."""


class PlainLoop(Recipe):
    """A recipe in a loop of one's own: what differs is how it starts and how it steps."""

    @abstractmethod
    def begin(self, model: nn.Module, plan: Plan) -> Any:
        """A run with ``optimizers``, ``states()``, ``step(microbatches, max_norm)`` and ``close()``."""

    def train(self, model: nn.Module, plan: Plan, observer: Observer) -> None:
        run = self.begin(model, plan)
        schedulers = [LambdaLR(optimizer, plan.rate) for optimizer in run.optimizers]
        parts = [*run.optimizers, *schedulers]
        try:
            if plan.resume_from is not None:
                # The file is this process's own.
                saved = torch.load(plan.resume_from, weights_only=False)
                model.load_state_dict(saved["model"])
                for part, state in zip(parts, saved["parts"], strict=True):
                    part.load_state_dict(state)
            for microbatches in plan.steps:
                observer.begin(model, run.states(), microbatches)
                run.step(microbatches, plan.max_norm)
                for scheduler in schedulers:
                    scheduler.step()
                observer.end()
            if plan.save_to is not None:
                saved = {"model": model.state_dict(), "parts": [part.state_dict() for part in parts]}
                torch.save(saved, plan.save_to)
        finally:
            run.close()


def shares(model: nn.Module, microbatches: Sequence[Batch]) -> Iterable[Tensor]:
    """The loss of each microbatch as its share of the step's, one at a time."""
    for batch in microbatches:
        yield loss_of(model, batch) / len(microbatches) if len(microbatches) > 1 else loss_of(model, batch)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
