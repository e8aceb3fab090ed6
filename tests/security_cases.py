"""An object that runs when it is unpickled, and the smallest run of the command."""

from __future__ import annotations

from pathlib import Path

from config_space import SMALLEST, WIDTHS, write_records


class Malicious:
    """Unpickled, it makes a file: a stand-in for what an attacker would do."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, "w")


def small_run(folder: Path) -> list[str]:
    """Overrides of a run of a second, whose data lie in ``folder``."""
    records = write_records(folder / "records.jsonl")
    widths = [*WIDTHS, "num_experts=4", "num_experts_per_tok=2"]
    given = ["data=json", f"data.path='{records}'", f"data.cache_dir='{folder}/cache'", "trainer.precision=32"]
    return [*SMALLEST, *given, *(f"+model.overrides.{width}" for width in widths)]
