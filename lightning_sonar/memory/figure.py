"""The picture of a memory report: live memory over one training step, stacked by what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sonar.memory.report import (
    ACTIVATIONS,
    DENSE_GRADIENTS,
    EXPERT_GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    MemoryReport,
)

# From the bottom up, what stays the same lies below what moves. Grey tones differ as much as colours do and
# every other area is hatched, so the figure survives a black-and-white printer.
_AREAS = (
    (PARAMETERS, "parameters", "#34495e", ""),
    (OPTIMIZER_STATE, "optimizer state", "#8fa3b5", ""),
    (DENSE_GRADIENTS, "dense gradients", "#d9dee3", "...."),
    (EXPERT_GRADIENTS, "expert gradients", "#d9480f", "////"),
    (ACTIVATIONS, "activations and other", "#ffe3a3", ""),
)


def draw_memory(report: MemoryReport | Mapping[str, Any], path: str | Path, title: str | None = None) -> None:
    """Draw live memory over a step as a PNG.

    Args:
        report: a report, or what its ``to_dict`` or ``memory.json`` holds.
        path: the file to write; its ending decides the format.
        title: a line above the figure; None says which step it is and on which device.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = report.to_dict() if isinstance(report, MemoryReport) else dict(report)
    timeline = data["timeline"]
    phases = timeline["phases"]
    end = phases[-1]["end_ms"]
    times = [*timeline["time_ms"], end]
    unit, scale = ("GB", 1e9) if data["peak_bytes"] >= 1e9 else ("MB", 1e6)

    figure = Figure(figsize=(10, 5.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()

    bottom = [0.0] * len(times)
    for name, text, colour, hatch in _AREAS:
        values = timeline["by_label"].get(name, [])
        if not any(values):
            continue
        held = [value / scale for value in values]
        held.append(held[-1])
        top = [low + value for low, value in zip(bottom, held, strict=True)]
        # A level holds until the next allocation, so the areas are steps, not slopes.
        axes.fill_between(
            times, bottom, top, step="post", facecolor=colour, hatch=hatch, edgecolor="#555555",
            linewidth=0.0, label=text,
        )  # fmt: skip
        axes.step(times, top, where="post", color="#222222", linewidth=0.5)
        bottom = top
    live = [value / scale for value in timeline["live_bytes"]]
    axes.step(times, [*live, live[-1]], where="post", color="black", linewidth=1.2)

    peak_x = timeline["time_ms"][timeline["peak_index"]]
    peak_y = live[timeline["peak_index"]]
    ceiling = max(live) * 1.3
    _draw_phases(axes, phases, end)
    _draw_peak(axes, data, peak_x, peak_y, ceiling, end, f"{data['peak_bytes'] / scale:,.4g} {unit}")

    axes.set_xlim(0, end or 1)
    axes.set_ylim(0, ceiling)
    axes.set_xlabel("time within the watched step (ms; the measurement itself slows it down)")
    axes.set_ylabel(f"live memory ({unit}, 1 {unit} = {scale:,.0f} bytes)")
    axes.set_title(title or f"Live memory over one training step ({data['device']}, {data['source']})", pad=22)
    handles, labels = axes.get_legend_handles_labels()
    # Listed as they lie on top of each other.
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    figure.savefig(path)


def draw_plans(plans: Mapping[str, Mapping[str, list[float]]], path: str | Path, title: str) -> None:
    """Draw live memory over a planned step, one line a plan.

    Args:
        plans: the curves of `MemoryPlan`, by what the legend calls them; at most six.
        path: the file to write; its ending decides the format.
        title: a line above the figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # Backward is where the lines part, so it gets the most room; each phase has the same width in every plan.
    edges = (0.0, 1.0, 3.6, 3.9, 4.6)
    top = 0.0
    for (name, curve), (style, shade, marker) in zip(plans.items(), _LINES, strict=False):
        places = []
        for position in curve["position"]:
            phase = min(int(position), len(edges) - 2)
            places.append(edges[phase] + (position - phase) * (edges[phase + 1] - edges[phase]))
        live = [value / 1e9 for value in curve["live_bytes"]]
        places.append(edges[-1])
        live.append(live[-1])
        peak = max(live)
        top = max(top, peak)
        axes.step(places, live, where="post", linestyle=style, color=shade, linewidth=1.6)
        axes.plot([places[live.index(peak)]], [peak], marker=marker, color=shade, markersize=6)
        # A handle of its own, so that the legend shows dashes and mark without drawing a mark at each allocation.
        axes.plot([], [], linestyle=style, marker=marker, color=shade, linewidth=1.6, label=f"{name}: {peak:,.2f} GB")
    for start, end, phase in zip(edges, edges[1:], ("forward", "backward", "clip", "step, then free"), strict=False):
        axes.axvline(start, color="black", linewidth=0.6, linestyle=(0, (4, 3)))
        axes.text((start + end) / 2, 1.01, phase, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, top * 1.12)
    axes.set_xticks([])
    axes.set_xlabel("order of allocations within each phase (not time)")
    axes.set_ylabel("live memory, predicted (GB, 1 GB = 1,000,000,000 bytes)")
    axes.set_title(title, pad=20)
    axes.legend(loc="lower right", title="peak (marked)", handlelength=3.2)
    figure.savefig(path)


# Lines differ in dashes and mark, not only in colour.
_LINES = (
    ((0, (5, 2)), "#111111", "s"),
    ("-", "#d9480f", "o"),
    ("-.", "#1f6fb2", "^"),
    (":", "#555555", "D"),
    ((0, (6, 2, 1, 2, 1, 2)), "#2b8a3e", "v"),
    ((0, (1, 1)), "#862e9c", "x"),
)


def _draw_phases(axes: Any, phases: list[dict[str, Any]], end: float) -> None:
    """A line where each phase begins and its name above the axes, as far as there is room."""
    free_from = -1.0
    for index, phase in enumerate(phases):
        start, stop = phase["start_ms"], phase["end_ms"]
        if index % 2:
            axes.axvspan(start, stop, color="black", alpha=0.06, linewidth=0, zorder=0)
        if index:
            axes.axvline(start, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        # A letter is about seven thousandths of the axes wide. A name that would touch the one before it
        # moves right; one that would end up far from its phase is left out, as is a rest too thin to see.
        half = 0.0035 * len(phase["phase"]) + 0.008
        middle = (start + stop) / 2 / (end or 1)
        place = max(middle, free_from + half)
        if place - middle > 0.05 or (phase["phase"] == "done" and stop - start < 0.03 * end):
            continue
        axes.annotate(
            phase["phase"],
            xy=(place, 1.0),
            xycoords="axes fraction",
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
        )
        free_from = place + half


def _draw_peak(axes: Any, data: Mapping[str, Any], x: float, y: float, ceiling: float, end: float, size: str) -> None:
    right = x > 0.55 * (end or 1)
    axes.plot([x], [y], marker="o", color="black", markersize=6, zorder=5)
    axes.annotate(
        f"peak {size} in {data['peak_phase']}\n{data['peak_op']}",
        xy=(x, y),
        xytext=(x + (-0.04 if right else 0.04) * (end or 1), (y + ceiling) / 2 + 0.02 * ceiling),
        ha="right" if right else "left",
        va="center",
        fontsize=10,
        arrowprops={"arrowstyle": "->", "color": "black"},
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "black", "linewidth": 0.8},
        zorder=6,
    )
