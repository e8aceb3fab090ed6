"""The peers' table, on the terminal and as a page, and what it says of the goals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.peers import OURS, PEERS
from experiments.peers.checks import CHECKS

COLUMNS = ("", "optimizer state", "peak MB", "step time", "spread over rounds", "held-out loss", *CHECKS)

CHECKED = (
    "The peak is that of live storages in one step. The last four columns are what a toy in fp32 showed: its weights "
    "against those of ordinary training with AdamW, or with the row's own optimizer where that is another. A "
    "difference is a share of how far training moved the weights; a resumed training must be bitwise the same."
)

SAME_PEAK = 1.005
"""Peaks whose ratio is no more than this count as the same when step times are compared."""

_FIGURES = len(COLUMNS) - len(CHECKS)


def rows_of(result: Mapping[str, Any], label: str = "label") -> list[tuple[str, ...]]:
    """A row of text for each peer; one that did not run says so, with the number of its note.

    Args:
        result: what was measured.
        label: ``"label"`` or ``"name"``: what a row is called by.
    """
    marks = _marks(result)
    found = []
    for name, row in result["rows"].items():
        called = {"label": row["label"], "name": name}[label]
        first = f"{called} [{marks[name]}]" if name in marks else called
        checks = row.get("checks", {})
        cells = [checks[key]["cell"] if checks else "" for key in CHECKS]
        if "failed" in row:
            found.append((first, row["state"], "does not run", "", "", "", *cells))
            continue
        spread = f"{row['least']:.3f} to {row['greatest']:.3f}"
        figures = (f"{row['peak_bytes'] / 1e6:.1f}", f"{row['ratio']:.3f}", spread, f"{row['heldout_loss']:.4f}")
        found.append((first, row["state"], *figures, *cells))
    return found


def notes_of(result: Mapping[str, Any]) -> list[str]:
    """What the numbers in brackets mean."""
    marks = _marks(result)
    return [f"[{marks[name]}] {_said(row)}." for name, row in result["rows"].items() if name in marks]


def _marks(result: Mapping[str, Any]) -> dict[str, int]:
    noted = [name for name, row in result["rows"].items() if _said(row)]
    return {name: number for number, name in enumerate(noted, 1)}


def _said(row: Mapping[str, Any]) -> str:
    failed = f"does not run: {row['failed']}" if "failed" in row else ""
    raised = [f"{name}: {cell['said']}" for name, cell in row.get("checks", {}).items() if "said" in cell]
    return "; ".join(part for part in (failed, *raised, row["note"]) if part).rstrip(".")


def verdicts(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """The two goals against each peer that keeps an optimizer state that we keep too.

    Nobody is below our lowest peak at the same state, with the peer's own optimizer where we have a row of it; and for
    nobody is there none of ours that takes no more memory (within 0.5%) and no more time. A ratio may be within our
    spread over the rounds.

    Returns:
        Of each, ``goal``, ``verdict`` ("met", "met within the spread", "missed") and ``figures``.
    """
    ran = {name: row for name, row in rows.items() if "failed" not in row}
    found = []
    for name, row in ran.items():
        same = {own: ran[own] for own in OURS if own in ran and ran[own]["state"] == row["state"]}
        if name in OURS or not same:
            continue
        # Like with like: where another project's optimizer steps both, what steps it is compared and not the optimizer.
        same = {own: ran[own] for own in same if PEERS[own].package == PEERS[name].package} or same
        low = min(same, key=lambda own: same[own]["peak_bytes"])
        below = row["peak_bytes"] < same[low]["peak_bytes"]
        found.append(
            {
                "goal": f"{name} is not below our peak",
                "verdict": "missed" if below else "met",
                # The default mode beside the lowest: what it takes more is the price of its clip.
                "figures": "; ".join(
                    [
                        f"{row['peak_bytes'] / 1e6:.1f} MB",
                        *(f"{own} {same[own]['peak_bytes'] / 1e6:.1f} MB" for own in same if own in (low, "sonar")),
                    ]
                ),
            }
        )
        light = [own for own in same if same[own]["peak_bytes"] <= row["peak_bytes"] * SAME_PEAK]
        goal = f"{name} is not faster at the same peak"
        if not light:
            found.append({"goal": goal, "verdict": "missed", "figures": "none of ours has so low a peak"})
            continue
        fast = min(light, key=lambda own: same[own]["ratio"])
        ours, theirs = same[fast], row["ratio"]
        within = "met within the spread" if ours["least"] <= theirs else "missed"
        found.append(
            {
                "goal": goal,
                "verdict": "met" if ours["ratio"] <= theirs else within,
                "figures": f"step time {theirs:.3f}; {fast} {ours['ratio']:.3f} "
                f"({ours['least']:.3f} to {ours['greatest']:.3f})",
            }
        )
    return found


def setting(result: Mapping[str, Any]) -> str:
    """What was measured, and on what."""
    threads = f"{result['threads']} thread{'' if result['threads'] == 1 else 's'}"
    model = f"OLMoE with {result['parameters'] / 1e6:.0f} M parameters, bf16, grouped_mm, {threads}"
    shape = f"batches of {result['batch_size']} x {result['seq_len']} tokens of the built-in data"
    return (
        f"{model}; {shape}; clip to norm {result['max_norm']:g} where the row clips. Step times are ratios to plain "
        f"Lightning's median over {result['rounds']} rounds of {result['steps']} steps. Held-out loss is after "
        f"{result['quality_steps']} steps from weights trained for {result['pretrain_steps']} steps "
        f"({result['start_loss']:.4f}), AdamW's learning rate {result['lr']:g} falling to 0."
    )


def markdown(result: Mapping[str, Any]) -> str:
    """The page."""
    goals = [f"- {item['goal']}: {item['verdict']} ({item['figures']})." for item in result["verdicts"]]
    lines = [
        "# Peers, side by side",
        "",
        "Written by a command; what each row was given and how it was checked stands in its docstring and in "
        "`experiments/peers/`.",
        "",
        f"    {result['command']}",
        "",
        setting(result),
        "",
        f"Machine: {result['processor']}. Versions: "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        + ".",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows_of(result)),
        "",
        CHECKED,
        "",
        *(f"{note}  " for note in notes_of(result)),
        "",
        "## Goals",
        "",
        *(goals or ["A toy says nothing of them."]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def show(result: Mapping[str, Any]) -> None:
    """The table, the notes and the goals, on the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    # One table of all columns is too wide for most terminals.
    for first, last in ((1, _FIGURES), (_FIGURES, len(COLUMNS))):
        table = Table(box=box.SIMPLE)
        table.add_column(COLUMNS[0], no_wrap=True)
        for column in COLUMNS[first:last]:
            table.add_column(column)
        for row in rows_of(result, "name"):
            table.add_row(row[0], *row[first:last])
        console.print(table)
    for line in (*notes_of(result), setting(result), CHECKED):
        console.print(line)
    for item in result["verdicts"]:
        console.print(f"{item['goal']}: {item['verdict']} ({item['figures']})")
    if result["toy"]:
        console.print("Toy sizes: this shows that the script works. Its figures mean nothing.")
