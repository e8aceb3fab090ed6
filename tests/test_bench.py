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
    assert written["processor"]
    assert written["verdicts"] is None
    printed = capsys.readouterr().out
    assert "Its figures mean nothing" in printed
    assert printed.count("a toy says nothing of it") == 3
    assert "a hook beyond its update:" in printed
    assert f"sonar against {base}:" in printed


STEPS = {"ms": [2.0, 2.0], "parameters": 1}
OTHERS = {
    "hook": {"hook_us": 61.0},
    "bandwidth": {"share_of_copy": 0.8, "update_gb_per_s": 8.0, "copy_gb_per_s": 10.0},
}


def test_a_late_failure_loses_no_round_and_a_mode_named_twice_runs_once(tmp_path, monkeypatch):
    path = tmp_path / "new" / "bench.json"
    seen: list[int] = []

    def spawn(what: str, toy: bool, steps: int) -> dict:
        if path.exists():
            seen.append(len(json.loads(path.read_text())["ms"]["sonar"]))
        if what == "bandwidth":
            raise SystemExit("measuring bandwidth failed")
        return dict(OTHERS.get(what, STEPS))

    monkeypatch.setattr(bench, "spawn", spawn)
    with pytest.raises(SystemExit, match="measuring bandwidth failed"):
        bench.main(["--rounds", "2", "--modes", f"sonar,sonar,{bench.BASELINE}", "--json", str(path)])
    assert seen == [1, 1, 2, 2]
    written = json.loads(path.read_text())
    assert list(written["modes"]) == [bench.BASELINE, "sonar"]
    assert written["hook"] == OTHERS["hook"]


def test_each_goal_is_said_to_be_met_or_missed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "spawn", lambda what, *_: dict(OTHERS.get(what, STEPS)))
    path = tmp_path / "bench.json"
    bench.main(["--rounds", "1", "--modes", "sonar", "--json", str(path)])
    assert json.loads(path.read_text())["verdicts"] == {
        "sonar_ratio": "met",
        "hook_us": "missed",
        "share_of_copy": "met",
    }
    printed = capsys.readouterr().out
    assert "sonar against standard_no_expert_clip: 1.000 (goal at most 1.02: met)" in printed
    assert "61.0 us (goal at most 60: missed)" in printed
    assert "(goal at least 80%: met)" in printed


@pytest.mark.parametrize(
    ("ratio", "least", "verdict"), [(1.02, 1.0, "met"), (1.03, 1.01, "met within the spread"), (1.03, 1.025, "missed")]
)
def test_a_ratio_may_be_within_the_spread_over_rounds(ratio, least, verdict):
    assert bench.verdicts({"modes": {"sonar": {"ratio": ratio, "least": least}}}) == {"sonar_ratio": verdict}


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
