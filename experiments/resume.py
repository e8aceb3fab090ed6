"""Which checkpoint a run goes on from."""

from __future__ import annotations

import warnings
from pathlib import Path

from experiments.settings import SettingsError
from lightning_sonar.strategies.checkpoints import recover_folder, recover_folders


def find_checkpoint(wanted: str | None, folder: Path) -> str | None:
    """The checkpoint to resume from; None to start anew.

    ``"auto"`` is the newest one in the run's own folder, or a new start if there is none: for jobs that a scheduler
    starts again. ``"last"`` is the newest one in the run's own folder, or else the newest among the folders beside it,
    which the default folders of runs of the same model and mode are.

    Raises:
        SettingsError: if there is none, but for ``"auto"``.
    """
    if wanted is None:
        return None
    if wanted not in ("auto", "last"):
        recover_folder(Path(wanted))
        if not Path(wanted).exists():
            raise SettingsError(f"ckpt_path={wanted}: there is no such file.")
        return wanted
    recover_folders(folder / "checkpoints")  # not beside it, where another run may be writing
    own, beside = folder.glob("checkpoints/*.ckpt"), folder.parent.glob("*/checkpoints/*.ckpt")
    for places in (own, beside) if wanted == "last" else (own,):
        found = sorted(places, key=lambda path: path.stat().st_mtime)
        if found:
            return str(found[-1])
    if wanted == "auto":
        return None
    raise SettingsError(
        f"ckpt_path=last: no checkpoint in {folder / 'checkpoints'}, nor in the runs beside it. Runs write them with "
        "callbacks=checkpoint. To start anew where there is none, use ckpt_path=auto."
    )


def warn_if_over(resume: str | None, step: int, max_steps: int) -> None:
    """Warn that a run had nothing left to do, because it was resumed at the optimizer's step ``step``."""
    if resume is not None and 0 <= max_steps <= step:
        warnings.warn(
            f"{resume} is of step {step} and trainer.max_steps={max_steps}: nothing was trained. Set a larger "
            "trainer.max_steps to go on.",
            stacklevel=2,
        )
