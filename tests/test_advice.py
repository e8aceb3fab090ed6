"""When a run is out of memory, its plans say which change fits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from test_out_of_memory import NEEDS

from experiments import advice
from experiments.advice import adviser, changed, changes
from experiments.settings import SettingsError, plan_at, settle
from lightning_sonar.config_dir import config_dir
from lightning_sonar.memory.out_of_memory import Alive, failure
from lightning_sonar.modes import MODES

CPU = torch.device("cpu")
TINY = ["model=olmoe", "model.size=tiny", "model.num_layers=1", "data.batch_size=8", "data.seq_len=64"]


def settled(*overrides: str) -> DictConfig:
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        fixed = ["trainer.default_root_dir=null", "callbacks=none", "logger=none", "trainer.accelerator=cpu"]
        return settle(compose("config", overrides=[*TINY, *fixed, *overrides]))


def ran_out(capacity: int, process: int = 0):
    told = failure(
        MemoryError(), NEEDS, Alive(100, 200, 0, 0, 50, "somewhere"), capacity=capacity, mode=MODES["standard"],
        accumulating=False, asked=None, asked_gradient=False, device="cpu", phase="forward", step=0,
    )  # fmt: skip
    return dataclasses.replace(told, process_bytes=process)


def test_each_change_is_typed_as_the_command_takes_it_and_none_is_there_already():
    typed = [str(change) for change in changes(settled("mode=standard"))]
    assert typed == [
        "model.loss=chunked",
        "mode=sonar",
        "model.checkpointing=true",
        "data.batch_size=4",
        "model.loss=chunked mode=sonar model.checkpointing=true",
    ]
    lean = settled("mode=sonar", "model.loss=chunked", "model.checkpointing=true", "data.batch_size=2")
    assert [str(change) for change in changes(lean)] == ["data.batch_size=1"]


def test_what_is_said_to_fit_fits_by_its_plan_and_the_cheapest_comes_first():
    cfg = settled("mode=standard")
    plans = {str(c): plan_at(changed(cfg, c), "tiny", CPU).peak_bytes for c in changes(cfg)}
    room = sorted(plans.values())[2]
    lines = adviser(cfg, CPU)(ran_out(room + 1000, process=1000))
    named = [line.split(". ", 1)[1].split(": needs")[0] for line in lines]
    assert named == [name for name, nbytes in plans.items() if nbytes <= room]
    assert len(named) >= 3


def test_where_nothing_fits_the_least_is_told(monkeypatch):
    cfg = settled("mode=sonar", "data.batch_size=1", "model.checkpointing=true")
    (line,) = adviser(cfg, CPU)(ran_out(1000))
    assert line.startswith("nothing of what was planned; the least was model.loss=chunked: needs")


def test_a_change_that_cannot_be_planned_is_said_so(monkeypatch):
    def refuses(*_: object):
        raise SettingsError("no such thing\nmore")

    monkeypatch.setattr(advice, "plan_at", refuses)
    lines = adviser(settled("mode=sonar"), CPU)(ran_out(1000))
    assert lines[0] == "model.loss=chunked: no plan (no such thing)"


@pytest.mark.parametrize("mode", ["standard", "standard_no_expert_clip"])
def test_sonar_is_offered_to_modes_that_keep_expert_gradients(mode):
    assert "mode=sonar" in map(str, changes(settled(f"mode={mode}")))
