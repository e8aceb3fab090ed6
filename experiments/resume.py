"""Which checkpoint a run goes on from."""

from __future__ import annotations

import warnings
from pathlib import Path

from experiments.checks import SettingsError
from experiments.folder import CHECKPOINTS
from lightning_sonar.strategies.checkpoints import recover_folder, recover_folders
from lightning_sonar.strategies.intact import CheckpointError, check_intact


def find_checkpoint(wanted: str | None, folder: Path) -> str | None:
    """The checkpoint to resume from; None to start anew.

    ``"auto"`` is the newest one in the run's own folder, or a new start if there is none: for jobs that a scheduler
    starts again. ``"last"`` is the newest one in the run's own folder, or else the newest among the folders beside it,
    which the default folders of runs of the same model and mode are. One that is damaged is passed over with a warning.

    Raises:
        SettingsError: if there is none, but for ``"auto"``.
        CheckpointError: if all of them are damaged.
    """
    if wanted is None:
        return None
    if wanted not in ("auto", "last"):
        recover_folder(Path(wanted))
        if not Path(wanted).exists():
            raise SettingsError(f"ckpt_path={wanted}: there is no such file.")
        return wanted
    recover_folders(folder / CHECKPOINTS)  # not beside it, where another run may be writing
    own, beside = folder.glob(f"{CHECKPOINTS}/*.ckpt"), folder.parent.glob(f"*/{CHECKPOINTS}/*.ckpt")
    for places in (own, beside) if wanted == "last" else (own,):
        found = sorted(places, key=_changed, reverse=True)
        newest = _newest_intact(found, wanted)
        if newest is not None:
            return str(newest)
    if wanted == "auto":
        return None
    raise SettingsError(
        f"ckpt_path=last: no checkpoint in {folder / CHECKPOINTS}, nor in the runs beside it. Runs write them with "
        "callbacks=checkpoint. To start anew where there is none, use ckpt_path=auto."
    )


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _newest_intact(newest_first: list[Path], wanted: str) -> Path | None:
    """The first that is not damaged; None if there is none at all.

    Raises:
        CheckpointError: if all of them are damaged.
    """
    faults: list[str] = []
    for path in newest_first:
        try:
            check_intact(path)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        except FileNotFoundError:  # the run beside this one has replaced it by now
            continue
        if faults:
            warnings.warn(f"{' '.join(faults)} Going on from {path}, which is the newest before.", stacklevel=3)
        return path
    if not faults:
        return None
    raise CheckpointError(
        f"ckpt_path={wanted}: none of the {len(faults)} checkpoints in {newest_first[0].parent} can be read. "
        f"{faults[0]} To start anew, use ckpt_path=null: that keeps them under another name."
    )


def warn_if_over(resume: str | None, step: int, max_steps: int) -> None:
    """Warn that a run had nothing left to do, because it was resumed at the optimizer's step ``step``."""
    if resume is not None and 0 <= max_steps <= step:
        warnings.warn(
            f"{resume} is of step {step} and trainer.max_steps={max_steps}: nothing was trained. Set a larger "
            "trainer.max_steps to go on.",
            stacklevel=2,
        )
