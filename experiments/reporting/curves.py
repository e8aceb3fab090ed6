"""Figures over time: live memory over one step, training loss over steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.reporting.groups import Group, Row
from experiments.reporting.panels import looks_of, panels, save, short, unit_of
from experiments.reporting.runs import Run

_LEAST_WIDTH = 0.07
"""Share of a panel that the shortest phase gets, so that its name can be read."""


def draw_live_memory(groups: list[Group], path: Path) -> Path | None:
    """Live memory over one step, the compared mode against ``sonar``, phase by phase; None without such a pair."""
    shown = [(group, pair) for group in groups if (pair := _pair(group))]
    if not shown:
        return None
    figure, found = panels([group.title for group, _ in shown], [4.2] * len(shown))
    for axes, (_, pair) in zip(found, shown, strict=True):
        timelines = {mode: memory["timeline"] for mode, memory in pair.items()}
        edges = _edges([timeline["phases"] for timeline in timelines.values()])
        top = max(max(timeline["live_bytes"]) for timeline in timelines.values())
        unit, scale = unit_of(top)
        floor = min(min(timeline["live_bytes"]) for timeline in timelines.values()) / scale
        for (mode, timeline), look in zip(timelines.items(), looks_of(list(timelines)), strict=True):
            places = [*_places(timeline, edges), edges[-1]]
            live = [value / scale for value in timeline["live_bytes"]]
            live.append(live[-1])
            peak = timeline["peak_index"]
            axes.step(
                places, live, where="post", color=look["color"], linestyle="-" if mode == "sonar" else "--",
                linewidth=1.6, label=f"{mode}: peak {max(live):,.4g} {unit}",
            )  # fmt: skip
            axes.plot([places[peak]], [live[peak]], marker=look["marker"], color=look["color"], markersize=8)
        phases = next(iter(timelines.values()))["phases"]
        for index, (start, end) in enumerate(pairwise(edges)):
            if index:
                axes.axvline(start, color="#777777", linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
            name = short(str({"done": "after"}.get(phases[index]["phase"], phases[index]["phase"])), 20)
            axes.text((start + end) / 2, 0.985, name, transform=axes.get_xaxis_transform(), ha="center", va="top")
        axes.set_xlim(0, 1)
        # What stays the same over the step would press the difference against the top.
        low = floor - 0.35 * (top / scale - floor)
        axes.set_ylim(max(0.0, low), top / scale + 0.2 * (top / scale - max(0.0, low)))
        axes.set_xticks([])
        axes.set_xlabel("one step; each phase has the same width for both, time runs evenly within it")
        axes.set_ylabel(f"live memory ({unit}; the axis starts at {max(0.0, low):,.3g}, not 0)")
        axes.legend(loc="lower center", frameon=True, fontsize=9)
    figure.suptitle("Live memory over one training step (marks: peaks)")
    return save(figure, path)


def _pair(group: Group) -> dict[str, dict[str, Any]]:
    """Memory reports of the compared mode and of ``sonar``, if their phases follow one another in the same order."""
    pair = {}
    for mode in (group.base or "", "sonar"):
        row = group.row(mode)
        memory = next((run.memory for run in row.runs if run.memory), None) if row else None
        if memory is None:
            return {}
        pair[mode] = memory
    orders = [[phase["phase"] for phase in memory["timeline"]["phases"]] for memory in pair.values()]
    return pair if orders[0] == orders[1] else {}


def _edges(steps: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Where each phase begins, and the end, as shares of the width: as their times are on average, none too narrow."""
    shares = []
    for phases in zip(*steps, strict=True):
        ends = [step[-1]["end_ms"] or 1.0 for step in steps]
        lengths = [(phase["end_ms"] - phase["start_ms"]) / end for phase, end in zip(phases, ends, strict=True)]
        shares.append(max(_LEAST_WIDTH, statistics.fmean(lengths)))
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share / sum(shares))
    return edges


def _places(timeline: dict[str, Any], edges: list[float]) -> list[float]:
    """Times of a step's events as shares of the width."""
    phases, index, places = timeline["phases"], 0, []
    for time in timeline["time_ms"]:
        while index < len(phases) - 1 and time >= phases[index]["end_ms"]:
            index += 1
        length = phases[index]["end_ms"] - phases[index]["start_ms"]
        within = min(1.0, (time - phases[index]["start_ms"]) / length) if length else 0.0
        places.append(edges[index] + within * (edges[index + 1] - edges[index]))
    return places


def draw_losses(groups: list[Group], path: Path) -> Path | None:
    """Training loss over steps, the mean over seeds and a band between lowest and highest; None without curves."""
    shown = [(group, curves) for group in groups if (curves := _curves(group.rows))]
    if not shown:
        return None
    figure, found = panels([group.title for group, _ in shown], [4.4] * len(shown))
    for axes, (_, curves) in zip(found, shown, strict=True):
        looks = looks_of([names[0] for names, _ in curves])
        for index, ((names, curve), look) in enumerate(zip(curves, looks, strict=True)):
            every = max(1, len(curve.places) // 8)
            axes.plot(
                curve.places, curve.middle, **look, linewidth=1.6, markersize=6,
                # Markers of curves that lie on each other stand at different places.
                markevery=(min(index, every - 1) * every // max(1, len(curves)), every),
                label=" = ".join(map(short, names)) + curve.of,
            )  # fmt: skip
            if curve.of:
                axes.fill_between(curve.places, curve.low, curve.high, color=look["color"], alpha=0.15, linewidth=0)
        curve = curves[0][1]
        axes.set_xlabel(f"training {curve.unit}")
        mean = f", mean of {curve.window} {curve.unit}{'es' if curve.unit == 'batch' else 's'}"
        axes.set_ylabel("training loss (nats a token" + (mean if curve.window > 1 else "") + ")")
        axes.legend(fontsize=8, frameon=False)
    equal = any(len(names) > 1 for _, curves in shown for names, _ in curves)
    figure.suptitle("Training loss" + ("   (modes joined by = have the very same losses)" if equal else ""))
    return save(figure, path)


class _Curve:
    """Losses of one mode over its runs, smoothed, at the places that all of them have.

    Attributes:
        of: of how many seeds or runs it is the mean, in words; empty for one.
    """

    def __init__(self, runs: list[Run]) -> None:
        # A resumed run begins later than the others, one with a bad batch has a gap.
        longest = max((run.losses for run in runs), key=lambda losses: len(losses[1]))
        self.unit = longest[0]
        shared, taken_runs = set(longest[1]), []
        for run in runs:
            unit, places, _ = run.losses
            if unit == self.unit and shared & set(places):
                shared &= set(places)
                taken_runs.append(run)
        by_place = [dict(zip(*run.losses[1:], strict=True)) for run in taken_runs]
        places = sorted(shared)
        rows = [[losses[place] for place in places] for losses in by_place]
        seeds = {str(run.result.get("seed")) for run in taken_runs}
        what = "seeds" if len(seeds) == len(rows) else "runs"
        self.of = f" ({len(rows)} {what})" if len(rows) > 1 else ""
        points = len(places)
        stride = places[1] - places[0] if points > 1 else 1
        # A batch is small and its loss noisy: a fifteenth of the run is averaged.
        taken = max(1, points // 15)
        self.window = taken * stride
        smooth = [[statistics.fmean(losses[i : i + taken]) for i in range(points - taken + 1)] for losses in rows]
        self.places = places[taken - 1 :]
        self.middle = [statistics.fmean(values) for values in zip(*smooth, strict=True)]
        self.low = [min(values) for values in zip(*smooth, strict=True)]
        self.high = [max(values) for values in zip(*smooth, strict=True)]


def _curves(rows: Sequence[Row]) -> list[tuple[list[str], _Curve]]:
    """Names of modes and their curve; modes with equal losses share one."""
    found: list[tuple[list[str], list[Run]]] = []
    for row in rows:
        runs = [run for run in sorted(row.runs, key=lambda run: str(run.result.get("seed"))) if run.losses[2]]
        if not runs:
            continue
        curves = [run.losses for run in runs]
        equal = next((names for names, other in found if [run.losses for run in other] == curves), None)
        if equal is None:
            found.append(([row.mode], runs))
        else:
            equal.append(row.mode)
    return [(names, _Curve(runs)) for names, runs in found]
