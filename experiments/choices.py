"""What ``--help`` says of each choice of each configuration group: the comment that its file begins with."""

from __future__ import annotations

import textwrap
from pathlib import Path


def comment_of(path: Path) -> str:
    """The comment at the head of a configuration file, without what Hydra reads in it; empty if it has none."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            words.append(line.lstrip("# "))
    return " ".join(words)


def explain(directory: Path, width: int = 110) -> str:
    """Each group of ``directory`` with its choices, a paragraph a choice.

    Args:
        directory: the folder of the configuration; its folders are the groups.
        width: characters of a line.
    """
    lines = ["== Each choice =="]
    for group in sorted(path for path in directory.iterdir() if path.is_dir() and path.name != "hydra"):
        lines += ["", f"{group.name}="]
        files = sorted(group.glob("*.yaml"))
        column = 4 + max(len(path.stem) for path in files)
        for path in files:
            head = f"  {path.stem}".ljust(column)
            lines += textwrap.wrap(
                comment_of(path), width, initial_indent=head, subsequent_indent=" " * column, break_on_hyphens=False
            )
    return "\n".join(lines)
