"""Checkpoints are read as tensors and plain values only: an object in one is refused by name, and nothing runs."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from config_space import run
from helpers import batches, fit, loader, make_trainer, small_model
from lightning.pytorch.plugins.io import TorchCheckpointIO
from security_cases import Malicious, small_run

from experiments.resume import find_checkpoint
from lightning_sonar import SonarMoEFSDPStrategy, SonarMoEStrategy
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.strategies.checkpoints import AtomicCheckpointIO, CheckpointError
from lightning_sonar.strategies.untrusted import METADATA, check_plain, read_metadata


@pytest.fixture
def mark(tmp_path):
    """The file that a malicious object makes when it is run, which this shows to work."""
    path = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Malicious(path))).close()
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a real fit."""
    path = tmp_path_factory.mktemp("trained") / "a.ckpt"
    trainer, _ = fit(small_model(), "sonar", steps=2, data=batches(2))
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=True)


PLACES = {
    "everything": lambda saved, evil: evil,
    "weights": lambda saved, evil: {**saved, "state_dict": {**saved["state_dict"], "model.extra": evil}},
    "optimizer": lambda saved, evil: {**saved, "optimizer_states": [evil]},
    "optimizer's extra state": lambda saved, evil: {
        **saved,
        "optimizer_states": [{**saved["optimizer_states"][0], "extra": {"deep": [evil]}}],
    },
    "own state": lambda saved, evil: {**saved, "lightning_sonar": {"last_norms": evil}},
    "callbacks": lambda saved, evil: {**saved, "callbacks": {"ModelCheckpoint": evil}},
    "hyperparameters": lambda saved, evil: {**saved, "hyper_parameters": {"lr": evil}},
    "loops": lambda saved, evil: {**saved, "loops": {"fit_loop": evil}},
}


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "bare"])
@pytest.mark.parametrize("place", PLACES)
def test_an_object_in_a_checkpoint_is_refused_and_not_run(tmp_path, mark, trained, place, archive):
    path = tmp_path / "evil.ckpt"
    torch.save(PLACES[place](trained, Malicious(mark)), path, _use_new_zipfile_serialization=archive)
    strategy = SonarMoEStrategy()
    for load in (AtomicCheckpointIO().load_checkpoint, strategy.load_checkpoint):
        for options in ({}, {"weights_only": True}):
            with pytest.raises(CheckpointError, match=r"was not loaded: only tensors and plain values"):
                load(path, **options)


def test_resuming_a_fit_from_a_malicious_checkpoint_runs_nothing(tmp_path, mark, trained):
    path = tmp_path / "evil.ckpt"
    torch.save(PLACES["optimizer"](trained, Malicious(mark)), path)
    module = LanguageModel(small_model(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(CheckpointError, match=r"it names \S*open, which is neither"):
        make_trainer(SonarMoEStrategy(), 4).fit(module, loader(batches(4)), ckpt_path=path)


def test_a_remote_checkpoint_is_read_as_carefully_as_a_local_one(monkeypatch):
    asked = []

    def load(self, path, map_location=None, weights_only=None):
        asked.append(weights_only)
        return {"state_dict": {}}

    monkeypatch.setattr(TorchCheckpointIO, "load_checkpoint", load)
    for options in ({}, {"weights_only": None}, {"weights_only": False}):
        AtomicCheckpointIO().load_checkpoint("https://example.org/a.ckpt", **options)
    assert asked == [True, True, False]  # False is what the user has said


def sharded(folder: Path, **values) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not distributed
        torch.distributed.checkpoint.save(
            {"weight": torch.ones(2, dtype=torch.bfloat16), **values}, checkpoint_id=folder
        )
    return folder


def test_a_sharded_checkpoint_of_tensors_and_plain_values_is_read(tmp_path):
    plain = {"param_groups": {"lr": 0.1, "betas": (0.9, 0.99), "fused": None, "name": "a", "step": torch.tensor(1.0)}}
    folder = sharded(tmp_path / "a.ckpt", **plain)
    check_plain(folder)
    theirs = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    ours = read_metadata(folder)
    assert (ours.state_dict_metadata, ours.storage_data) == (theirs.state_dict_metadata, theirs.storage_data)


def refuses(folder: Path, says: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=says):
        check_plain(folder)
    strategy = SonarMoEFSDPStrategy()
    strategy.__class__ = type("Alone", (SonarMoEFSDPStrategy,), {"is_global_zero": True})  # no ranks are started
    strategy.barrier = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"was not loaded: only tensors and plain values"):
        strategy.load_checkpoint(folder)


def test_a_sharded_checkpoint_whose_metadata_would_run_code_is_refused(tmp_path, mark):
    folder = sharded(tmp_path / "checkpoints" / "a.ckpt")
    (folder / METADATA).write_bytes(pickle.dumps(Malicious(mark)))
    refuses(folder, r"it names \S*open, which is no part")
    with pytest.raises(CheckpointError, match=r"a\.ckpt cannot be read as a checkpoint"):
        find_checkpoint("auto", tmp_path)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
        ("torch.serialization", "load"),
        ("torch", "load"),
        ("pathlib", "Path.unlink"),
        ("builtins", "getattr"),
        ("collections", "__builtins__"),
    ],
)
def test_metadata_reach_nothing_through_the_modules_that_they_may_name(tmp_path, module, name):
    folder = sharded(tmp_path / "a.ckpt")
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    (folder / METADATA).write_bytes(b"\x80\x04" + words + b"\x93.")
    refuses(folder, "which is no part of a checkpoint's metadata")


def test_a_sharded_checkpoint_with_an_object_among_its_values_is_refused(tmp_path, mark):
    refuses(sharded(tmp_path / "a.ckpt", extra=Malicious(mark)), "Weights only load failed")


def test_a_sharded_checkpoint_that_names_files_outside_is_refused(tmp_path):
    folder = sharded(tmp_path / "a.ckpt")
    metadata = read_metadata(folder)
    for part in metadata.storage_data.values():
        part.relative_path = f"../b.ckpt/{part.relative_path}"
    sharded(tmp_path / "b.ckpt")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    refuses(folder, "a file outside of its folder")


def test_the_command_refuses_a_malicious_checkpoint_in_one_message(tmp_path, mark, trained):
    torch.save(PLACES["optimizer"](trained, Malicious(mark)), tmp_path / "evil.ckpt")
    ended = run([*small_run(tmp_path), f"ckpt_path='{tmp_path}/evil.ckpt'"], tmp_path / "run")
    assert (ended.kind, ended.code) == ("refused", 2), ended.message
    assert "evil.ckpt was not loaded: only tensors and plain values" in ended.message
    assert "Traceback" not in ended.message
