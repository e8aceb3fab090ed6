"""How a run ends that does not end well: what stopped it, and how to go on."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from experiments.folder import CHECKPOINTS
from experiments.status import INTERRUPTED, TERMINATED, write_text
from lightning_sonar.strategies.checkpoints import is_between_steps

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of writing that are no fault of this program's: a disk that is full or lost."""

_GONE = (errno.ENOENT, errno.ENOTDIR)


class RunCheckpoint(ModelCheckpoint):
    """Lightning's, which also saves when SIGTERM stops a run on one device, in the place of its newest checkpoint.

    Several ranks would have to save together, which one that has been stopped cannot.
    """

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, SIGTERMException) or trainer.world_size > 1:
            super().on_exception(trainer, pl_module, exception)
        # Lightning's own would leave the checkpoint before it; what replaces that one has no public name.
        elif trainer.global_step > self._last_global_step_saved and is_between_steps(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))


def note(report: Path, text: str) -> None:
    """Write down why a run ended; where that cannot be written, what is printed has to do."""
    with suppress(OSError):
        write_text(report, text)


def could_not_write(error: BaseException | None, folder: Path) -> bool:
    """Whether a run has ended because its disk is full or lost, or because somebody has removed its folder."""
    if not isinstance(error, OSError):
        return False
    return error.errno in OF_THE_DISK or (error.errno in _GONE and str(error.filename).startswith(str(folder)))


def stopped_by(error: BaseException) -> tuple[str, int] | None:
    """What stopped a run, and the exit code that shells have for it, where Lightning's own would be 0 and 1."""
    if isinstance(error, SIGTERMException):
        return "SIGTERM", TERMINATED
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return "Ctrl-C", INTERRUPTED
    return None


def how_to_go_on(folder: Path) -> str:
    """What to tell the user whose run has stopped in ``folder``."""
    if any(folder.glob(f"{CHECKPOINTS}/*.ckpt")):
        return f"It goes on from its last checkpoint with ckpt_path=last hydra.run.dir={folder}"
    return "It has written no checkpoint to go on from; callbacks=checkpoint makes runs write them."
