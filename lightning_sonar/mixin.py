"""A LightningModule mixin: the whole manual-optimization step in one call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_sonar.in_backward import InBackward

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:
    _Base = object


class SonarMoEMixin(_Base):
    """Manual optimization with in-backward updates, for a LightningModule trained by a SonarMoE strategy.

    Put it before ``LightningModule`` among the bases, and return ``self.sonar_step(loss)`` from
    ``training_step``::

        class MyMoE(SonarMoEMixin, L.LightningModule):
            def training_step(self, batch, batch_idx):
                return self.sonar_step(self.loss(batch))

    Expert tensors are updated inside ``manual_backward``; dense ones are clipped by the Trainer's
    ``gradient_clip_val`` and stepped after it. Calling ``manual_backward``, ``clip_gradients`` and ``opt.step()`` by
    hand does the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self._warned_plateau = False
        self._accumulated = False

    @property
    def in_backward(self) -> InBackward:
        """The handle of the training under way.

        Raises:
            RuntimeError: outside fit, or if the Trainer's strategy is not a SonarMoE strategy.
        """
        strategy = self.trainer.strategy
        handle = getattr(strategy, "in_backward", None)
        if handle is None:
            raise RuntimeError(
                f"{type(self).__name__} is a SonarMoEMixin module, but the Trainer's strategy is "
                f"{type(strategy).__name__}, which updates nothing inside backward. Pass "
                "Trainer(strategy=SonarMoEStrategy()), with mode='standard' if you want ordinary training."
            )
        return handle

    def sonar_step(self, loss: Tensor) -> Tensor:
        """Backward with in-backward updates, dense clip, optimizer step, zeroed gradients, scheduler step.

        With ``Trainer(accumulate_grad_batches=n)`` the loss is divided by n, and all but every n-th call (and the last
        one of an epoch) only accumulate, as in automatic optimization.

        Args:
            loss: 0-dim, with its graph.

        Returns:
            The loss, detached, to be returned from ``training_step``.
        """
        handle = self.in_backward
        microbatches: int = self.trainer.strategy.microbatches  # type: ignore[attr-defined]
        whole = (self.trainer.fit_loop.batch_idx + 1) % microbatches == 0 or self.trainer.is_last_batch
        with nullcontext() if whole else handle.accumulate():
            self.manual_backward(loss / microbatches)
        optimizer = self.optimizers()
        if isinstance(optimizer, list):
            raise RuntimeError(f"sonar_step drives one optimizer; configure_optimizers returned {len(optimizer)}.")
        self._accumulated = not whole or handle.accumulating
        if not self._accumulated:
            optimizer.step()
            self._step_due("step", self.trainer.fit_loop.batch_idx)
        return loss.detach()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """``sonar_step`` in this context only adds to the gradients; the next one outside it steps on the sum."""
        with self.in_backward.accumulate():
            yield

    def on_validation_model_zero_grad(self) -> None:
        """Keep what microbatches have accumulated: Lightning does not know of them in manual optimization."""
        if not self._accumulated:
            super().on_validation_model_zero_grad()

    def on_train_epoch_end(self) -> None:
        """Step the schedulers that step once an epoch. An override must call this one."""
        super().on_train_epoch_end()
        self._step_due("epoch", self.trainer.current_epoch)

    def _step_due(self, interval: str, index: int) -> None:
        """Step schedulers by interval and frequency, counted as in automatic optimization."""
        for config in self.trainer.strategy.lr_scheduler_configs:
            if isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                if not self._warned_plateau:
                    self._warned_plateau = True
                    warnings.warn(
                        "ReduceLROnPlateau needs a metric, and Lightning drops its 'monitor' in manual optimization: "
                        "nothing steps it here. Call self.lr_schedulers().step(metric) where the metric is known, in "
                        "on_validation_epoch_end for example.",
                        stacklevel=2,
                    )
            elif config.interval == interval and (index + 1) % config.frequency == 0:
                self.lr_scheduler_step(config.scheduler, None)
