"""How a run ended, as its folder tells."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

STATUS = "status.json"
"""Written by a sweep beside each job: ``exit_code``, ``seconds`` and, if it failed, ``error``."""

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM, as shells have them."""

_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def write_text(path: Path, text: str) -> None:
    """Write a file that is whole or not there: a reader finds the old one or the new one, on a full disk the old one.

    Raises:
        OSError: with the file's name, if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        # A name of bytes that are not UTF-8 is shown by their numbers.
        with part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        # A write that fails on a full disk does not say of which file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file, or something else in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_status(folder: Path) -> dict[str, Any]:
    """What the sweep wrote about a job; empty if it did not."""
    return read_json(folder / STATUS) or {}


def write_status(folder: Path, exit_code: int, seconds: float, error: str | None = None) -> None:
    """Put on record how a job ended; without ``error`` the reason is looked for in the folder."""
    if exit_code and error is None:
        error = why(folder, exit_code)
    value = {"exit_code": exit_code, "seconds": round(seconds, 1), "error": error}
    write_text(folder / STATUS, json.dumps(value, indent=2) + "\n")


def why(folder: Path, exit_code: int | None) -> str:
    """One line: why the run in ``folder`` has no result."""
    path = folder / "error.txt"
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        lines = []
    if lines and lines[0].startswith("Traceback"):
        # The last exception is the one that ended the run; notes may stand below it.
        lines = [line for line in lines if _EXCEPTION.match(line)][-1:] or lines[-1:]
    if lines:
        return lines[0]
    if exit_code is not None and exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        return f"ended by {name}{hint}"
    if exit_code:
        return "it ended before training began; its own output says why"
    return "interrupted, or still running"
