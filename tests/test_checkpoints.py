from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from helpers import PRECISION, AutomaticLM, batches, differing, fused, loader, make_trainer, small_model, snapshot
from lightning.pytorch.callbacks import ModelCheckpoint

from experiments.result import History, write_losses
from lightning_sonar import MODES, SonarMoEStrategy
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.strategies.checkpoints import AtomicCheckpointIO, CheckpointError, bytes_of, recover_folder

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    # What one mode clips and another does not is left out here, so that all can be compared.
    pytest.mark.filterwarnings("ignore:expert_clip='exact' has nothing to clip to"),
]

DATA = batches(6)


def resumable():
    return ResumableLoader(DATA, ShuffledBatches(len(DATA), 1, seed=0), collate_fn=lambda examples: examples[0])


def run(mode, steps, *, automatic=True, dtype=torch.float32, ckpt=None, optimizer=None, seed=0, **options):
    """Train in a mode (None: plain Lightning)."""
    module = (AutomaticLM if automatic else LanguageModel)(small_model(dtype=dtype, seed=seed), optimizer or fused())
    strategy = "auto" if mode is None else SonarMoEStrategy(mode=mode)
    trainer = make_trainer(strategy, steps, PRECISION[dtype], None, max_epochs=-1, **options)
    trainer.fit(module, resumable(), ckpt_path=ckpt, weights_only=True if ckpt else None)
    assert trainer.global_step == steps
    return trainer, module


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """A checkpoint after three steps, by mode, kind of optimization and dtype; made when first asked for."""
    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(mode, automatic, dtype):
        key = (mode, automatic, dtype)
        if key not in made:
            path = str(folder / f"{len(made)}.ckpt")
            trainer, _ = run(mode, 3, automatic=automatic, dtype=dtype)
            trainer.save_checkpoint(path)
            made[key] = path
        return made[key]

    return get


@pytest.fixture(scope="module")
def straight():
    made = {}

    def get(automatic, dtype):
        if (automatic, dtype) not in made:
            made[automatic, dtype] = snapshot(*run("standard", 6, automatic=automatic, dtype=dtype))
        return made[automatic, dtype]

    return get


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MODES, MODES)))
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_a_run_saved_in_one_mode_resumes_in_any_other_bitwise(first, second, automatic, half_way, straight):
    ckpt = half_way(first, automatic, torch.float32)
    resumed = snapshot(*run(second, 6, automatic=automatic, ckpt=ckpt, seed=9))
    assert differing(resumed, straight(automatic, torch.float32)) == []


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_runs_resume_bitwise_and_their_moments_stay_bfloat16(mode, half_way, straight):
    trainer, module = run(mode, 6, dtype=torch.bfloat16, ckpt=half_way(mode, True, torch.bfloat16), seed=9)
    values = snapshot(trainer, module)
    assert differing(values, straight(True, torch.bfloat16)) == []
    assert {v.dtype for n, v in values.items() if n.endswith(("exp_avg", "exp_avg_sq"))} == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["standard", "sonar"])
def test_plain_lightning_with_torchs_adamw_goes_on_where_a_mode_stopped_and_the_reverse(
    mode, half_way, straight, tmp_path
):
    plain = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)}
    forth = snapshot(*run(None, 6, ckpt=half_way(mode, True, torch.float32), seed=9, **plain))
    assert differing(forth, straight(True, torch.float32)) == []
    trainer, _ = run(None, 3, **plain)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    back = snapshot(*run(mode, 6, ckpt=str(tmp_path / "plain.ckpt"), seed=9))
    assert differing(back, straight(True, torch.float32)) == []


def test_optimizer_state_exists_before_the_first_step():
    seen = []

    class Watch(L.Callback):
        def on_train_start(self, trainer, module):
            seen.append(bytes_of(trainer.optimizers[0].state_dict()["state"]))

    trainer, _ = run("sonar", 3, callbacks=[Watch()])
    assert seen == [bytes_of(trainer.optimizers[0].state_dict()["state"])]


def test_a_checkpoint_between_backward_and_step_is_refused(tmp_path):
    class Early(L.Callback):
        def on_after_backward(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "early.ckpt")

    with pytest.raises(RuntimeError, match="between backward and the optimizer's step.*Save from on_train_batch_end"):
        run("sonar", 3, callbacks=[Early()])
    assert not list(tmp_path.iterdir())
    run("standard", 3, callbacks=[Early()])
    assert (tmp_path / "early.ckpt").exists(), "where nothing steps in backward the state is whole"


def test_an_exception_between_backward_and_step_writes_nothing_and_stays_the_error(tmp_path):
    class Fails(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step == 2:
                raise KeyError("on purpose")

    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=100)
    with (
        pytest.warns(UserWarning, match="was not written: training stopped between backward and"),
        pytest.raises(KeyError, match="on purpose"),
    ):
        run("sonar", 6, callbacks=[Fails(), saver], enable_checkpointing=True)
    assert not list(tmp_path.glob("*"))


def test_an_exception_between_steps_writes_a_whole_checkpoint(tmp_path):
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                raise KeyError("on purpose")

    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=100)
    with pytest.raises(KeyError, match="on purpose"):
        run("sonar", 6, callbacks=[Fails(), saver], enable_checkpointing=True)
    assert len(list(tmp_path.glob("*.ckpt"))) == 1


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    trainer, _ = run("sonar", 3)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"needs 0\.00 GB, but its disk has 0\.00 GB free; nothing was written"):
        trainer.save_checkpoint(tmp_path / "large.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_write_that_breaks_off_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    trainer, _ = run("sonar", 3)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()

    def breaks(checkpoint, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", breaks)
    with pytest.raises(OSError, match="No space left"):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.mark.parametrize("kind", ["truncated", "short", "empty", "text", "weights", "pickle"])
def test_a_file_that_cannot_be_resumed_from_is_named_and_left_alone(tmp_path, kind, half_way):
    path = tmp_path / "broken.ckpt"
    whole = Path(half_way("sonar", True, torch.float32)).read_bytes()
    if kind in ("weights", "pickle"):
        torch.save({"weight": torch.zeros(2)} if kind == "weights" else [1, 2], path)
    else:
        path.write_bytes(
            {
                "truncated": whole[: len(whole) // 2],
                "short": whole[:5000],
                "empty": b"",
                "text": b"hello, this is no checkpoint",
            }[kind]
        )
    before = path.read_bytes()
    with pytest.raises(
        CheckpointError, match=r"broken.ckpt (cannot be read|is no checkpoint).*left as it is|left as it was"
    ):
        run("sonar", 6, ckpt=str(path))
    assert path.read_bytes() == before


def test_weights_only_checkpoints_are_a_third_and_load_into_the_model(tmp_path):
    trainer, module = run("sonar", 3)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert os.path.getsize(tmp_path / "weights.ckpt") < 0.45 * os.path.getsize(tmp_path / "whole.ckpt")
    other = AutomaticLM(small_model(seed=5), fused())
    other.load_state_dict(torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_hyperparameters_are_plain_containers_and_load_with_weights_only(tmp_path):
    module = LanguageModel(small_model(), fused(), settings={"model": {"name": "olmoe"}, "seed": 3})
    trainer = make_trainer(SonarMoEStrategy(), 2)
    trainer.fit(module, loader(DATA))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert saved == {"settings": {"model": {"name": "olmoe"}, "seed": 3}}


def test_a_users_own_checkpoint_io_is_kept():
    class Mine(AtomicCheckpointIO):
        pass

    mine = Mine()
    assert SonarMoEStrategy(checkpoint_io=mine).checkpoint_io is mine
    assert type(SonarMoEStrategy().checkpoint_io) is AtomicCheckpointIO


def test_saving_does_not_disturb_training(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = snapshot(*run("sonar", 6, callbacks=[saver], enable_checkpointing=True))
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    assert differing(saved, snapshot(*run("sonar", 6))) == []


def test_a_checkpoint_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    seen = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor):
        seen.append(("on disk", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def named(path, target):
        seen.append(("named", path.stat().st_size))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", named)
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.ones(1000)}}, path)
    size = path.stat().st_size
    assert seen[:2] == [("on disk", size), ("named", size)]


def test_the_size_of_a_checkpoint_counts_each_storage_once():
    whole = torch.zeros(10)
    nested = {"a": whole, "b": [whole[:5], whole.view(2, 5)], "c": (torch.zeros(3, dtype=torch.bfloat16), 1, None)}
    assert bytes_of(nested) == 46


def test_a_folder_comes_back_from_its_old_name_only_where_none_has_its_own(tmp_path):
    path, old = tmp_path / "a.ckpt", tmp_path / "a.ckpt.old"
    for folder in (path, old):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    recover_folder(path)
    assert [(folder / "name").read_text() for folder in (path, old)] == ["a.ckpt", "a.ckpt.old"]
    (path / "name").unlink()
    path.rmdir()
    recover_folder(path)
    assert (path / "name").read_text() == "a.ckpt.old"
    assert not old.exists()


def test_losses_of_a_resumed_run_are_numbered_on(half_way, tmp_path):
    for name, ckpt, first in (("new", None, 1), ("resumed", half_way("sonar", False, torch.float32), 4)):
        history = History()
        run("sonar", 6, automatic=False, ckpt=ckpt, callbacks=[history])
        write_losses(tmp_path / name, history.losses, history.first)
        lines = (tmp_path / name).read_text().splitlines()
        assert [line.split(",")[0] for line in lines] == ["batch", *map(str, range(first, 7))]
    assert lines[1:] == (tmp_path / "new").read_text().splitlines()[4:]
