"""A comparison that has been measured before: to show, or to go on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.peers import PEERS, versions


def read(path: Path) -> dict[str, Any]:
    """A comparison's file.

    Raises:
        SystemExit: if there is none, or something else in it.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--json: {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), dict):
        raise SystemExit(f"--json: {path} holds no comparison of this program")
    return found


def earlier(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """What an interrupted comparison has left at ``path``; empty if there is nothing.

    Args:
        path: its file.
        wanted: what it must have been measured with: settings and processor.

    Raises:
        SystemExit: if it was measured otherwise, or with other versions.
    """
    if not path.exists():
        return {}
    found = read(path)
    had = {key: found.get(key) for key in wanted} | found.get("versions", {})
    now = versions([name for name in found["rows"] if name in PEERS]) | wanted
    other = {key: value for key, value in had.items() if now.get(key, value) != value}
    if other:
        asked = {key: now[key] for key in other}
        raise SystemExit(f"--resume: {path} was measured with {other}, now it would be {asked}")
    return found
