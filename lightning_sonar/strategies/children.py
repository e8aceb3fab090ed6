"""The processes that a launcher of Lightning's has started, when this one fails."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Any

GRACE = 5.0
"""Seconds that other ranks have to say what went wrong with them: their error may be the cause of this one's."""


def end_children(launcher: Any, grace: float = GRACE) -> None:
    """Kill the ranks that this process has started, once they have had ``grace`` seconds to end by themselves.

    A rank that is stuck would otherwise outlive the job. Does nothing where another launcher started the ranks.

    Args:
        launcher: the strategy's, or None.
        grace: seconds to wait.
    """
    children = [child for child in getattr(launcher, "procs", ()) if isinstance(child, subprocess.Popen)]
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.05)
    for child in children:
        child.send_signal(signal.SIGKILL)  # does nothing to one that has ended
