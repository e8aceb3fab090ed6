"""What one profiled training step says about memory: plain figures, ready for JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_sonar.memory.ledger import OTHER, Ledger

PARAMETERS = "parameters"
OPTIMIZER_STATE = "optimizer_state"
EXPERT_GRADIENTS = "expert_gradients"
DENSE_GRADIENTS = "dense_gradients"
ACTIVATIONS = "activations_and_other"
UNTRACKED = "untracked"

LABELS = (PARAMETERS, OPTIMIZER_STATE, EXPERT_GRADIENTS, DENSE_GRADIENTS, ACTIVATIONS)

TRACKER = "storage tracker"
CUDA_ALLOCATOR = "cuda caching allocator"

MAX_POINTS = 2_000

MAX_GAP = 0.05
"""A prediction that is further off than this share of itself is worth a warning."""


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one training step, in bytes.

    Attributes:
        peak_bytes: most bytes allocated at once during the step.
        peak_phase: the phase that holds the peak: ``forward``, ``backward``, ``clip``, ``step`` or ``done``
            (after the step, until the batch ends).
        peak_op: the operation that reached the peak, such as ``aten.mm.default``. On CUDA it is the one at
            the peak of the tracked storages in that phase.
        peak_per_phase: the same peak for each phase; what is alive when a phase begins counts in it.
        split: bytes at the peak by what they hold: ``parameters``, ``optimizer_state``,
            ``expert_gradients``, ``dense_gradients``, ``activations_and_other``. Sums to the peak. On CUDA
            ``untracked`` is what the allocator counts beyond the storages, such as kernel workspaces.
        peak_expert_gradient_bytes: most bytes of expert gradients alive at once, at any moment of the step.
        peak_expert_gradients: of how many expert tensors the gradient was alive at once.
        hooks_per_step: gradient hooks that stepped a tensor inside backward; 0 where there are none.
        timeline: ``time_ms``, ``event`` and ``live_bytes`` (equally long, at most 2,000 points, the peaks
            kept), ``by_label`` with one such list a label, ``phases`` with name, begin, end and peak, and
            ``peak_index``, the peak's place in the lists. Watching slows the step, so the times show order
            and proportion, not speed.
        device: the device measured, such as ``cpu`` or ``cuda:0``.
        source: where the peaks come from: ``storage tracker`` or ``cuda caching allocator``.
        step_time_ms: ``median``, ``p10``, ``p90`` (milliseconds, None without any) and ``n``, over the steps
            that were not profiled, warm-up left out as long as other steps were timed.
        profiled_step: which optimizer step the figures are of (0 is the first of this fit): the one with
            the highest peak among those profiled.
        profiled_steps: how many steps were profiled.
        warmup_steps: how many steps came before the first of them.
        notes: what a reader should know about these figures.
        peak_bytes_per_rank: ``peak_bytes`` of each rank, None for one without a report; None with one rank only.
            All other figures are of the rank that holds the report.
        peak_expert_gradient_bytes_per_rank: the same of ``peak_expert_gradient_bytes``.
        predicted_peak_bytes: what was predicted before the run, if anything was.
        prediction_gap: ``(peak_bytes - predicted_peak_bytes) / predicted_peak_bytes``.
        host_bytes: most bytes alive at once in host memory that training keeps beside the device's: summed gradients
            and optimizer states. In no other figure.
    """

    peak_bytes: int
    peak_phase: str
    peak_op: str
    peak_per_phase: dict[str, int]
    split: dict[str, int]
    peak_expert_gradient_bytes: int
    peak_expert_gradients: int
    hooks_per_step: int
    timeline: dict[str, Any]
    device: str
    source: str
    step_time_ms: dict[str, float | int | None] = field(default_factory=dict)
    profiled_step: int = 0
    profiled_steps: int = 1
    warmup_steps: int = 0
    notes: list[str] = field(default_factory=list)
    peak_bytes_per_rank: list[int | None] | None = None
    peak_expert_gradient_bytes_per_rank: list[int | None] | None = None
    predicted_peak_bytes: int | None = None
    prediction_gap: float | None = None
    host_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists and numbers."""
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON; the file appears whole or not at all."""
        write_json(Path(path), self.to_dict())


def report_of(
    ledger: Ledger,
    *,
    device: str,
    hooks: int = 0,
    allocator_peaks: Mapping[str, int] | None = None,
    step: int = 0,
    notes: list[str] | None = None,
) -> MemoryReport:
    """The report of one step from the book of its storages.

    Args:
        ledger: the book, phases marked, labels given.
        device: the device measured.
        hooks: hooks that acted in the step.
        allocator_peaks: peak bytes by phase as the CUDA caching allocator counted them; None takes the peaks
            from the book.
        step: index of the step.
        notes: goes into the report as it is.
    """
    per_phase = dict(allocator_peaks) if allocator_peaks else ledger.peak_per_phase
    phase = max(per_phase, key=per_phase.__getitem__, default="")
    if allocator_peaks:
        within = [ledger.peak_in(span) for span in ledger.spans if span.phase == phase]
        tracked, event = max(within, key=lambda peak: peak[0], default=(0, 0))
        peak = per_phase[phase]
    else:
        tracked, event = ledger.peak_bytes, ledger.peak_event
        peak, phase = tracked, ledger.peak_phase
    at_peak = ledger.breakdown_at(event)
    split = {name: at_peak.get(_ledger_label(name), 0) for name in LABELS}
    if allocator_peaks:
        split[UNTRACKED] = peak - tracked
    return MemoryReport(
        peak_bytes=peak,
        peak_phase=phase,
        peak_op=ledger.op_at(event),
        peak_per_phase=per_phase,
        split=split,
        peak_expert_gradient_bytes=ledger.peak_of(EXPERT_GRADIENTS),
        peak_expert_gradients=ledger.peak_count_of(EXPERT_GRADIENTS),
        hooks_per_step=hooks,
        timeline=_timeline(ledger, event),
        device=device,
        source=CUDA_ALLOCATOR if allocator_peaks else TRACKER,
        profiled_step=step,
        host_bytes=ledger.host_bytes,
        notes=list(notes or ()),
    )


def prediction_gap(measured: int, predicted: int | None, notes: list[str]) -> float | None:
    """``(measured - predicted) / predicted``; beyond `MAX_GAP` it warns on rank 0 and adds a note. Bytes."""
    if predicted is None:
        return None
    gap = (measured - predicted) / predicted
    if abs(gap) > MAX_GAP:
        note = f"The measured peak is {size_text(measured)}, {gap:+.1%} off the predicted {size_text(predicted)}."
        notes.append(note)
        rank_zero_warn(f"{note} Other runs of this kind may be predicted as wrongly.")
    return gap


def size_text(nbytes: int) -> str:
    """Bytes for a reader: ``12.35 GB``, ``430.1 MB``, ``2.0 kB``; powers of ten."""
    for unit, digits, factor in (("GB", 2, 1e9), ("MB", 1, 1e6), ("kB", 1, 1e3)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.{digits}f} {unit}"
    return f"{nbytes} bytes"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write plain figures as JSON; the file appears whole or not at all."""
    text = json.dumps(value, indent=1)
    write_atomically(path, lambda target: target.write_text(text + "\n", encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in place in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        # mkstemp makes files that only the owner may read; a report is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _ledger_label(name: str) -> str:
    return OTHER if name == ACTIVATIONS else name


def _timeline(ledger: Ledger, peak_event: int) -> dict[str, Any]:
    events = _thinned(ledger, peak_event)
    levels, curves = ledger.levels, ledger.curves(events)
    spans = ledger.spans
    zero = spans[0].start_seconds

    def milliseconds(seconds: float) -> float:
        # What was tracked before the first phase began is the opening level of that phase.
        return round(max(0.0, seconds - zero) * 1e3, 4)

    return {
        "time_ms": [milliseconds(ledger.seconds_at(event)) for event in events],
        "event": events,
        "live_bytes": [levels[event] for event in events],
        "by_label": {name: curves.get(_ledger_label(name), [0] * len(events)) for name in LABELS},
        "phases": [
            {
                "phase": span.phase,
                "start_ms": milliseconds(span.start_seconds),
                "end_ms": milliseconds(span.end_seconds),
                "peak_bytes": ledger.peak_in(span)[0],
            }
            for span in spans
        ],
        "peak_index": events.index(peak_event) if peak_event in events else 0,
    }


def _thinned(ledger: Ledger, peak_event: int) -> list[int]:
    """At most about `MAX_POINTS` events: each stretch keeps its lowest and highest, peaks and bounds stay."""
    levels, first = ledger.levels, ledger.first_event
    everything = range(first, len(levels))
    if len(everything) <= MAX_POINTS:
        return list(everything)
    keep = {first, len(levels) - 1, peak_event}
    for span in ledger.spans[:50]:
        keep.update((min(max(first, span.start - 1), len(levels) - 1), ledger.peak_in(span)[1]))
    width = -(-2 * len(everything) // (MAX_POINTS - len(keep)))
    for start in range(first, len(levels), width):
        stretch = range(start, min(start + width, len(levels)))
        keep.update((min(stretch, key=levels.__getitem__), max(stretch, key=levels.__getitem__)))
    return sorted(event for event in keep if event >= first)
