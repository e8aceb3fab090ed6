"""The CUDA caching allocator's own history, recorded over a bounded window."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_sonar.memory.report import write_atomically

MAX_ENTRIES = 100_000
"""Allocations and frees that are kept, the newest ones; each takes up to a few kilobytes of host memory."""


class AllocatorHistory:
    """Records what the CUDA allocator does over a window, and writes it for PyTorch's memory viewer.

    The recorder is one for the whole process. Where somebody else has switched it on already it is left as it is:
    its history is written, and it stays on.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.max_entries = max_entries
        self.open = False
        self._ours = False

    def start(self) -> None:
        """Open the window; nothing happens if it is open."""
        if self.open:
            return
        self.open = True
        if not _is_on():
            self._ours = True
            torch.cuda.memory._record_memory_history(max_entries=self.max_entries, clear_history=True)

    def write(self, path: Path) -> None:
        """Write the history and close the window."""
        try:
            write_snapshot(path)
        finally:
            self.stop()

    def stop(self) -> None:
        """Close the window, which forgets the history; nothing happens if it is closed."""
        self.open = False
        if self._ours:
            self._ours = False
            torch.cuda.memory._record_memory_history(enabled=None)


def possible(device: torch.device) -> bool:
    """Whether a device has an allocator that can be recorded."""
    return device.type == "cuda"


def write_snapshot(path: Path) -> None:
    """Write what is allocated now, and the history as far as it was recorded, for pytorch.org/memory_viz."""
    write_atomically(path, lambda target: torch.cuda.memory._dump_snapshot(str(target)))


def _is_on() -> bool:
    asks = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # a build without CUDA lacks it
    return asks is not None and bool(asks())
