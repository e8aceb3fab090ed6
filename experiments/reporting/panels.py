"""What all figures of a report share: panels side by side, and marks that survive a black-and-white printer."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sonar.modes import MODES

WIDTH = 7.2
"""Width of one panel in inches."""

# Each mode differs from the others in its dashes and its marker, not only in its colour.
_LOOKS: tuple[tuple[str, Any, str], ...] = (
    ("#111111", "-", "o"),
    ("#5f6b76", "--", "s"),
    ("#1f6fb2", "-.", "^"),
    ("#d9480f", "-", "D"),
    ("#862e9c", ":", "v"),
    ("#2b8a3e", (0, (6, 1, 1, 1, 1, 1)), "P"),
    ("#8a5a00", (0, (1, 1)), "X"),
    ("#c2255c", (0, (8, 3)), "*"),
    ("#0b7285", (0, (3, 2, 1, 2)), "<"),
    ("#a61e4d", (0, (5, 1)), ">"),
    ("#364fc7", (0, (1, 3)), "p"),
    ("#5c940d", (0, (9, 2, 2, 2)), "h"),
)


def looks_of(modes: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, dashes and marker of each mode of a panel; those that have no name of their own take what is left."""
    names = list(MODES)
    others = [mode for mode in modes if mode not in names]
    looks = []
    for mode in modes:
        place = names.index(mode) if mode in names else len(names) + others.index(mode)
        colour, dashes, marker = _LOOKS[place % len(_LOOKS)]
        looks.append({"color": colour, "linestyle": dashes, "marker": marker})
    return looks


def unit_of(nbytes: float) -> tuple[str, float]:
    """The unit in which a figure shows bytes, and how many bytes it is."""
    return ("GB", 1e9) if nbytes >= 1e9 else ("MB", 1e6)


def panels(titles: list[str], heights: list[float]) -> tuple[Any, list[Any]]:
    """A figure with one panel a title, two side by side where there are several.

    Args:
        titles: what stands above each panel.
        heights: inches of each panel; a row takes the highest of its panels.

    Returns:
        The figure and its axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(2, len(titles))
    rows = [max(heights[start : start + across]) for start in range(0, len(titles), across)]
    figure = Figure(figsize=(WIDTH * across, sum(rows)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(rows), across, height_ratios=rows)
    found = []
    for index, title in enumerate(titles):
        axes = figure.add_subplot(grid[index // across, index % across])
        axes.set_title(textwrap.fill(short(title, 280), 70), fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        found.append(axes)
    return figure, found


def save(figure: Any, path: Path) -> Path:
    """Write the figure; returns its path."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names may hold a dollar sign
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # A box stands for a character that the font has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path)
    return path


def short(text: str, most: int = 60) -> str:
    """Text of at most so many characters, for which a figure has room."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
