"""The folder of a run: taken by one process at a time, and nothing in it that two runs have written together."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO

LOCK = ".lock"
"""Held by the process that trains in the folder; the system lets go of it however the process ends."""

OF_A_RUN = (
    *("config.yaml", "result.json", "losses.csv", "metrics.csv", "memory.json", "memory.png", "hf", "tensorboard"),
    *("memory_snapshot.pickle", "out_of_memory.json", "out_of_memory_snapshot.pickle"),
)
"""What a run writes, besides its checkpoints and logs that later runs add to."""

CHECKPOINTS = "checkpoints"

_TAKEN = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, IO[str]] = {}


class FolderError(OSError):
    """A folder that a run cannot work in; the message is meant for the user."""


def check_writable(folder: Path) -> None:
    """Make the folder if it is not there, and see that files can be made in it.

    Raises:
        FolderError: if not.
    """
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        raise FolderError(
            f"{folder} cannot be written: {error.strerror or error}. Nothing was trained. Set hydra.run.dir (of a "
            "sweep hydra.sweep.dir) to a folder that can be."
        ) from error


def take(folder: Path) -> None:
    """Let no other process train in the folder until this one has ended. Does nothing if this one has it already.

    Record locks, which forked workers do not inherit; where the file system has none, nothing is locked.

    Raises:
        FolderError: if another process has it, or the folder cannot be written.
    """
    check_writable(folder)
    key = folder.resolve()
    if key in _held:
        return
    file = (folder / LOCK).open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in _TAKEN:
            raise FolderError(
                f"Another run is at work in {folder}. Nothing was changed. Wait until it has ended, or set "
                "hydra.run.dir (of a sweep hydra.sweep.dir) to another folder."
            ) from error
        return
    _held[key] = file


def is_taken(folder: Path) -> bool:
    """Whether another process trains in the folder."""
    try:
        with (folder / LOCK).open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    return False


def set_aside(folder: Path, resume: str | None) -> list[str]:
    """Give what an earlier run has left in the folder another name: ``result.json`` becomes ``result.1.json``.

    Its checkpoints stay where they are for a run that goes on from one of them; else they become ``checkpoints.1``.
    Files that a killed process was in the middle of writing are removed. To be called by the process that has taken
    the folder.

    Args:
        folder: where the run will write.
        resume: the checkpoint that it will go on from, or None.

    Returns:
        What has another name now.
    """
    for half in (*folder.glob(f"{CHECKPOINTS}/*.part"), *folder.glob("*.part")):
        if half.is_dir():
            shutil.rmtree(half, ignore_errors=True)
        else:
            half.unlink(missing_ok=True)
    found = [folder / name for name in OF_A_RUN if (folder / name).exists()]
    checkpoints = folder / CHECKPOINTS
    own = resume is not None and checkpoints.resolve() in Path(resume).resolve().parents
    if not own and checkpoints.is_dir() and any(checkpoints.iterdir()):
        found.append(checkpoints)
    if not found:
        return []
    number = 1
    while any(_numbered(path, number).exists() for path in [*(folder / name for name in OF_A_RUN), checkpoints]):
        number += 1
    for path in found:
        path.rename(_numbered(path, number))
    return [_numbered(path, number).name for path in found]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
