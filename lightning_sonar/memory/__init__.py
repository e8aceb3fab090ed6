"""Where the memory of a training step goes: a tracker of live storages, a Lightning callback, a figure."""

from lightning_sonar.memory.figure import draw_memory
from lightning_sonar.memory.ledger import Ledger, Record
from lightning_sonar.memory.profiler import MemoryProfiler
from lightning_sonar.memory.report import MemoryReport
from lightning_sonar.memory.tracker import StorageTracker

__all__ = ["Ledger", "MemoryProfiler", "MemoryReport", "Record", "StorageTracker", "draw_memory"]
