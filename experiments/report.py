"""Read run folders and report on them: tables in the columns of the paper's, figures, and a page that opens offline.

python experiments/report.py multirun/2026-11-30_12-00-00
python experiments/report.py outputs multirun --out report
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.reporting import page
from experiments.reporting.bars import draw_loss_gaps, draw_memory, draw_step_times
from experiments.reporting.curves import draw_live_memory, draw_losses
from experiments.reporting.groups import Group, group_runs
from experiments.reporting.runs import Failure, Run, printable, read_runs
from experiments.reporting.tables import escaped, legend_of, machine_of, markdown, markdown_of, table_of, write_csv
from experiments.status import write_text

Draw = Callable[[list[Group], Path], Path | None]

FIGURES: tuple[tuple[str, Draw, str], ...] = (
    ("memory", draw_memory, "Memory alive at the peak of a step, by mode and by what holds it."),
    ("live_memory", draw_live_memory, "Live memory over one step, phase by phase."),
    ("step_time", draw_step_times, "Time of a training step by mode."),
    ("losses", draw_losses, "Training loss by mode."),
    ("loss_gap", draw_loss_gaps, "Held-out loss against the compared mode's; the dashed lines are the paper's 0.003."),
)
"""File name, what draws it, and what it shows."""

MOST_PANELS = 12
"""Settings that a figure shows; a search over many values has hundreds, which would be neither read nor drawn."""

NUMBERS = ("peak", "paper", "ms", "held-out", "saved", "time", "loss", "expert-grad")


def report(folders: list[Path], out: Path) -> list[Group]:
    """Print the tables, and write ``report.md``, ``report.csv``, ``report.html`` and ``figures/`` into ``out``.

    Args:
        folders: run folders, or folders of runs.
        out: where the report goes.

    Returns:
        The settings that have results.

    Raises:
        FileNotFoundError: if one of ``folders`` is not a folder.
    """
    runs, failures = read_runs(folders)
    groups = group_runs(runs)
    out.mkdir(parents=True, exist_ok=True)
    pictures = _draw(groups, out / "figures")
    write_text(out / "report.md", _markdown(groups, runs, failures, pictures, out))
    write_text(out / "report.html", _html(groups, runs, failures, pictures, out))
    write_csv(out / "report.csv", groups, failures)
    _show(groups, runs, failures, out, bool(pictures))
    return groups


def _draw(groups: list[Group], folder: Path) -> list[tuple[Path, str]]:
    """Files and captions of the figures that these runs have data for; one of an earlier report goes."""
    pictures = []
    left_out = len(groups) - MOST_PANELS
    only = f" Only the first {MOST_PANELS} of {len(groups)} settings are shown." if left_out > 0 else ""
    for name, draw, caption in FIGURES:
        path, part = folder / f"{name}.png", folder / f".{name}.part.png"
        try:
            if draw(groups[:MOST_PANELS], part) is None:
                path.unlink(missing_ok=True)
            else:
                part.replace(path)
                pictures.append((path, caption + only))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
    return pictures


def _title(runs: list[Run], failures: list[Failure]) -> str:
    bad = f", {len(failures)} without a result" if failures else ""
    return f"Sonar-MoE: {len(runs)} run{'s' if len(runs) != 1 else ''}{bad}"


def _failure_rows(failures: list[Failure], out: Path) -> list[list[str]]:
    return [
        [
            "" if failure.exit_code is None else str(failure.exit_code),
            failure.reason,
            failure.settings,
            _relative(failure.folder, out),
        ]
        for failure in failures
    ]


def _relative(folder: Path, out: Path) -> str:
    try:
        return printable(str(folder.absolute().relative_to(out.absolute())))
    except ValueError:
        return printable(str(folder))


FAILURE_HEAD = ["exit code", "why", "command line", "folder"]


def _markdown(
    groups: list[Group], runs: list[Run], failures: list[Failure], pictures: list[tuple[Path, str]], out: Path
) -> str:
    parts = [f"# {_title(runs, failures)}"]
    for group in groups:
        parts += [f"## {escaped(group.title)}", markdown_of(group)]
        parts += ["\n".join(f"- {escaped(note)}" for note in group.notes)] if group.notes else []
    if groups:
        parts += ["\n".join(f"- {escaped(line)}" for line in legend_of(groups))]
    if failures:
        parts += ["## Runs without a result", markdown(FAILURE_HEAD, _failure_rows(failures, out))]
    parts += [f"![{caption}]({path.relative_to(out).as_posix()})" for path, caption in pictures]
    parts += ["\n".join(f"Measured on {escaped(line)}." for line in machine_of(runs))] if runs else []
    return "\n\n".join(parts) + "\n"


def _html(
    groups: list[Group], runs: list[Run], failures: list[Failure], pictures: list[tuple[Path, str]], out: Path
) -> str:
    parts = []
    for group in groups:
        parts += [f"<h2>{page.text(group.title)}</h2>", page.table(*table_of(group)), page.notes(group.notes)]
    parts.append(page.notes(legend_of(groups)) if groups else "<p>No run has a result.</p>")
    if failures:
        parts += ["<h2>Runs without a result</h2>", page.table(FAILURE_HEAD, _failure_rows(failures, out), "failed")]
    if pictures:
        parts.append("<h2>Figures</h2>")
        parts += [page.picture(path, caption, caption) for path, caption in pictures]
    parts.append(page.notes(f"Measured on {line}." for line in machine_of(runs)))
    return page.page(_title(runs, failures), parts)


def _show(groups: list[Group], runs: list[Run], failures: list[Failure], out: Path, drawn: bool) -> None:
    # A table squeezed into a narrow terminal loses its figures; one that the terminal wraps does not.
    console = Console(width=max(Console().width, 230), highlight=False)
    for group in groups:
        head, rows = table_of(group)
        shown = Table(title=escape(group.title), box=box.SIMPLE, title_justify="left")
        for column in head:
            shown.add_column(column, no_wrap=True, justify="right" if column.startswith(NUMBERS) else "left")
        for row in rows:
            shown.add_row(*(escape(cell) for cell in row))
        console.print(shown)
        for note in group.notes:
            console.print(escape(note))
    for failure in failures:
        code = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
        console.print(f"[red]no result{code}: {escape(printable(str(failure.folder)))}: {escape(failure.reason)}[/red]")
    written = escape(printable(str(out / "report.html")))
    console.print(f"{_title(runs, failures)}. Written: {written}, report.md, report.csv{', figures/' if drawn else ''}")


def main(arguments: list[str]) -> int:
    """The command; 2 if a folder is missing or the report cannot be written, 1 if no run has a result."""
    parser = argparse.ArgumentParser(
        description="Report on run folders: report.md, report.csv, report.html (opens offline) and figures/."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders of runs such as a sweep's")
    parser.add_argument("--out", type=Path, help="where the report goes (default: the first folder)")
    options = parser.parse_args(arguments)
    try:
        groups = report(options.folders, options.out or options.folders[0])
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if groups else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
