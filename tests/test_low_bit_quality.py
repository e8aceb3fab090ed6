"""The comparison of low-bit optimizers: what is run, what is not run again, and what the table says of it."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from experiments import low_bit_quality as quality


def _result(loss):
    return {"heldout_loss": loss, "large_updates": 0, "peak_memory_bytes": 10}


@pytest.fixture
def runs(monkeypatch):
    """Processes that leave a result; their overrides, one list a process."""
    seen: list[list[str]] = []

    def run(command, **_):
        overrides = command[2:]
        seen.append(overrides)
        folder = next(part.split("=", 1)[1] for part in overrides if part.startswith("hydra.run.dir="))
        quality.Path(folder).mkdir(parents=True)
        seed = next(int(part[5:]) for part in overrides if part.startswith("seed="))
        result = _result(4.0 + len(seen) / 1000) | {"seed": seed}
        (quality.Path(folder) / "result.json").write_text(json.dumps(result))
        return SimpleNamespace(returncode=0, stdout="", stderr="an update 3 times its largest weight\n")

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_each_run_is_made_once_and_read_afterwards(tmp_path, runs):
    arguments = ["--seeds", "0,1", "--optimizers", "adamw4bit", "--out", str(tmp_path), "model.num_layers=2"]
    assert quality.main(arguments) == 0
    assert len(runs) == 4
    assert all("model.num_layers=2" in overrides for overrides in runs)
    table = (tmp_path / "low_bit_quality.md").read_text()
    assert quality.main(arguments) == 0
    assert len(runs) == 4
    assert (tmp_path / "low_bit_quality.md").read_text() == table
    assert "| adamw4bit | 4.0035 | +0.0020 | 0.0000 | +0.0020, +0.0020 | 2 | none set |" in table


def test_a_run_with_other_overrides_is_not_taken_for_this_one(tmp_path, runs):
    common = ["--seeds", "0", "--optimizers", "adamw4bit", "--out", str(tmp_path)]
    quality.main(common)
    for folder in (tmp_path / "runs").iterdir():
        folder.rename(tmp_path / folder.name)
    quality.main([*common, "model.num_layers=1"])
    assert len(runs) == 4


def test_the_noise_of_training_is_measured_by_the_baseline_itself(tmp_path, runs):
    quality.run_of(quality.NOISE, 3, 20, tmp_path)
    assert "optimizer=fused_adamw" in runs[0]
    assert "optimizer.eps=1.1e-8" in runs[0]
    assert (tmp_path / "fused_adamw-optimizer.eps-1.1e-8-seed3-steps20.json").exists()
    assert quality.OPTIMIZERS[0] == quality.NOISE


def test_gaps_are_those_to_the_baseline_of_the_same_seed():
    runs = {
        quality.BASELINE: [_result(4.0) | {"seed": 0}, _result(5.0) | {"seed": 1}],
        "adamw8bit": [_result(4.001) | {"seed": 0}, _result(5.006) | {"seed": 1}],
    }
    found = quality.gaps_of(runs)["adamw8bit"]
    assert found["gaps"] == pytest.approx([0.001, 0.006])
    assert found["mean"] == pytest.approx(0.0035)
    assert found["goal"] == "not met"


def test_the_goal_is_for_8_bit_states_only():
    assert quality.judged("bnb_adamw8bit", [0.002, 0.004]) == "met"
    assert quality.judged("adamw8bit_experts", [0.004, 0.003]) == "not met"
    assert quality.judged("adamw4bit", [1.0]) == "none set"


def test_a_failed_run_says_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2, stdout="", stderr="no such optimizer")
    )
    with pytest.raises(RuntimeError, match=r"(?s)adamw4bit-seed0-steps5 failed with exit code 2.*no such optimizer"):
        quality.run_of("adamw4bit", 0, 5, tmp_path)
