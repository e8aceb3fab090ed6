"""Runs of one setting side by side, a row a mode, seeds put together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.reporting.paper import PaperRow, paper_rows
from experiments.reporting.runs import Run, is_number
from lightning_sonar.modes import MODES, Mode, mode_name, resolve_mode

# Two runs are compared if they agree in all of these.
_SETTING = ("model", "size", "params_total", "backend", "loss", "optimizer", "data", "precision", "batch_size")
_SETTING += ("seq_len", "steps", "ranks", "device_name")


@dataclass(frozen=True)
class Spread:
    """Several runs' figures: their middle and their ends."""

    middle: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Row:
    """One mode in one setting, over all its seeds.

    Attributes:
        mode: the mode's name, with its expert clip and where experts accumulate, where these are not the mode's own.
        runs: its runs.
        peak_bytes: the highest of their peaks.
        split: bytes at that peak by what holds them.
        expert_gradient_bytes: most expert gradients alive at once.
        step_ms: median of the runs' medians, lowest tenth and highest ninetieth percentile; milliseconds.
        heldout_loss: mean over the runs, lowest, highest; nats a token.
        gap: held-out loss less ``standard``'s of the same seed: mean, lowest, highest; None without such a pair.
        gaps: the same by seed.
        saved: share of ``standard``'s peak that is saved.
        time_ratio: step time over ``standard``'s.
        gives_up: what the mode gives up, in words.
        paper: the paper's row for the same setting, if it has one.
    """

    mode: str
    runs: tuple[Run, ...]
    peak_bytes: float | None
    split: dict[str, float]
    expert_gradient_bytes: float | None
    step_ms: Spread | None
    heldout_loss: Spread | None
    gap: Spread | None
    gaps: dict[Any, float]
    saved: float | None
    time_ratio: float | None
    gives_up: str
    paper: PaperRow | None


@dataclass(frozen=True)
class Group:
    """All modes in one setting.

    Attributes:
        title: the setting in a few words.
        rows: in the order of the paper's table.
        base: the mode that others are compared with: ``standard``, or ``standard_no_expert_clip`` without it.
        notes: what a reader should know, such as skipped steps.
    """

    title: str
    rows: tuple[Row, ...]
    base: str | None
    notes: tuple[str, ...]

    @property
    def result(self) -> dict[str, Any]:
        """The first run's figures, for what all runs have in common."""
        return self.rows[0].runs[0].result

    def row(self, mode: str) -> Row | None:
        """The row of a mode."""
        return next((row for row in self.rows if row.mode == mode), None)


def group_runs(runs: list[Run]) -> list[Group]:
    """Put runs of one setting together; settings stay in the order in which they first appear."""
    by_setting: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        by_setting.setdefault((*(run.result.get(key) for key in _SETTING), run.settings), []).append(run)
    common = set.intersection(*(set(run.settings) for run in runs)) if runs else set()
    titles = [_title(members[0], common) for members in by_setting.values()]
    devices = {run.result.get("device_name") for run in runs}
    steps = {run.result.get("steps") for run in runs}
    groups = []
    for members, title in zip(by_setting.values(), titles, strict=True):
        result = members[0].result
        if len(steps) > 1:
            title += f", {result.get('steps')} steps"
        if len(devices) > 1:
            title += f", {result.get('device_name')}"
        groups.append(_group(title, members))
    return groups


def _title(run: Run, common: set[str]) -> str:
    result = run.result
    ranks = result.get("ranks") or 1
    parts = [
        f"{result['model']} ({result['size']})",
        str(result["backend"]),
        f"{result.get('batch_size')} x {result.get('seq_len')} tokens" + (f" on {ranks} ranks" if ranks > 1 else ""),
        str(result.get("precision", "")),
        *(setting for setting in run.settings if setting not in common),
    ]
    return ", ".join(part for part in parts if part)


def variant(result: Mapping[str, Any]) -> str:
    """The mode of a run, with what it does otherwise than the mode by itself."""
    mode = _mode_of(result)
    if mode is None:
        return str(result["mode"])
    parts = [mode_name(mode)]
    # Where nothing steps inside backward these mean nothing.
    if mode.in_backward != "none":
        own = {"accumulation": "exact", "expert_state_device": None}
        parts += [f"{key}={result[key]}" for key, default in own.items() if result.get(key, default) != default]
    return ", ".join(parts)


def _mode_of(result: Mapping[str, Any]) -> Mode | None:
    """The mode of a run; None if this version of the package has no such mode."""
    try:
        return resolve_mode(result["mode"], result.get("expert_clip"))
    except ValueError:
        return None


def _group(title: str, runs: list[Run]) -> Group:
    by_mode: dict[str, list[Run]] = {}
    for run in runs:
        by_mode.setdefault(variant(run.result), []).append(run)
    order = {mode: index for index, mode in enumerate(MODES)}
    modes = sorted(by_mode, key=lambda mode: (order.get(mode, len(order)), mode))
    base = next((mode for mode in ("standard", "standard_no_expert_clip") if mode in by_mode), None)
    paper = paper_rows(runs[0].result, runs[0].settings)
    rows = tuple(_row(mode, by_mode[mode], by_mode.get(base or "", []), paper.get(mode)) for mode in modes)
    notes = [
        f"{variant(run.result)}, seed {run.result.get('seed')}: {int(skipped)} {what.replace('_', ' ')}."
        for run in runs
        for what in ("skipped_steps", "skipped_tensors")
        if (skipped := run.number(what))
    ]
    notes += [
        f"{variant(run.result)}, seed {run.result.get('seed')}: the held-out loss was not finite or not measured."
        for run in runs
        if run.number("heldout_loss") is None
    ]
    return Group(title, rows, base, tuple(notes))


def _row(mode: str, runs: list[Run], base: list[Run], paper: PaperRow | None) -> Row:
    peak, base_peak = _peak(runs), _peak(base)
    highest = max(runs, key=lambda run: run.number("peak_memory_bytes") or 0.0)
    split = highest.result.get("memory_split") or {}
    times = [median for run in runs if (median := run.number("step_time_ms", "median")) is not None]
    base_times = [median for run in base if (median := run.number("step_time_ms", "median")) is not None]
    step = None
    if times:
        low = [run.number("step_time_ms", "p10") for run in runs]
        high = [run.number("step_time_ms", "p90") for run in runs]
        step = Spread(
            statistics.median(times),
            min(*times, *(value for value in low if value is not None), math.inf),
            max(*times, *(value for value in high if value is not None), 0.0),
            len(times),
        )
    mine, other = _loss_by_seed(runs), _loss_by_seed(base)
    gaps = {seed: mine[seed] - other[seed] for seed in mine if seed in other}
    known = _mode_of(runs[0].result)
    return Row(
        mode=mode,
        runs=tuple(runs),
        peak_bytes=peak,
        split={str(k): float(v) for k, v in split.items() if is_number(v)},
        expert_gradient_bytes=max(
            (b for run in runs if (b := run.number("peak_expert_grad_bytes")) is not None), default=None
        ),
        step_ms=step,
        heldout_loss=_spread(loss for run in runs if (loss := run.number("heldout_loss")) is not None),
        gap=_spread(gaps.values()),
        gaps=gaps,
        saved=1 - peak / base_peak if peak and base_peak else None,
        time_ratio=step.middle / statistics.median(base_times) if step and base_times else None,
        gives_up="" if known is None else known.gives_up,
        paper=paper,
    )


def _peak(runs: list[Run]) -> float | None:
    return max((peak for run in runs if (peak := run.number("peak_memory_bytes")) is not None), default=None)


def _loss_by_seed(runs: list[Run]) -> dict[Any, float]:
    losses: dict[Any, list[float]] = {}
    for run in runs:
        loss = run.number("heldout_loss")
        if loss is not None:
            losses.setdefault(run.result.get("seed"), []).append(loss)
    return {seed: statistics.fmean(found) for seed, found in losses.items()}


def _spread(values: Iterable[float]) -> Spread | None:
    found = list(values)
    return Spread(statistics.fmean(found), min(found), max(found), len(found)) if found else None
