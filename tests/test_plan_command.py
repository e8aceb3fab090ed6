"""What `experiments/plan.py` takes, refuses and prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from experiments.plan_tables import console
from experiments.planning import main
from lightning_sonar import MODES

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["model=olmoe", "model.size=tiny", "model.num_layers=1"]


def modes_of(folder: Path) -> list[str]:
    return [row["mode"] for row in json.loads((folder / "plan.json").read_text())["rows"]]


@pytest.mark.parametrize(
    ("mode", "rows"),
    [("sonar,sonar", ["sonar"]), ("glob(standard*)", ["standard", "standard_no_expert_clip"])],
)
def test_each_mode_has_one_row_and_a_pattern_stands_for_what_it_matches(mode, rows, tmp_path):
    assert main([*SMALL, f"mode={mode}", f"out={tmp_path}", "context_memory=0"]) == 0
    assert modes_of(tmp_path) == rows
    assert json.loads((tmp_path / "plan.json").read_text())["context_bytes"] == 0


def test_no_name_is_cut_where_there_is_no_terminal(tmp_path, capsys):
    assert main([*SMALL, "backend=grouped_mm,sonicmoe", "mode=sonar,standard_no_expert_clip", f"out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert out.count("standard_no_expert_clip") == 2 * 3
    assert "from" in out


def test_all_modes_are_readable_in_100_columns(tmp_path, capsys):
    assert console.width == 100
    assert main([*SMALL, f"out={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines if not line.startswith("written")) <= 100
    for mode in MODES:
        assert sum(line.split()[:1] == [mode] for line in lines) == 3
    for optimizer in ("AdamW8bit", "AdamW4bit"):  # and what makes sonar smaller still, in three tables more
        assert sum(optimizer in line and not line.startswith("note") for line in lines) >= 3


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("device_mem=24GiB", "there is no 'device_mem'. Did you mean device_memory=...?"),
        ("rank=2", "there is no 'rank'. Did you mean ranks=...?"),
        ("context_memry=1GB", "Did you mean context_memory=...?"),
        ("mode=glob(x*)", "no configuration in mode/ matches"),
        ("data.seq_len=interval(64,128)", "plan.py needs single values"),
    ],
)
def test_a_mistake_in_what_it_takes_is_named(argument, message, tmp_path, capsys):
    assert main([*SMALL, argument, f"out={tmp_path}"]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_experts_is_called_one(tmp_path, capsys):
    AutoConfig.for_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "llama")
    assert main(["model=hf", f"model.id='{tmp_path}/llama'", "mode=sonar", f"out={tmp_path}/out"]) == 2
    assert "Is this a Mixture-of-Experts model?" in capsys.readouterr().err


def test_a_reader_who_leaves_early_is_no_error():
    script = f"{sys.executable} {ROOT / 'experiments/plan.py'} --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "BrokenPipe" not in done.stderr


def test_the_table_of_ranks_tells_all_its_rows_apart(tmp_path, capsys):
    assert main([*SMALL, "ranks=2", f"out={tmp_path}"]) == 0
    table = capsys.readouterr().out.split("GB a rank under FSDP2")[1]
    names = [" ".join(line.split()[:-1]) for line in table.splitlines() if line.startswith((" sonar ", "sonar "))]
    assert len(names) == 4
    assert len(set(names)) == 4, "a mode alone does not say which optimizer, or where its states are"
