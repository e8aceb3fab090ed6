"""The book of storages: who was born when, how large, with which label, and when it died.

The book is one append-only list. Everything else (live bytes, peaks, curves by label) is computed from
it afterwards. That makes three things simple: storages may die in any thread, because appending to a list
is atomic; a label given late counts for the whole life of a storage, because sums are made at the end; and
writing costs almost nothing while a training step is being watched.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

OTHER = "other"


class Record:
    """One storage.

    Attributes:
        nbytes: present size in bytes, rounded as the allocator rounds.
        label: what the storage holds; ``"other"`` until somebody says.
        op: name of the operation that made it.
        birth: index of the event in which it was born; None before the book was read.
        death: index of the event in which it died; None while it lives.
        phase: phase in which it was born.
    """

    __slots__ = ("birth", "death", "label", "nbytes", "op", "phase")

    def __init__(self, nbytes: int, label: str, op: str) -> None:
        self.nbytes = nbytes
        self.label = label
        self.op = op
        self.birth: int | None = None
        self.death: int | None = None
        self.phase = ""

    def __repr__(self) -> str:
        return f"Record({self.nbytes} bytes, {self.label!r}, {self.op}, events {self.birth}..{self.death})"


class Event(NamedTuple):
    """One line of the book: ``delta`` bytes more or less, by ``op`` (None: the storage died)."""

    record: Record
    delta: int
    op: str | None
    seconds: float


@dataclass(frozen=True)
class Span:
    """A phase from event ``start`` up to, not including, event ``end``, in seconds of the book's clock."""

    phase: str
    start: int
    end: int
    start_seconds: float
    end_seconds: float


class Ledger:
    """Append-only book of storages and the figures that follow from it. All sizes are bytes."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._events: list[Event] = []
        self._marks: list[tuple[int, str, float]] = []
        self._levels: list[int] = []  # live bytes after each event that has been read so far
        self._origin = time.perf_counter()
        self._frozen: float | None = None
        self.host: Ledger | None = None
        """The book of storages in host memory, if there were any: they are in none of this book's figures."""

    # -- writing: may happen in any thread ---------------------------------------------------------------

    def born(self, nbytes: int, label: str, op: str) -> Record:
        """Write down a new storage of ``nbytes`` bytes."""
        record = Record(nbytes, label, op)
        self.records.append(record)
        self._events.append(Event(record, nbytes, op, self.now()))
        return record

    def resized(self, record: Record, nbytes: int, op: str) -> None:
        """Write down that a living storage now has ``nbytes`` bytes."""
        delta = nbytes - record.nbytes
        if delta:
            record.nbytes = nbytes
            self._events.append(Event(record, delta, op, self.now()))

    def died(self, record: Record) -> None:
        """Write down that a storage is gone."""
        self._events.append(Event(record, -record.nbytes, None, self.now()))

    def mark(self, phase: str) -> None:
        """Begin a phase. Naming the phase that is on already changes nothing."""
        if not self._marks or self._marks[-1][1] != phase:
            self._marks.append((len(self._events), phase, self.now()))

    def now(self) -> float:
        """Seconds since the book was opened, pauses left out."""
        return time.perf_counter() - self._origin if self._frozen is None else self._frozen

    def pause(self) -> None:
        """Stop the clock, so that what happens between two watched stretches takes no time."""
        if self._frozen is None:
            self._frozen = self.now()

    def resume(self) -> None:
        """Let the clock go on from where it was stopped."""
        if self._frozen is not None:
            self._origin = time.perf_counter() - self._frozen
            self._frozen = None

    # -- reading: by the thread that owns the book -------------------------------------------------------

    @property
    def levels(self) -> list[int]:
        """Live bytes after each event; index = event. Do not change the list."""
        level = self._levels[-1] if self._levels else 0
        # The length is fixed first: another thread may append while we read.
        for index in range(len(self._levels), len(self._events)):
            event = self._events[index]
            level += event.delta
            self._levels.append(level)
            if event.op is None:
                event.record.death = index
            elif event.record.birth is None:
                event.record.birth = index
                event.record.phase = self.phase_at(index)
        return self._levels

    @property
    def events(self) -> int:
        """How many events the book holds."""
        return len(self._events)

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        levels = self.levels
        return levels[-1] if levels else 0

    @property
    def spans(self) -> list[Span]:
        """The phases in order. What was written before the first mark belongs to the first phase."""
        count, end = len(self._events), self.now()
        marks = self._marks or [(0, "", 0.0)]
        following = [*marks[1:], (count, "", end)]
        return [
            Span(phase, 0 if index == 0 else start, nxt[0], seconds, nxt[2])
            for index, ((start, phase, seconds), nxt) in enumerate(zip(marks, following, strict=True))
        ]

    @property
    def first_event(self) -> int:
        """The event from which a timeline should be shown: the last one before the first mark."""
        return max(0, self._marks[0][0] - 1) if self._marks else 0

    def phase_at(self, event: int) -> str:
        """The phase an event belongs to."""
        if not self._marks:
            return ""
        position = bisect.bisect_right(self._marks, event, key=lambda mark: mark[0])
        return self._marks[max(0, position - 1)][1]

    def peak_in(self, span: Span) -> tuple[int, int]:
        """``(bytes, event)`` of the most bytes alive at once during a span, its opening level included."""
        levels = self.levels
        # What is alive when a phase begins is alive in that phase, even if the phase allocates nothing.
        first = max(0, span.start - 1)
        last = min(max(span.end, first + 1), len(levels))
        if first >= last:
            return 0, 0
        event = max(range(first, last), key=levels.__getitem__)
        return levels[event], event

    @property
    def peak_per_phase(self) -> dict[str, int]:
        """Most bytes alive at once in each phase, in order of first appearance."""
        peaks: dict[str, int] = {}
        for span in self.spans:
            peaks[span.phase] = max(peaks.get(span.phase, 0), self.peak_in(span)[0])
        return peaks

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.levels, default=0)

    @property
    def host_bytes(self) -> int:
        """Most bytes of host memory alive at once, beside the device's."""
        return 0 if self.host is None else self.host.peak_bytes

    @property
    def peak_event(self) -> int:
        """The first event at which `peak_bytes` were alive."""
        levels = self.levels
        return max(range(len(levels)), key=levels.__getitem__, default=0)

    @property
    def peak_phase(self) -> str:
        """The phase that holds the peak."""
        return self.phase_at(self.peak_event)

    @property
    def peak_op(self) -> str:
        """The operation that reached the peak."""
        return self.op_at(self.peak_event)

    def op_at(self, event: int) -> str:
        """Name of the operation behind an event; empty where a storage died or there is no such event."""
        return (self._events[event].op or "") if event < len(self._events) else ""

    def seconds_at(self, event: int) -> float:
        """When an event happened, in seconds of the book's clock."""
        return self._events[event].seconds

    def split_at(self, event: int, label: str) -> dict[str, int]:
        """Bytes with one label alive after an event, by the phase they were born in."""
        sums: dict[str, int] = {}
        self.levels  # noqa: B018  reads the book, so that every record knows its phase
        for index in range(min(event + 1, len(self._events))):
            line = self._events[index]
            if line.record.label == label:
                sums[line.record.phase] = sums.get(line.record.phase, 0) + line.delta
        return {phase: nbytes for phase, nbytes in sums.items() if nbytes}

    def breakdown_at(self, event: int) -> dict[str, int]:
        """Bytes alive after an event, by label; labels with nothing alive are left out."""
        sums: dict[str, int] = {}
        for index in range(min(event + 1, len(self._events))):
            line = self._events[index]
            sums[line.record.label] = sums.get(line.record.label, 0) + line.delta
        return {label: nbytes for label, nbytes in sums.items() if nbytes}

    def replay(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """``(storage, its bytes from now on)`` for each event, before the first phase and from then on."""
        first = self._marks[0][0] if self._marks else 0
        sizes: dict[int, int] = {}
        lines: list[tuple[int, int]] = []
        for event in self._events[: len(self.levels)]:
            key = id(event.record)
            sizes[key] = sizes.get(key, 0) + event.delta
            lines.append((key, sizes[key]))
        return lines[:first], lines[first:]

    def curves(self, events: Iterable[int] | None = None) -> dict[str, list[int]]:
        """Bytes alive by label after each of ``events`` (ascending; None means every event)."""
        wanted = list(range(len(self.levels)) if events is None else events)
        labels = dict.fromkeys(record.label for record in self.records)
        sums, curves = dict.fromkeys(labels, 0), {label: [0] * len(wanted) for label in labels}
        index = 0
        for position, event in enumerate(wanted):
            while index <= event:
                line = self._events[index]
                sums[line.record.label] += line.delta
                index += 1
            for label, nbytes in sums.items():
                curves[label][position] = nbytes
        return curves

    def peak_of(self, label: str) -> int:
        """Most bytes alive at once with ``label``, whatever else was alive then."""
        return self._peak_of(label)[0]

    def peak_count_of(self, label: str) -> int:
        """Most storages alive at once with ``label``; empty storages do not count."""
        return self._peak_of(label)[1]

    def _peak_of(self, label: str) -> tuple[int, int]:
        nbytes = peak = peak_count = 0
        sizes: dict[int, int] = {}
        for index in range(len(self.levels)):
            line = self._events[index]
            if line.record.label != label or not line.delta:
                continue
            nbytes += line.delta
            key = id(line.record)
            sizes[key] = sizes.get(key, 0) + line.delta
            if not sizes[key]:
                del sizes[key]
            peak, peak_count = max(peak, nbytes), max(peak_count, len(sizes))
        return peak, peak_count
