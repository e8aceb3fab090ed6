"""Checkpoints that are whole or not there: written beside their place first, read with errors that help."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from lightning_sonar.in_backward import InBackward


class CheckpointError(ValueError):
    """A file that cannot be resumed from."""


PARTIAL = ".part"
"""Ending of a file that is being written."""

OLD = ".old"
"""Ending of a folder whose place a newer one is taking."""


def recover_folder(path: Path) -> None:
    """Give a checkpoint folder its name back, if a process was killed while the next one took its place.

    Several processes may do so at once.
    """
    old = path.with_name(path.name + OLD)
    if not path.exists() and old.is_dir():
        with suppress(FileNotFoundError):
            old.rename(path)


def recover_folders(folder: Path) -> None:
    """`recover_folder` for every checkpoint in a folder."""
    for old in folder.glob(f"*{OLD}"):
        recover_folder(old.with_name(old.name.removesuffix(OLD)))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a local checkpoint into a file beside its place, and moves it there when it is complete.

    A process that is killed at any moment leaves the old checkpoint, or the new one, and never half of one. Unlike
    Lightning's own it does not build the file in memory first, which takes as much again as the checkpoint. Remote
    paths go Lightning's way. Free disk is looked at before anything is written.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write ``checkpoint``.

        Raises:
            OSError: if the disk has less room than the tensors take.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_disk(checkpoint, target)
        partial = target.with_name(target.name + PARTIAL)
        try:
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; arguments as in Lightning's.

        Raises:
            FileNotFoundError: if there is none.
            CheckpointError: if the file is truncated, or no Lightning checkpoint, or a folder.
        """
        if Path(path).is_dir():
            raise CheckpointError(
                f"{path} is a sharded checkpoint, a folder. Resume with trainer=fsdp (SonarMoEFSDPStrategy), once with "
                "save_distributed_checkpoint=False to get one file that every strategy reads."
            )
        try:
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError, KeyError) as error:
            if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error).lower():
                raise
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which a seek in a short file gives
                raise
            detail = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise CheckpointError(
                f"{path} cannot be read as a checkpoint ({detail}). It is truncated "
                "or of another kind; it was left as it is. Choose another checkpoint."
            ) from error
        if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
            found = sorted(map(str, checkpoint))[:5] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
            raise CheckpointError(
                f"{path} is no checkpoint of Lightning's: expected a mapping with 'state_dict', found {found}. It was "
                "left as it is. Load weights of another kind with torch.load and model.load_state_dict."
            )
        return dict(checkpoint)


def bytes_of(value: Any) -> int:
    """Bytes of all tensors in nested mappings and sequences, each storage once."""
    seen: dict[int, int] = {}

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            seen[storage.data_ptr() or id(storage)] = storage.nbytes()
        elif isinstance(item, Mapping):
            for part in item.values():
                visit(part)
        elif isinstance(item, (list, tuple)):
            for part in item:
                visit(part)

    visit(value)
    return sum(seen.values())


def _check_disk(checkpoint: dict[str, Any], target: Path) -> None:
    need, free = bytes_of(checkpoint), shutil.disk_usage(target.parent).free
    if need > free:
        raise OSError(
            f"The checkpoint {target} needs {need / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free; nothing "
            "was written. Free some disk, or save without optimizer state (save_weights_only=True)."
        )


def refuse_in_mid_step(handle: InBackward | None, path: Any) -> bool:
    """Whether a checkpoint asked for now is to be left out, because experts are one step ahead of the rest.

    While an exception is being handled it is left out, so that the exception is what the user sees.

    Raises:
        RuntimeError: at any other time.
    """
    if handle is None or not handle.mid_step:
        return False
    if sys.exc_info()[0] is not None:
        return True
    raise RuntimeError(
        f"The checkpoint {path} was asked for between backward and the optimizer's step. Expert tensors have been "
        "updated for this step and dense parameters have not: such a state belongs to no step, and is not written. "
        "Save from on_train_batch_end, or after trainer.fit."
    )
