"""Where the memory of a training step goes: a tracker of live storages, a Lightning callback, a figure."""

from .figure import draw_memory
from .ledger import Ledger, Record
from .profiler import MemoryProfiler
from .report import MemoryReport
from .tracker import StorageTracker

__all__ = ["Ledger", "MemoryProfiler", "MemoryReport", "Record", "StorageTracker", "draw_memory"]
