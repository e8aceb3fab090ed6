"""What `experiments/plan.py` prints and writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.overrides import key_of
from experiments.result import write_json
from lightning_sonar.memory.cards import CARDS, GIB, fits, smallest_card
from lightning_sonar.memory.figure import draw_plans
from lightning_sonar.memory.planner import MemoryPlan
from lightning_sonar.memory.search import Candidate, Found
from lightning_sonar.modes import MODES

# Not a terminal: wide enough to read there what was written to a file or through a pipe.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)


def _print(table: Table) -> None:
    """Print a table with nothing cut off.

    Where the width is too small for it, columns move together; where that is not enough cells wrap, and in a pipe the
    table is wider.
    """
    for column in table.columns:
        column.overflow = "fold"
    width = console.width
    if _wanted(table) > width:
        table.padding = 0
    if not console.is_terminal:
        console.width = max(width, _wanted(table))
    console.print(table)
    console.width = width


def _wanted(table: Table) -> int:
    return console.measure(table, options=console.options.update(max_width=1000)).maximum


def show_plans(plans: list[MemoryPlan], context: int, against: Sequence[MemoryPlan] = ()) -> list[str]:
    """Print rows by what they hold, and the cards that hold them; returns the settings in which rows differ.

    What is saved is so against the standard row among ``plans`` or, if there is none, among ``against``.
    """
    first = plans[0]
    always = () if against else ("mode",)
    varying = [name for name in NAMES if len({str(getattr(plan, name)) for plan in plans}) > 1 or name in always]
    saved = [_saved(plan, [*plans, *against]) for plan in plans]
    table = _table("predicted peak of one training step, in GB (1,000,000,000 bytes), and what it is made of")
    for name in varying:
        table.add_column(_header(name))
    headers = (
        "peak",
        *(["saved"] if any(saved) else []),
        "params",
        "states",
        "expert\ngrads",
        "dense\ngrads",
        "activ.",
        "temp.",
    )
    for name in headers:
        table.add_column(name, justify="right")
    for plan, saving in zip(plans, saved, strict=True):
        table.add_row(
            *(_cell(getattr(plan, name)) for name in varying),
            f"{plan.peak_bytes / 1e9:.2f}",
            *([saving] if any(saved) else []),
            *(f"{value / 1e9:.2f}" for value in plan.split.values()),
        )
    _print(table)
    places = _table("where the peak is, and most expert tensors whose gradient is alive at once")
    for name in varying:
        places.add_column(_header(name))
    places.add_column("phase")
    places.add_column("operation")
    places.add_column("expert grads", justify="right")
    away = any(plan.host_bytes for plan in plans)
    if away:
        places.add_column("host GB", justify="right")
    for plan in plans:
        operation = plan.peak_op.removeprefix("aten.").removesuffix(".default")
        names = (_cell(getattr(plan, name)) for name in varying)
        host = [f"{plan.host_bytes / 1e9:.2f}"] if away else []
        places.add_row(*names, plan.peak_phase, operation, str(plan.peak_expert_grads), *host)
    _print(places)
    told = [name for name in NAMES if name not in varying and getattr(first, name) is not None]
    fixed = [f"{name.replace('_', ' ')} {_text(getattr(first, name))}" for name in told]
    console.print("all rows: " + ", ".join(fixed))
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        console.print(f"note: {note}")
    _show_cards(plans, varying, context)
    return varying


NAMES = ("model", "model_id", "num_layers", "size", "mode", "backend", "optimizer", "batch_size", "seq_len")
NAMES += ("accumulate_grad_batches", "checkpointing", "loss", "precision", "accumulation", "expert_state_device")
# What rows that are compared may differ in.
COMPARED = ("mode", "accumulation", "expert_state_device")


def _show_cards(plans: list[MemoryPlan], varying: list[str], context: int) -> None:
    table = _table("which card holds it, by GiB of the card")
    for name in varying:
        table.add_column(_header(name))
    table.add_column("reserved\nGB", justify="right")
    for card in CARDS:
        table.add_column(str(card), justify="center")
    table.add_column("fits\nfrom", justify="right")
    for plan in plans:
        holds = [fits(plan.reserved_bytes, card * GIB, context) for card in CARDS]
        smallest = smallest_card(plan.reserved_bytes, context)
        table.add_row(
            *(_cell(getattr(plan, name)) for name in varying),
            f"{plan.reserved_bytes / 1e9:.2f}",
            *("yes" if h else "-" for h in holds),
            "none" if smallest is None else f"{smallest} GiB",
        )
    _print(table)
    console.print(
        f"A card holds a row if what the caching allocator would reserve (an estimate) and {context / 1e9:.1f} GB for "
        "the process's CUDA context and workspaces (an assumption; context_memory=...) fit together."
    )


def show_ranks(plans: list[MemoryPlan], varying: list[str], ranks: list[int]) -> None:
    """Print what each rank needs under FSDP2."""
    table = _table("GB a rank under FSDP2, by arithmetic on the plan")
    for name in varying:
        table.add_column(_header(name))
    for number in ranks:
        table.add_column(f"{number} ranks", justify="right")
    for plan in plans:
        names = (_cell(getattr(plan, name)) for name in varying)
        table.add_row(*names, *(f"{plan.per_rank_bytes(number) / 1e9:.2f}" for number in ranks))
    _print(table)


def _saved(plan: MemoryPlan, plans: list[MemoryPlan]) -> str:
    """Against the standard row of the same setting; with the same optimizer, if there is one."""
    for compared in (COMPARED, (*COMPARED, "optimizer")):
        same = [name for name in NAMES if name not in compared]
        for other in plans:
            if other.mode == "standard" and all(getattr(other, name) == getattr(plan, name) for name in same):
                return f"{1 - plan.peak_bytes / other.peak_bytes:.1%}" if other is not plan else "0.0%"
    return ""


def _header(name: str) -> str:
    return {"expert_state_device": "expert\nstates", "accumulate_grad_batches": "accum.\nbatches"}.get(
        name, name.replace("_", " ")
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _cell(value: Any) -> str:
    """As `_text`, with the two names of an optimizer made of two on lines of their own."""
    return _text(value).replace(" for experts, ", "\nfor experts,\n")


def show_found(found: list[Found], device: int, context: int, overrides_of: Callable[[Candidate], list[str]]) -> None:
    table = _table(f"what fits {device / GIB:.1f} GiB, best first; sizes in GB (1,000,000,000 bytes)")
    for name in ("mode", "optimizer", "check-\npointing", "loss"):
        table.add_column(name)
    for name in ("batch", "tokens", "peak", "reserved", "left"):
        table.add_column(name, justify="right")
    table.add_column("gives up")
    for one in found:
        table.add_row(
            one.candidate.mode,
            one.candidate.optimizer,
            _text(one.candidate.checkpointing),
            one.candidate.loss,
            str(one.candidate.batch_size),
            str(one.plan.batch_size * one.plan.seq_len),
            f"{one.plan.peak_bytes / 1e9:.2f}",
            f"{one.plan.reserved_bytes / 1e9:.2f}",
            f"{(device - context - one.plan.reserved_bytes) / 1e9:.2f}",
            MODES[one.candidate.mode].gives_up,
        )
    _print(table)
    console.print("to run the first:")
    sizes = [] if any(key_of(o) == "model.size" for o in overrides_of(found[0].candidate)) else ["model.size=full"]
    console.print(
        "  python experiments/run.py " + " ".join([*overrides_of(found[0].candidate), *sizes]), soft_wrap=True
    )


def write_plans(plans: list[MemoryPlan], context: int, folder: Path, ranks: Iterable[int] = ()) -> None:
    """Write ``plan.json`` and ``plan.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for plan in plans:
        holds = [card for card in CARDS if fits(plan.reserved_bytes, card * GIB, context)]
        per_rank = {str(number): plan.per_rank_bytes(number) for number in ranks}
        rows.append(plan.to_dict() | {"cards_gib": holds, "per_rank_bytes": per_rank})
    write_json(folder / "plan.json", {"rows": rows, "context_bytes": context, "predicted": True})
    pair = _pair(plans)
    if pair:
        first = next(iter(pair.values()))
        draw_plans(
            {name: plan.curve for name, plan in pair.items()},
            folder / "plan.png",
            f"{first.model} ({first.size}), {first.backend}, batch {first.batch_size} x {first.seq_len} tokens: one "
            "training step, predicted",
        )
    console.print(f"written to {folder}")


def _pair(plans: list[MemoryPlan]) -> dict[str, MemoryPlan]:
    """Standard and sonar of the first setting that has both; else the first plan."""
    same = [name for name in NAMES if name != "mode"]
    for plan in plans:
        if plan.mode == "standard":
            for other in plans:
                if other.mode == "sonar" and all(getattr(other, name) == getattr(plan, name) for name in same):
                    return {"standard": plan, "sonar": other}
    return {plans[0].mode: plans[0]} if plans else {}
