"""Figures with a bar or a mark a mode: memory at the peak, step time, held-out loss gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.reporting.groups import Group, Row
from experiments.reporting.panels import looks_of, panels, save, short, unit_of
from experiments.reporting.paper import LOSS_GAP

_PARTS = (
    ("parameters", "parameters", "#34495e", ""),
    ("optimizer_state", "optimizer states", "#8fa3b5", ""),
    ("expert_gradients", "gradients of experts", "#d9480f", "////"),
    ("dense_gradients", "gradients of the rest", "#eef1f4", "...."),
    ("activations_and_other", "activations and other", "#ffe3a3", "\\\\"),
    ("untracked", "kernels' own and allocator", "#ffffff", "xx"),
)


def draw_memory(groups: list[Group], path: Path) -> Path | None:
    """Peak memory by mode, split into what holds it; None where no run was profiled."""
    shown = [(group, [row for row in group.rows if row.peak_bytes and row.split]) for group in groups]
    shown = [(group, rows) for group, rows in shown if rows]
    if not shown:
        return None
    figure, found = panels([group.title for group, _ in shown], [1.9 + 0.5 * len(rows) for _, rows in shown])
    handles: dict[str, Any] = {}
    for axes, (group, rows) in zip(found, shown, strict=True):
        top = max(row.peak_bytes or 0.0 for row in rows)
        unit, scale = unit_of(top)
        for place, row in enumerate(rows):
            left = 0.0
            for key, text, colour, hatch in _PARTS:
                width = row.split.get(key, 0.0) / scale
                if width > 0:
                    bar = axes.barh(
                        place, width, 0.62, left, color=colour, hatch=hatch, edgecolor="#333333", linewidth=0.6
                    )
                    handles.setdefault(text, bar)
                    left += width
            saved = ""
            if row.saved is not None and row.mode != group.base:
                saved = f"  ({-row.saved:+.1%})" if abs(row.saved) >= 0.0005 else "  (the same)"
            axes.text(left + 0.008 * top / scale, place, f" {left:,.4g} {unit}{saved}", va="center", fontsize=9)
        _modes(axes, rows)
        axes.set_xlim(0, 1.36 * top / scale)
        axes.set_xlabel(f"memory alive at the step's peak ({unit}, 1 {unit} = {scale:,.0f} bytes)")
    ordered = {text: handles[text] for _, text, _, _ in _PARTS if text in handles}
    figure.legend(list(ordered.values()), list(ordered), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Where the memory goes: peak by mode")
    return save(figure, path)


def draw_step_times(groups: list[Group], path: Path) -> Path | None:
    """Median step time by mode with the 10th to 90th percentile; None where nothing was timed."""
    shown = [(group, [row for row in group.rows if row.step_ms]) for group in groups]
    shown = [(group, rows) for group, rows in shown if rows]
    if not shown:
        return None
    figure, found = panels([group.title for group, _ in shown], [1.5 + 0.5 * len(rows) for _, rows in shown])
    for axes, (group, rows) in zip(found, shown, strict=True):
        end = max(row.step_ms.high for row in rows if row.step_ms)
        for place, row in enumerate(rows):
            step = row.step_ms
            if step is None:
                continue
            axes.barh(place, step.middle, 0.62, color="#c5ced6", edgecolor="#333333", linewidth=0.6)
            axes.errorbar(
                step.middle, place, xerr=[[step.middle - step.low], [step.high - step.middle]], color="black",
                capsize=4, linewidth=1.4,
            )  # fmt: skip
            ratio = f" ({row.time_ratio:.2f} x)" if row.time_ratio and row.mode != group.base else ""
            axes.text(step.high + 0.015 * end, place, f" {step.middle:,.4g} ms{ratio}", va="center", fontsize=9)
        _modes(axes, rows)
        axes.set_xlim(0, 1.36 * end)
        what = f"\nin brackets: as a multiple of {group.base}'s" if group.base else ""
        axes.set_xlabel(f"time of a step (ms): median, whiskers from 10th to 90th percentile{what}")
    figure.suptitle("Step time by mode")
    return save(figure, path)


def draw_loss_gaps(groups: list[Group], path: Path) -> Path | None:
    """Held-out loss less the compared mode's, a mark a seed; None where there is nothing to compare."""
    shown = [(group, [row for row in group.rows if row.gap and row.mode != group.base]) for group in groups]
    shown = [(group, rows) for group, rows in shown if rows]
    if not shown:
        return None
    figure, found = panels([group.title for group, _ in shown], [1.9 + 0.5 * len(rows) for _, rows in shown])
    for axes, (group, rows) in zip(found, shown, strict=True):
        reach = max(LOSS_GAP, *(abs(gap) for row in rows for gap in row.gaps.values()))
        axes.axvspan(-LOSS_GAP, LOSS_GAP, color="black", alpha=0.08, linewidth=0)
        for side in (-LOSS_GAP, LOSS_GAP):
            axes.axvline(side, color="black", linewidth=1, linestyle="--")
        axes.axvline(0, color="black", linewidth=1)
        for place, (row, look) in enumerate(zip(rows, looks_of([row.mode for row in rows]), strict=True)):
            gap = row.gap
            if gap is None:
                continue
            if gap.count > 1:
                axes.plot([gap.low, gap.high], [place, place], color=look["color"], linewidth=2, zorder=2)
            axes.plot(
                list(row.gaps.values()), [place] * len(row.gaps), linestyle="", marker="|", markersize=13,
                markeredgewidth=1.4, color=look["color"], zorder=3,
            )  # fmt: skip
            axes.plot([gap.middle], [place], marker=look["marker"], markersize=8, color=look["color"], zorder=4)
            axes.annotate(
                f"{gap.middle:+z.4f}", (gap.middle, place), (0, 9), textcoords="offset points", ha="center", fontsize=9,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
            )  # fmt: skip
        _modes(axes, rows)
        axes.set_xlim(-1.2 * reach, 1.2 * reach)
        axes.set_ylim(len(rows) - 0.4, -0.8)
        seeds = sorted({row.gap.count for row in rows if row.gap})
        count = " to ".join(str(seeds[end]) for end in ((0, -1) if len(seeds) > 1 else (0,)))
        spread = f"mean of {count} seeds, lowest to highest" if seeds[-1] > 1 else "one seed"
        axes.set_xlabel(
            f"held-out loss less {group.base}'s (nats a token), left is better\n"
            f"{spread}\ndashed: the paper's {LOSS_GAP} either way",
        )
    figure.suptitle("What the mode costs in held-out loss")
    return save(figure, path)


def _modes(axes: Any, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [short(row.mode).replace(", ", "\n") for row in rows])
    # The table's order from the top down.
    axes.set_ylim(len(rows) - 0.5, -0.5)
