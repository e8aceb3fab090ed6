"""Files in the user's cache folder that may be missing, damaged or impossible to write."""

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["cache_folder", "read_cached", "write_cached"]

_TEMPORARY = ".tmp"
# Long enough that nobody is still writing it.
_STALE_SECONDS = 24 * 3600


def cache_folder(cache_dir: str | Path | None = None) -> Path | None:
    """The folder for cached files: the given one, else the user's; None if the user has no home."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path there is invalid and to be ignored.
    if os.path.isabs(xdg):
        return Path(xdg) / "lightning_sonar"
    try:
        return Path.home() / ".cache" / "lightning_sonar"
    except RuntimeError:
        return None


def read_cached(path: Path) -> str | None:
    """What `write_cached` stored, or None if it is missing or not whole."""
    try:
        header, _, body = path.read_bytes().partition(b"\n")
        if json.loads(header)["sha256"] != hashlib.sha256(body).hexdigest():
            return None
        return body.decode()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_cached(path: Path, text: str) -> bool:
    """Store the text behind a line with its checksum; False, and no error, where that is impossible.

    Other processes see the old file or the new one, never a part of it. What a killed process left half-written of
    this file goes, when it is a day old.
    """
    body = text.encode()
    header = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode()
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=_TEMPORARY)
        with os.fdopen(descriptor, "wb") as file:
            file.write(header + b"\n" + body)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
        return False
    return True


def _sweep(path: Path) -> None:
    for left in path.parent.iterdir():
        if left.name.startswith(path.name) and left.name.endswith(_TEMPORARY):
            with suppress(OSError):  # another process may be sweeping too
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    left.unlink()
