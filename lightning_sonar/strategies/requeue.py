"""SLURM's signal that a job is about to be requeued, answered between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_sonar.strategies.checkpoints import is_between_steps

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class RequeueBetweenSteps(Callback):
    """Lets Lightning answer the signal when the step under way is over; between steps, at once.

    Lightning's handler writes a checkpoint wherever the signal meets the program, in the middle of backward too, where
    no checkpoint can be written.

    Args:
        trainer: whose fit begins.
        signum: the signal.
    """

    def __init__(self, trainer: Trainer, signum: int) -> None:
        self._trainer, self._signum = trainer, signum
        self._answer: Callable[[int, Any], Any] | None = None
        self._waiting = False
        trainer.callbacks.append(self)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Give the signal back to Lightning."""
        if self._answer is not None:
            signal.signal(self._signum, self._answer)
        self._trainer.callbacks.remove(self)  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        answer = signal.getsignal(self._signum)  # Lightning sets it after the strategy's setup
        # An instance of a private class of Lightning's; another's handler stays as it is.
        of_lightning = type(answer).__module__.startswith("lightning.")
        if callable(answer) and of_lightning and threading.current_thread() is threading.main_thread():
            self._answer = answer
            signal.signal(self._signum, self._receive)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._waiting and self._answer is not None and is_between_steps(trainer):
            self._waiting = False
            self._answer(self._signum, None)

    def _receive(self, signum: int, frame: Any) -> None:
        if self._answer is not None and is_between_steps(self._trainer):
            self._answer(signum, frame)
        else:
            self._waiting = True


def requeue_between_steps(trainer: Trainer) -> RequeueBetweenSteps | None:
    """Take the requeue signal over from Lightning; None where Lightning does not listen to it."""
    environment = trainer._accelerator_connector.cluster_environment  # Lightning's own code finds it there, too
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    signum = environment.requeue_signal
    return None if signum is None else RequeueBetweenSteps(trainer, signum)
