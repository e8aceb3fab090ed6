"""Whether a checkpoint on disk is what was once written, byte for byte; torch.load itself does not look."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import IO, Any

from lightning_sonar.strategies.untrusted import METADATA, ForeignObjectError, read_metadata

_intact: set[tuple[str, int, int]] = set()
"""Files that were found whole, by path, size and time of change: a run looks for one to resume from, then loads it."""


class CheckpointError(ValueError):
    """A file that cannot be resumed from."""


def check_intact(path: str | Path) -> None:
    """Check that no part of a local checkpoint is missing and that no byte of its data has changed.

    torch.save writes a zip archive with a checksum for every tensor, and torch.load does not compare them: a byte that
    a disk has lost becomes another weight. This reads the whole file once, 0.6 GB a second on one core; a file found
    whole is not read again in this process as long as it does not change. Files in torch's format of before 2020 have
    no checksums and are left to torch.load.

    Args:
        path: a file, or the folder of a sharded checkpoint.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
        OSError: if it cannot be opened at all.
    """
    path = Path(path)
    try:
        if path.is_dir():
            _check_folder(path)
        else:
            _check_file(path)
    except CheckpointError as error:
        raise unreadable(path, str(error)) from error


def unreadable(path: str | Path, detail: str) -> CheckpointError:
    """The error for a checkpoint that is damaged, or none."""
    return CheckpointError(
        f"{path} cannot be read as a checkpoint ({detail}). It is truncated, damaged or of another kind; it was left "
        "as it is. Choose another checkpoint."
    )


def damage_of(path: Path) -> str | None:
    """What `check_intact` says of a sharded checkpoint, for one rank to tell the others; None of any other path."""
    if not path.is_dir():
        return None
    try:
        _check_folder(path)
    except CheckpointError as error:
        # What could run code is refused in words of its own, when it is loaded.
        return None if isinstance(error.__cause__, ForeignObjectError) else str(unreadable(path, str(error)))
    return None


def _check_file(path: Path) -> None:
    found = path.stat()
    key = str(path.absolute()), found.st_size, found.st_mtime_ns
    if key in _intact:
        return
    with path.open("rb") as file:
        _check_archive(file, path.name)
    _intact.add(key)


def _check_archive(file: IO[bytes], name: str) -> None:
    head = file.read(2)
    if not head:
        raise CheckpointError(f"{name} is empty")
    if head[:1] == b"\x80":  # a bare pickle
        return
    if head != b"PK":
        raise CheckpointError(f"{name} is no archive of torch.save")
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # zipfile raises whatever a damaged header leads it to
        raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error
    if bad is not None:
        raise CheckpointError(f"{name}: the data of {bad} is not what was written, by its checksum")


def _check_folder(folder: Path) -> None:
    if not (folder / METADATA).is_file():
        raise CheckpointError(f"the folder has no {METADATA}")
    parts = _parts_of(folder)
    for name in sorted({part.relative_path for part in parts}):
        if not (folder / name).is_file():
            raise CheckpointError(f"{name} is missing")
    for part in parts:
        with (folder / part.relative_path).open("rb") as file:
            file.seek(part.offset)
            data = file.read(part.length)
        if len(data) < part.length:
            raise CheckpointError(f"{part.relative_path} ends before its byte {part.offset + part.length}")
        if data[:2] == b"PK":
            _check_archive(io.BytesIO(data), part.relative_path)
    for path in sorted(folder.glob("*.pt")):
        _check_file(path)


def _parts_of(folder: Path) -> list[Any]:
    """Where each tensor's bytes are, as the folder's metadata say: ``relative_path``, ``offset``, ``length``."""
    try:
        return list(read_metadata(folder).storage_data.values())
    except Exception as error:  # a pickle that is damaged raises anything
        raise CheckpointError(f"{METADATA}: {type(error).__name__}: {error}") from error
