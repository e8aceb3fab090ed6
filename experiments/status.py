"""How a run ended, as its folder tells."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

STATUS = "status.json"
"""Written by a sweep beside each job: ``exit_code``, ``seconds`` and, if it failed, ``error``."""

_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no file, or something else in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
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
    part = folder / f"{STATUS}.part"
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(folder / STATUS)


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
