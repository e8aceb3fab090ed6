"""The report's tables as text: the paper's columns in the paper's order, then what else is worth knowing."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.reporting.groups import Group, Row, Spread, variant
from experiments.reporting.paper import ALL_PAIRS, is_papers_size
from experiments.reporting.runs import Failure, Run, printable
from experiments.status import write_text

CSV_COLUMNS = (
    *("status", "model", "size", "backend", "mode", "seed", "peak_memory_bytes", "step_time_ms_median"),
    *("step_time_ms_p10", "step_time_ms_p90", "heldout_loss", "gives_up", "saved", "heldout_loss_gap"),
    *("peak_expert_grad_bytes", "parameters_bytes", "optimizer_state_bytes", "dense_gradients_bytes"),
    *("expert_gradients_bytes", "activations_and_other_bytes", "untracked_bytes", "predicted_peak_bytes"),
    *("peak_phase", "train_loss", "steps", "batch_size", "seq_len", "precision", "optimizer", "data"),
    *("params_total", "params_expert", "device_name", "settings", "folder", "exit_code", "reason"),
)
"""One line a run in ``report.csv``: bytes, milliseconds, nats, shares of one."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def table_of(group: Group) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of a setting's table. Columns without a single value are left out, the paper's five stay."""
    columns: list[tuple[str, list[str], bool]] = [
        ("mode", [row.mode for row in group.rows], True),
        ("peak GB", [_gigabytes(row.peak_bytes) for row in group.rows], True),
        ("paper: GB", [f"{row.paper.peak_gb:.2f}" if row.paper else "" for row in group.rows], False),
        ("ms a step", [_milliseconds(row.step_ms) for row in group.rows], True),
        ("paper: ms", [f"{row.paper.step_ms:.1f}" if row.paper else "" for row in group.rows], False),
        ("held-out loss", [_spread(row.heldout_loss, ".4f") for row in group.rows], True),
        (
            "paper: loss",
            [_number(row.paper.heldout_loss if row.paper else None, ".4f") for row in group.rows],
            False,
        ),
        ("gives up", [row.gives_up for row in group.rows], True),
        ("saved", [_number(row.saved, "z.1%") for row in group.rows], False),
        ("time ratio", [_number(row.time_ratio, ".2f") for row in group.rows], False),
        ("loss gap", [_spread(row.gap, "+z.4f") if row.mode != group.base else "" for row in group.rows], False),
        ("expert-grad GB", [_gigabytes(row.expert_gradient_bytes) for row in group.rows], False),
        ("seeds", [_seeds(row) for row in group.rows], False),
    ]
    kept = [(head, cells) for head, cells, always in columns if always or any(cells)]
    return [head for head, _ in kept], [list(cells) for cells in zip(*(cells for _, cells in kept), strict=True)]


def _gigabytes(nbytes: float | None) -> str:
    if nbytes is None:
        return ""
    return f"{nbytes / 1e9:.2f}" if nbytes >= 10e9 else f"{nbytes / 1e9:.3f}"


def _milliseconds(step: Spread | None) -> str:
    return "" if step is None else f"{step.middle:.1f} ({step.low:.0f}-{step.high:.0f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _spread(value: Spread | None, form: str) -> str:
    if value is None:
        return ""
    middle = format(value.middle, form)
    return middle if value.count == 1 else f"{middle} ({value.low:{form}} to {value.high:{form}})"


def _seeds(row: Row) -> str:
    return ", ".join(str(seed) for seed in sorted({run.result.get("seed", "") for run in row.runs}, key=str))


def legend_of(groups: Iterable[Group]) -> list[str]:
    """What the columns mean, a sentence each; only those that are there."""
    groups = list(groups)
    rows = [row for group in groups for row in group.rows]
    lines = ["GB is 1,000,000,000 bytes. The peak is the highest of a profiled step, over all seeds."]
    if any(row.step_ms for row in rows):
        lines.append(
            "ms a step: the median, in brackets the 10th and 90th percentile; steps under the profiler are out."
        )
    bases = " or ".join(dict.fromkeys(group.base for group in groups if group.base))
    if bases:
        lines.append(f"Saved, time ratio and loss gap are against {bases}. Saved is a share of its peak.")
    if any(row.gap for row in rows):
        lines.append(
            "Loss gap: held-out loss less the other's at the same seed"
            + ("; mean, in brackets lowest and highest." if any(r.gap and r.gap.count > 1 for r in rows) else ".")
        )
    if any(row.expert_gradient_bytes is not None for row in rows):
        lines.append("Expert-grad GB: most bytes of expert gradients alive at once, at any moment of the step.")
    if any(row.paper for row in rows):
        lines.append(
            "The paper's columns are of the same model, backend, batch, precision and optimizer; its loss is of 2,000 "
            "steps of Alpaca, its times are of its GPU."
        )
    if any(is_papers_size(group.result) for group in groups):
        lines.append(ALL_PAIRS)
    return lines


def machine_of(runs: list[Run]) -> list[str]:
    """On what the figures were measured: one line for each machine and set of versions."""
    lines = {}
    for run in runs:
        result = run.result
        versions: dict[str, Any] = result.get("versions") or {}
        text = f"{result.get('device_name')} ({result.get('device')})"
        text += "".join(f", {package} {version}" for package, version in versions.items())
        lines[text] = None
    return list(lines)


def markdown_of(group: Group) -> str:
    """A setting's table in Markdown."""
    return markdown(*table_of(group))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; what would be markup in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)


def escaped(text: str) -> str:
    """Text as Markdown shows it literally, on one line."""
    text = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\|`*\[\]])", r"\\\1", text)


def write_csv(path: Path, groups: list[Group], failures: list[Failure]) -> None:
    """Write one line a run, the failed ones included; an apostrophe keeps text from being taken for a formula."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, CSV_COLUMNS, restval="", extrasaction="ignore")
    writer.writeheader()
    for group in groups:
        base = group.row(group.base) if group.base else None
        for row in group.rows:
            for run in row.runs:
                writer.writerow(_inert(_line(run, row, base)))
    for failure in failures:
        line = {
            "status": "failed" if failure.exit_code else "incomplete",
            "settings": failure.settings,
            "folder": printable(str(failure.folder)),
            "exit_code": "" if failure.exit_code is None else failure.exit_code,
            "reason": failure.reason,
        }
        writer.writerow(_inert(line))
    write_text(path, text.getvalue())


def _inert(line: dict[str, Any]) -> dict[str, Any]:
    """A line in which no text begins as a formula does; a spreadsheet would run it."""
    return {k: f"'{v}" if isinstance(v, str) and v.startswith(_FORMULA) else v for k, v in line.items()}


def _line(run: Run, row: Row, base: Row | None) -> dict[str, Any]:
    peak, base_peak = run.number("peak_memory_bytes"), base.peak_bytes if base else None
    line = {key: run.result.get(key) for key in CSV_COLUMNS}
    line |= {f"step_time_ms_{key}": run.number("step_time_ms", key) for key in ("median", "p10", "p90")}
    split = run.result.get("memory_split") or {}
    line |= {f"{key}_bytes": value for key, value in split.items()}
    line |= {
        "status": "finished",
        "mode": variant(run.result),
        "gives_up": row.gives_up,
        "saved": 1 - peak / base_peak if peak and base_peak else None,
        "heldout_loss_gap": row.gaps.get(run.result.get("seed")),
        "settings": " ".join(run.settings),
        "folder": printable(str(run.folder)),
    }
    return line
