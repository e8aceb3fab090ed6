"""What several ranks need of settings, checkpoints and processes, without starting any."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from test_configs import composed
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.data import DistributedSampler

from experiments.rank_memory import bucket_bytes, rank_bytes, ranks_that_fit
from experiments.resume import find_checkpoint, warn_if_over
from experiments.settings import SettingsError, check_values, plan_at, settle, try_strategy
from lightning_sonar import SonarMoEDDPStrategy, SonarMoEFSDPStrategy, SonarMoEStrategy
from lightning_sonar.data.module import InstructionData
from lightning_sonar.strategies.checkpoints import AtomicCheckpointIO, CheckpointError
from lightning_sonar.strategies.children import end_children

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


# Data.


def test_one_rank_of_a_parallel_strategy_keeps_its_loaders_from_lightning(tmp_path):
    data = InstructionData(seq_len=64, max_records=100, cache_dir=str(tmp_path), batch_size=2)
    data.setup()
    training, heldout = data.train_dataloader(), data.val_dataloader()
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 1, "rank": 0})
    for alone, parallel in ((training, data.train_dataloader()), (heldout, data.val_dataloader())):
        assert isinstance(parallel.sampler, DistributedSampler)
        assert not isinstance(alone.sampler, DistributedSampler)
        pairs = zip(alone, parallel, strict=True)
        assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in pairs)


# Sizes.


@pytest.fixture(scope="module")
def full():
    """The plan of full OLMoE, storages rounded as on a CPU."""
    return plan_at(composed("model.size=full"), "full", CPU)


def on_gpus(monkeypatch, there):
    monkeypatch.setattr("experiments.settings.device_of", lambda cfg: GPU)
    monkeypatch.setattr("experiments.settings.memory_there", lambda device: there * 10**9)
    monkeypatch.setattr("experiments.settings.checkpoint_reachable", lambda source: True)
    monkeypatch.setattr("experiments.settings.resolve_backend", lambda name, device: "grouped_mm")


def test_a_model_that_fits_in_shards_is_taken_at_full_size_under_fsdp(monkeypatch, full):
    monkeypatch.setattr("experiments.settings.plan_at", lambda cfg, size, device: full)
    on_gpus(monkeypatch, 40)
    said: list[str] = []
    cfg = settle(composed("trainer=fsdp", "trainer.devices=2", "model.size=auto"), said.append)
    assert cfg.model.size == "full"
    assert f"{full.per_rank_bytes(2) / 1e9:.1f} GB a rank on 2 ranks" in said[0]
    assert full.per_rank_bytes(2) < 40e9 < full.peak_bytes


@pytest.mark.parametrize("trainer", [["trainer=default"], ["trainer=ddp", "trainer.devices=2"]])
def test_a_refusal_names_the_number_of_shards_that_fits(monkeypatch, full, trainer):
    monkeypatch.setattr("experiments.settings.plan_at", lambda cfg, size, device: full)
    on_gpus(monkeypatch, 20)
    with pytest.raises(SettingsError) as caught:
        settle(composed("model.size=full", *trainer))
    count = ranks_that_fit(full, 20 * 10**9)
    assert count is not None
    assert full.per_rank_bytes(count) <= 20e9 < full.per_rank_bytes(count - 1)
    assert f"trainer=fsdp trainer.devices={count}." in str(caught.value)
    assert "plan.py model=olmoe ranks=2,4,8" in str(caught.value)


def test_a_refusal_names_no_number_where_none_fits(monkeypatch, full):
    monkeypatch.setattr("experiments.settings.plan_at", lambda cfg, size, device: full)
    on_gpus(monkeypatch, 4)
    with pytest.raises(SettingsError) as caught:
        settle(composed("model.size=full"))
    assert "trainer=fsdp" not in str(caught.value)
    assert "ranks=2,4,8" in str(caught.value)


def test_the_ranks_of_one_machine_share_a_cpus_memory(monkeypatch, full):
    monkeypatch.setattr("experiments.settings.plan_at", lambda cfg, size, device: full)
    together = 2 * full.per_rank_bytes(2)
    monkeypatch.setattr("experiments.settings.memory_there", lambda device: together - 1)
    arguments = ["trainer=fsdp", "trainer.devices=2", "model.size=full", "trainer.accelerator=cpu"]
    with pytest.raises(SettingsError, match=f"{together / 1e9:.1f} GB for those of one machine"):
        settle(composed(*arguments))
    monkeypatch.setattr("experiments.settings.memory_there", lambda device: together)
    assert settle(composed(*arguments)).model.size == "full"


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_a_parallel_strategys_plan_is_that_of_one_device(trainer):
    small = ["model.size=tiny", "model.num_layers=1", "data.seq_len=32", "mode=sonar_exact_clip"]
    alone = plan_at(composed(*small), "tiny", CPU)
    assert plan_at(composed(*small, f"trainer={trainer}"), "tiny", CPU) == alone


def test_buckets_hold_what_is_not_updated_inside_backward(full):
    dense = 2 * (full.params_total - full.params_expert)
    assert bucket_bytes(full) == dense
    assert rank_bytes(full, 2, sharded=False, device="cuda") == full.peak_bytes + dense
    assert rank_bytes(full, 2, sharded=False, device="cpu") == full.peak_bytes
    assert rank_bytes(full, 2, sharded=True, device="cuda") == full.per_rank_bytes(2)
    assert rank_bytes(full, 1, sharded=True, device="cuda") == full.peak_bytes


# Settings.


def test_several_devices_with_the_strategy_of_one_are_refused_before_anything_is_built():
    with pytest.raises(SettingsError, match="trainer.devices=2 .*trainer=ddp .*trainer=fsdp"):
        check_values(composed("trainer.devices=2", "trainer.accelerator=cpu"))
    check_values(composed("trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu"))


def test_the_strategy_of_one_device_names_those_of_several():
    strategy = SonarMoEStrategy()
    strategy.parallel_devices = [CPU, CPU]
    with pytest.raises(ValueError, match="SonarMoEDDPStrategy .*SonarMoEFSDPStrategy"):
        _ = strategy.root_device


@pytest.mark.parametrize("kind", [SonarMoEStrategy, SonarMoEDDPStrategy, SonarMoEFSDPStrategy])
def test_a_check_whose_findings_are_ignored_is_refused_when_the_strategy_is_made(kind):
    with pytest.raises(ValueError, match="leave one of them out"):
        kind(check="gradient", on_nonfinite="ignore")


def test_such_a_check_is_one_message_of_the_settings():
    with pytest.raises(SettingsError, match=r"^trainer.strategy: check='gradient' looks for"):
        try_strategy(composed("mode.check=gradient", "mode.on_nonfinite=ignore"))


# Checkpoints.


def test_a_folder_is_refused_where_a_file_is_read(tmp_path):
    with pytest.raises(CheckpointError, match="is a sharded checkpoint, a folder. Resume with trainer=fsdp"):
        AtomicCheckpointIO().load_checkpoint(tmp_path)


def describe(folder: Path) -> None:
    """Make a folder what a sharded checkpoint without tensors is."""
    metadata = Metadata(state_dict_metadata={}, planner_data=None, storage_data={})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def checkpoint(folder: Path, name: str, age: float = 0.0) -> str:
    path = folder / "checkpoints" / name
    path.mkdir(parents=True)
    describe(path)
    then = time.time() - age
    os.utime(path, (then, then))
    return str(path)


def test_auto_starts_anew_where_the_run_has_no_checkpoint_and_never_takes_another_runs(tmp_path):
    other, own = tmp_path / "other", tmp_path / "own"
    theirs = checkpoint(other, "last.ckpt")
    assert find_checkpoint("auto", own) is None
    assert find_checkpoint("last", own) == theirs
    checkpoint(own, "step-5.ckpt", age=100)
    newest = checkpoint(own, "step-9.ckpt", age=50)
    assert find_checkpoint("auto", own) == newest
    assert find_checkpoint("last", own) == newest


def test_no_checkpoint_at_all_is_an_error_for_last_that_names_auto(tmp_path):
    with pytest.raises(SettingsError, match="ckpt_path=auto"):
        find_checkpoint("last", tmp_path / "own")


@pytest.mark.parametrize("wanted", ["auto", "last", "checkpoints/step-5.ckpt"])
def test_a_folder_that_lost_its_name_is_found_under_it(tmp_path, wanted):
    checkpoint(tmp_path, "step-5.ckpt.old")
    checkpoint(tmp_path, "step-5.ckpt.part")
    named = str(tmp_path / wanted) if "/" in wanted else wanted
    assert find_checkpoint(named, tmp_path) == str(tmp_path / "checkpoints/step-5.ckpt")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-5.ckpt", "step-5.ckpt.part"}


class Killed(BaseException):
    """Stands for the end of the process: nothing may catch it."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_sharded_checkpoint_is_there_wherever_saving_the_next_one_is_cut_off(tmp_path, monkeypatch, renames):
    def write(self, checkpoint, filepath, storage_options=None):
        filepath.mkdir()
        describe(filepath)
        (filepath / "value").write_text(checkpoint["value"])

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", write)
    monkeypatch.setattr(
        ModelParallelStrategy, "load_checkpoint", lambda self, path, **_: {"value": (path / "value").read_text()}
    )
    path = tmp_path / "last.ckpt"
    SonarMoEFSDPStrategy().save_checkpoint({"value": "first"}, path)
    rename, left = Path.rename, renames

    def rename_until_killed(self, target):
        nonlocal left
        if not left:
            raise Killed
        left -= 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_until_killed)
        if renames < 2:
            with pytest.raises(Killed):
                SonarMoEFSDPStrategy().save_checkpoint({"value": "second"}, path)
        else:
            SonarMoEFSDPStrategy().save_checkpoint({"value": "second"}, path)
    expected = "second" if renames == 2 else "first"
    assert SonarMoEFSDPStrategy().load_checkpoint(path) == {"value": expected}
    SonarMoEFSDPStrategy().save_checkpoint({"value": "third"}, path)
    assert SonarMoEFSDPStrategy().load_checkpoint(path) == {"value": "third"}
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


def test_saving_over_a_lost_name_never_leaves_fewer_than_one_checkpoint(tmp_path, monkeypatch):
    path, old = tmp_path / "last.ckpt", tmp_path / "last.ckpt.old"
    old.mkdir()

    def killed(self, checkpoint, filepath, storage_options=None):
        raise Killed

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", killed)
    with pytest.raises(Killed):
        SonarMoEFSDPStrategy().save_checkpoint({}, path)
    assert path.is_dir()


@pytest.mark.parametrize(("step", "most", "warns"), [(4, 4, True), (5, 4, True), (3, 4, False), (4, -1, False)])
def test_a_run_resumed_at_its_end_warns(recwarn, step, most, warns):
    warn_if_over("some.ckpt", step, most)
    assert [str(one.message)[:22] for one in recwarn] == ([f"some.ckpt is of step {step}"] if warns else [])


# Processes.


def child(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_stuck_rank_is_killed_and_one_that_ends_by_itself_is_not():
    stuck, ending = child("import time; time.sleep(600)"), child("import time; time.sleep(0.2)")
    end_children(SimpleNamespace(procs=[stuck, ending]), grace=3)
    assert stuck.wait(10) == -9
    assert ending.wait(10) == 0


def test_nothing_is_ended_where_nothing_was_started():
    end_children(None)
    end_children(SimpleNamespace(procs=[]))
