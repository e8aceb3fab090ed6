"""How long training steps take, without making the device wait for the measurement."""

from __future__ import annotations

import statistics
import time
from array import array

import torch

Part = float | tuple[torch.cuda.Event, torch.cuda.Event]


class StepTimes:
    """Collects the time of each optimizer step, one or several batches long, in milliseconds.

    On CUDA the time lies between two events on the current stream, which are read when the device has
    passed them or when the summary is made; elsewhere it is wall time.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: float | torch.cuda.Event | None = None
        self._parts: list[Part] = []
        self._waiting: list[tuple[int, list[Part]]] = []
        # 16 bytes a step, for as long as the training takes.
        self._steps = array("q")
        self._elapsed = array("d")

    def begin(self) -> None:
        """A batch begins."""
        self._started = self._now()

    def end(self) -> None:
        """A batch ended."""
        started, now = self._started, self._now()
        if isinstance(started, float) and isinstance(now, float):
            self._parts.append((now - started) * 1e3)
        elif isinstance(started, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self._parts.append((started, now))
        self._started = None

    def step_ended(self, step: int) -> None:
        """The batches since the last call were optimizer step ``step``."""
        if self._parts:
            self._waiting.append((step, self._parts))
            self._parts = []
        self._collect(wait=False)

    def summary(self, warmup: int) -> tuple[dict[str, float | int | None], bool]:
        """Median, tenth and ninetieth percentile in ms and their number, over steps from ``warmup`` on.

        Returns the figures and whether they leave the warm-up out. If nothing was timed after it, they are of
        the warm-up steps instead, without the first where there are several.
        """
        self._collect(wait=True)
        times = [elapsed for step, elapsed in zip(self._steps, self._elapsed, strict=True) if step >= warmup]
        warm = bool(times)
        if not warm:
            earlier = self._elapsed.tolist()
            times = earlier[1:] or earlier
        if not times:
            return {"median": None, "p10": None, "p90": None, "n": 0}, warm
        tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
        return {
            "median": statistics.median(times),
            "p10": tenths[0],
            "p90": tenths[-1],
            "n": len(times),
        }, warm

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _collect(self, wait: bool) -> None:
        """Turn finished events into milliseconds, so that a long training holds few events."""
        while self._waiting:
            step, parts = self._waiting[0]
            elapsed = 0.0
            for part in parts:
                if not isinstance(part, tuple):
                    elapsed += part
                    continue
                if wait:
                    part[1].synchronize()
                elif not part[1].query():
                    return
                elapsed += part[0].elapsed_time(part[1])
            self._steps.append(step)
            self._elapsed.append(elapsed)
            del self._waiting[0]
