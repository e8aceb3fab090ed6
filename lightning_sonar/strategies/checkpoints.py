"""Checkpoints that are whole or not there: written beside their place first, read with errors that help."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from lightning_sonar.in_backward import InBackward
from lightning_sonar.strategies.intact import CheckpointError, check_intact, unreadable

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

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


def make_newest(target: Path) -> None:
    """Let what was saved last be the newest by its time of change, even if the clock has been put back since.

    The newest checkpoint of a folder is the one that a run goes on from.
    """
    with suppress(OSError):
        times = [path.stat().st_mtime_ns for path in target.parent.glob(f"*{target.suffix}") if path != target]
        found = target.stat()
        if times and found.st_mtime_ns <= max(times):
            os.utime(target, ns=(found.st_atime_ns, max(times) + 1_000_000))


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
            make_newest(target)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch hides what a write raises
            if isinstance(cause, OSError) and cause.errno is not None:
                raise OSError(cause.errno, os.strerror(cause.errno), str(target)) from error
            raise

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint; arguments as in Lightning's.

        Unless ``weights_only=False`` is passed, only tensors and plain values are read, from remote paths too, for
        which Lightning's own default is to run whatever the file holds.

        Raises:
            FileNotFoundError: if there is none.
            CheckpointError: if the file is truncated or damaged, or no Lightning checkpoint, or a folder, or holds
                objects that could run code.
        """
        if Path(path).is_dir():
            raise CheckpointError(
                f"{path} is a sharded checkpoint, a folder. Resume with trainer=fsdp (SonarMoEFSDPStrategy), once with "
                "save_distributed_checkpoint=False to get one file that every strategy reads."
            )
        if Path(path).is_file():
            check_intact(path)
        if "://" in str(path) and kwargs.get("weights_only") is None and len(args) < 2:
            kwargs["weights_only"] = True
        try:
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError, KeyError) as error:
            if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error).lower():
                raise holds_code(path, error) from error
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which a seek in a short file gives
                raise
            detail = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise unreadable(path, detail) from error
        if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
            found = sorted(map(str, checkpoint))[:5] if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
            raise CheckpointError(
                f"{path} is no checkpoint of Lightning's: expected a mapping with 'state_dict', found {found}. It was "
                "left as it is. Load weights of another kind with torch.load and model.load_state_dict."
            )
        return dict(checkpoint)


def holds_code(path: str | Path, error: pickle.UnpicklingError) -> CheckpointError:
    """The error for a checkpoint that ``weights_only`` refuses to load."""
    found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    what = f"it names {found[1]}, which is neither" if found else str(error).partition("\n")[0]
    return CheckpointError(
        f"{path} was not loaded: only tensors and plain values are read from a checkpoint, because other objects can "
        f"run code while they are loaded ({what}). If you trust whoever wrote it, load it once yourself with "
        "torch.load(..., weights_only=False) and save what you need of it."
    )


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
            errno.ENOSPC,
            f"The checkpoint {target} needs {need / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free; nothing "
            "was written. Free some disk, or save without optimizer state (save_weights_only=True).",
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


def is_between_steps(trainer: Trainer) -> bool:
    """Whether no batch is in the middle of its training step, and no gradients of earlier microbatches wait for one."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batches.ready != batches.processed:
        return False
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return all(tensor.grad is None for group in groups for tensor in group["params"])


def refuse_broken_off(trainer: Trainer, path: Any) -> bool:
    """Whether a checkpoint asked for now is to be left out, because a fit was broken off in the middle of a step.

    The batch of that step counts as used for the data's position, while the weights may or may not have seen it; and
    between two microbatches of a step, gradients are not saved. While an exception is being handled the checkpoint is
    left out, so that the exception is what the user sees.

    Raises:
        RuntimeError: afterwards, until the next fit.
    """
    handling = sys.exc_info()[0] is not None
    if not (handling or trainer.interrupted) or is_between_steps(trainer):
        return False
    if handling:
        return True
    raise RuntimeError(
        f"The checkpoint {path} was asked for after a fit that was broken off in the middle of a step: its weights, "
        "optimizer and data may be of two different steps. It is not written. Go on from the last checkpoint that was; "
        "the weights as they are can be saved with torch.save(model.state_dict(), ...)."
    )
