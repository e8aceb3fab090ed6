"""Read run folders and make one table of them, in the columns of the paper's.

python experiments/report.py multirun/2026-11-30_12-00-00
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_sonar.modes import MODES, resolve_mode

COLUMNS = (
    "model",
    "settings",
    "backend",
    "mode",
    "peak GB",
    "saved",
    "expert-grad GB",
    "ms a step",
    "held-out loss",
    "gives up",
)
_SETTING = ("model", "size", "params_total", "backend", "optimizer", "data", "precision", "batch_size", "seq_len")
_SETTING += ("seed", "steps", "settings")
# These have columns of their own, or decide where things go.
_SHOWN_ELSEWHERE = re.compile(r"(mode|model|backend|hydra\..*|ckpt_path|export)=")


def read_results(folders: Iterable[Path]) -> tuple[list[dict[str, Any]], list[Path]]:
    """All results at or below the folders, and the run folders that have none (their job failed or is running)."""
    results: list[dict[str, Any]] = []
    without: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder. Name run folders or folders of runs.")
        for config in sorted(folder.rglob(".hydra/config.yaml"), key=_natural):
            run = config.parent.parent
            try:
                result = json.loads((run / "result.json").read_text())
                results.append({**result, "folder": str(run), "settings": _settings_of(run)})
            except (OSError, json.JSONDecodeError):
                without.append(run)
    return results, without


def _settings_of(run: Path) -> str:
    """What the command line of a run changed, besides what the table's other columns show."""
    path = run / ".hydra" / "overrides.yaml"
    lines = path.read_text().splitlines() if path.is_file() else []
    overrides = [line.removeprefix("- ").strip("'") for line in lines]
    return " ".join(o for o in overrides if o != "[]" and not _SHOWN_ELSEWHERE.match(o))


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]


def rows_of(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row of text a result, grouped by setting, with the modes in the paper's order.

    ``saved`` is the peak against ``standard``'s in the same setting (against ``standard_no_expert_clip``'s, if that
    is what there is).
    """
    order = {mode: index for index, mode in enumerate(MODES)}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result.get(key) for key in _SETTING), []).append(result)
    rows: list[dict[str, str]] = []
    for group in groups.values():
        by_mode = {result["mode"]: result for result in group}
        base = by_mode.get("standard") or by_mode.get("standard_no_expert_clip") or {}
        for result in sorted(group, key=lambda r: order.get(r["mode"], len(order))):
            rows.append(_row(result, base.get("peak_memory_bytes")))
    return rows


def _row(result: Mapping[str, Any], base: float | None) -> dict[str, str]:
    peak = result.get("peak_memory_bytes")
    mode = resolve_mode(result["mode"], result.get("expert_clip")) if result["mode"] in MODES else None
    return {
        "model": f"{result['model']} ({result['size']})",
        "settings": result.get("settings", ""),
        "backend": result["backend"],
        "mode": result["mode"],
        "peak GB": _number(peak, 1e9, ".3f"),
        "saved": f"{1 - peak / base:.1%}" if peak and base else "",
        "expert-grad GB": _number(result.get("peak_expert_grad_bytes"), 1e9, ".3f"),
        "ms a step": _number(result["step_time_ms"].get("median"), 1, ".1f"),
        "held-out loss": _number(result.get("heldout_loss"), 1, ".4f"),
        "gives up": mode.gives_up if mode else "",
    }


def _number(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else format(value / unit, form)


def columns_of(rows: list[dict[str, str]]) -> list[str]:
    """The columns that say something: settings only where runs changed any."""
    return [column for column in COLUMNS if column != "settings" or any(row[column] for row in rows)]


def markdown(rows: list[dict[str, str]]) -> str:
    """The rows as a Markdown table."""
    columns = columns_of(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row[column] for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def report(folders: list[Path], out: Path, failed: Mapping[str, int] | None = None) -> list[dict[str, str]]:
    """Print the table and write ``summary.md`` and ``summary.csv`` into ``out``; returns the rows."""
    results, without = read_results(folders)
    rows = rows_of(results)
    # A table squeezed into a narrow terminal loses its figures; one that the terminal wraps does not.
    console = Console(width=max(Console().width, 150), highlight=False)
    table = Table(title=f"{len(rows)} runs", box=box.SIMPLE)
    columns = columns_of(rows)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    console.print(table)
    text = markdown(rows) + "\n"
    for run in without:
        code = (failed or {}).get(str(run.absolute()))
        where = run / "error.txt"
        line = (
            f"{run}: no result"
            + (f" (exit code {code})" if code else "")
            + (f"; see {where}" if where.exists() else "")
        )
        console.print(f"[red]{line}[/red]", highlight=False)
        text += f"\n{line}\n"
    if results:
        first = results[0]
        text += f"\nMeasured on {first.get('device_name')} ({first.get('device')}), " + ", ".join(
            f"{package} {version}" for package, version in first.get("versions", {}).items()
        )
        text += f"; batch {first.get('batch_size')} x {first.get('seq_len')} tokens, {first.get('steps')} steps.\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.md").write_text(text)
    with (out / "summary.csv").open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, list(COLUMNS))
        writer.writeheader()
        writer.writerows(rows)
    console.print(f"Written: {out / 'summary.md'}, {out / 'summary.csv'}", highlight=False)
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Make one table of run folders.")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders of runs such as a sweep's")
    parser.add_argument("--out", type=Path, help="where summary.md and summary.csv go (default: the first folder)")
    options = parser.parse_args(arguments)
    try:
        rows = report(options.folders, options.out or options.folders[0])
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
