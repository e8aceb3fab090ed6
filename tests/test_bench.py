"""The CPU benchmark: its arithmetic, and a toy run of every measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import bench

ROOT = Path(__file__).parent.parent


def test_a_ratio_is_of_medians_and_its_spread_is_of_the_rounds():
    found = bench.ratios({bench.BASELINE: [[9.0, 10.0, 11.0], [20.0, 20.0, 20.0]], "sonar": [[11.0] * 3, [16.0] * 3]})
    assert found["sonar"] == pytest.approx({"median_ms": 13.5, "ratio": 0.871, "least": 0.8, "greatest": 1.1}, abs=1e-3)
    assert found[bench.BASELINE]["ratio"] == 1.0


def test_modes_take_turns_and_each_measurement_is_asked_for_once_a_round(tmp_path, monkeypatch, capsys):
    asked: list[str] = []

    def spawn(what: str, toy: bool, steps: int) -> dict:
        asked.append(what)
        return bench.measure(what, toy, steps)

    monkeypatch.setattr(bench, "spawn", spawn)
    path = tmp_path / "bench.json"
    assert bench.main(["--toy", "--rounds", "2", "--steps", "2", "--modes", "sonar,standard", "--json", str(path)]) == 0
    base = bench.BASELINE
    assert asked == [base, "sonar", "standard", "sonar", "standard", base, "hook", "bandwidth"]
    written = json.loads(path.read_text())
    assert set(written["modes"]) == {base, "sonar", "standard"}
    assert [len(steps) for steps in written["ms"]["sonar"]] == [2, 2]
    assert written["hook"]["each_us"]["hooked"] > 0
    assert written["bandwidth"]["copy_gb_per_s"] > 0
    printed = capsys.readouterr().out
    assert "a hook beyond its update:" in printed
    assert f"sonar against {base}:" in printed


def test_the_model_has_a_hundred_million_parameters():
    import torch

    from lightning_sonar import models

    with torch.device("meta"):
        model = models.build("olmoe", "tiny", device="meta", **bench.MIDDLE)
    assert sum(parameter.numel() for parameter in model.parameters()) > 100e6


def test_an_unknown_mode_is_answered_with_the_choices(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--modes", "sonnar"])
    assert "--modes takes some of standard_no_expert_clip, standard" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_runs_its_measurements_in_processes_of_their_own(tmp_path):
    path = tmp_path / "bench.json"
    command = [sys.executable, str(ROOT / "experiments" / "bench.py"), "--toy", "--rounds", "1", "--steps", "2"]
    done = subprocess.run(
        [*command, "--modes", "sonar", "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["modes"]["sonar"]["ratio"] > 0
