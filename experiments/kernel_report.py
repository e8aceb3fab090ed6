"""Compile the project's Triton kernels for GPUs that need not be there, and say what the code does.

python experiments/kernel_report.py
python experiments/kernel_report.py --target sm_90 --json kernels.json
python experiments/kernel_report.py --markdown

A kernel that streams memory should move each byte once, in 128-bit accesses, and keep everything in registers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_sonar.backends.scattermoe.offline import scattermoe_cases
from lightning_sonar.kernel_figures import TARGETS, KernelCase, KernelFigures, Target, measure, missing
from lightning_sonar.optim.offline import adamw_cases

# Every kernel of the project, each as a function from a target to its cases. New kernels are added here.
KERNELS: list[Callable[[Target], list[KernelCase]]] = [adamw_cases, scattermoe_cases]

COLUMNS = ("kernel", "variant", "dtype", "target", "block", "registers", "spilled B", "shared B", "loads", "stores")
COLUMNS += ("B read", "B written", "B a parameter")


def rows_of(figures: Iterable[KernelFigures]) -> list[tuple[str, ...]]:
    """One row of text for each case and target, in the order of `COLUMNS`."""
    return [
        (
            *(f.kernel, f.variant, f.dtype, f.target, _text(f.block), str(f.registers), _spilled(f), str(f.shared)),
            *(_accesses(f.loads), _accesses(f.stores), _text(f.bytes_read), _text(f.bytes_written)),
            _text(None if f.bytes_read is None or f.bytes_written is None else f.bytes_read + f.bytes_written),
        )
        for f in figures
    ]


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _spilled(figures: KernelFigures) -> str:
    if not figures.spilled_registers:
        return str(figures.spilled)
    return f"{figures.spilled} ({figures.spilled_registers} registers)"


def _accesses(counts: dict[int, int]) -> str:
    """Widest first: "4x128 + 1x32"."""
    return " + ".join(f"{count}x{bits}" for bits, count in sorted(counts.items(), reverse=True)) or "-"


def markdown(figures: Sequence[KernelFigures]) -> str:
    """A Markdown table with a row for each case; where targets differ, their figures stand in the report's order."""
    targets = list(dict.fromkeys(f.target for f in figures))
    cases: dict[tuple[str, str, str], list[KernelFigures]] = {}
    for f in figures:
        cases.setdefault((f.kernel, f.variant, f.dtype), []).append(f)
    lines = [
        f"| kernel | variant | dtype | registers {' / '.join(targets)} | spilled B | shared B | loads | stores "
        "| bytes a parameter |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for names, found in cases.items():
        per_target = {f.target: f for f in found}
        each = [[_cell(per_target.get(t), column) for t in targets] for column in _MARKDOWN]
        lines.append("| " + " | ".join((*names, *(_joined(values) for values in each))) + " |")
    return "\n".join(lines)


_MARKDOWN: tuple[Callable[[KernelFigures], str], ...] = (
    lambda f: str(f.registers),
    lambda f: _spilled(f),
    lambda f: str(f.shared),
    # Of kernels that stream. The others go through shared memory, by copies and descriptors that are no plain loads.
    lambda f: "-" if f.block is None else _wide(f.loads),
    lambda f: "-" if f.block is None else _wide(f.stores),
    lambda f: _text(None if f.bytes_read is None or f.bytes_written is None else f.bytes_read + f.bytes_written),
)


def _cell(figures: KernelFigures | None, column: Callable[[KernelFigures], str]) -> str:
    return "-" if figures is None else column(figures)


def _joined(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def _wide(counts: dict[int, int]) -> str:
    """Without the scalars of a program, which are 32 bits wide."""
    return _accesses({bits: count for bits, count in counts.items() if bits != 32})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file too")
    names = [target.name for target in TARGETS]
    parser.add_argument("--target", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table, a row for each case")
    options = parser.parse_args(arguments)

    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    chosen = [target for target in TARGETS if options.target is None or target.name in options.target]
    figures = [measure(case, target) for cases in KERNELS for target in chosen for case in cases(target)]
    if options.markdown:
        print(markdown(figures))
    else:
        table = Table(*COLUMNS, box=box.SIMPLE)
        for row in rows_of(figures):
            table.add_row(*row)
        # Wide enough for every column: a table cut to the terminal cannot be read or copied.
        Console(width=300).print(table)
    print("Loads and stores: instructions a thread x bits. Bytes: an element, of accesses of 128 bits and more.")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([dataclasses.asdict(f) for f in figures], indent=2) + "\n")
        print(f"Written to {options.json}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
