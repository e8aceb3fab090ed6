"""Signals that meet a training step anywhere: what is saved belongs to one step, and goes on as if undisturbed."""

from __future__ import annotations

import itertools
import os
import signal
from functools import cache
from pathlib import Path

import lightning as L
import lightning.pytorch.trainer.connectors.signal_connector as lightnings
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fused, make_trainer, small_model, snapshot
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from experiments.endings import RunCheckpoint
from lightning_sonar import SonarMoEStrategy
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.optim import adamw

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*accumulat.*"),
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

DATA = batches(5)
STEPS, AT = 7, 3
MODES = ("standard", "sonar", "in_backward_all", "sonar_exact_clip")
PLACES = ("forward", "backward", "step")


class Sends(L.Callback):
    """Sends signals to this process, once, in the step after `AT`.

    Args:
        place: ``forward``; ``backward``, when the last layer's experts have been updated in it; ``step``, between two
            updates of dense tensors.
        signals: one after another.
    """

    def __init__(self, place: str, *signals: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.signals, self.sent = place, signals, False
        self.monkeypatch, self.hook, self.updates = monkeypatch, None, 0
        self.trainer: L.Trainer | None = None

    def fire(self, *_: object) -> None:
        if not self.sent and self.trainer is not None and self.trainer.global_step == AT:
            self.sent = True
            for signum in self.signals:
                os.kill(os.getpid(), signum)

    def on_train_start(self, trainer, module):
        self.trainer = trainer
        if self.place == "forward":
            self.hook = module.model.register_forward_hook(self.fire)
        elif self.place == "backward":
            self.hook = next(p for p in module.parameters() if p.ndim == 3).register_hook(self.fire)
        else:
            update = adamw.adamw_

            def counted(parameter, *args, **kwargs):
                update(parameter, *args, **kwargs)
                self.updates += trainer.global_step == AT and parameter.ndim < 3
                if self.updates == 3:
                    self.fire()

            self.monkeypatch.setattr(adamw, "adamw_", counted)

    def teardown(self, trainer, module, stage):
        if self.hook is not None:
            self.hook.remove()


def rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS)


def run(mode, automatic=True, *, callbacks=(), ckpt=None, seed=0, **options):
    module = (AutomaticLM if automatic else LanguageModel)(small_model(seed=seed), fused(), rate)
    clip = None if mode == "in_backward_all" else 0.5
    trainer = make_trainer(
        SonarMoEStrategy(mode=mode),
        STEPS,
        clip=clip,
        max_epochs=-1,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **options,
    )
    data = ResumableLoader(DATA, ShuffledBatches(len(DATA), 1, seed=0), collate_fn=lambda examples: examples[0])
    trainer.fit(module, data, ckpt_path=ckpt, weights_only=True if ckpt else None)
    return trainer, module


@cache
def undisturbed(mode, automatic, microbatches=1):
    return snapshot(*run(mode, automatic, accumulate_grad_batches=microbatches))


def newest(folder: Path) -> tuple[Path, int]:
    path = max(folder.glob("*.ckpt"), key=lambda found: found.stat().st_mtime_ns)
    return path, torch.load(path, weights_only=True)["global_step"]


def goes_on(path: Path, mode, automatic, microbatches=1) -> bool:
    resumed = snapshot(*run(mode, automatic, ckpt=str(path), seed=9, accumulate_grad_batches=microbatches))
    return differing(resumed, undisturbed(mode, automatic, microbatches)) == []


CASES = [(mode, automatic, place) for mode, automatic, place in itertools.product(MODES, (True, False), PLACES)]
# In the last of them nothing is left to step after backward.
CASES = [case for case in CASES if case[0] != "in_backward_all" or case[2] != "step"]
QUICK = {
    ("sonar", True, "backward"),
    ("sonar", False, "step"),
    ("standard", True, "step"),
    ("standard", False, "forward"),
}
MARKED = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize(("mode", "automatic", "place"), MARKED)
def test_ctrl_c_inside_a_step_saves_nothing_of_it_and_the_checkpoint_before_goes_on(
    tmp_path, monkeypatch, mode, automatic, place
):
    saver = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=2, save_top_k=-1)
    sends = Sends(place, signal.SIGINT, monkeypatch=monkeypatch)
    with pytest.warns(UserWarning, match="was not written: training stopped"), pytest.raises(SystemExit) as caught:
        run(mode, automatic, callbacks=[sends, saver])
    assert sends.sent
    assert caught.value.code == 1
    monkeypatch.undo()
    path, step = newest(tmp_path)
    assert (len(list(tmp_path.iterdir())), step) == (1, 2)
    assert goes_on(path, mode, automatic)


@pytest.mark.parametrize(("mode", "automatic", "place"), MARKED)
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_inside_a_step_ends_the_run_after_it_with_a_checkpoint_of_it(
    tmp_path, monkeypatch, mode, automatic, place, times
):
    saver = RunCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2)
    sends = Sends(place, *[signal.SIGTERM] * times, monkeypatch=monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SIGTERMException):
        run(mode, automatic, callbacks=[sends, saver])
    assert sends.sent
    monkeypatch.undo()
    path, step = newest(tmp_path)
    assert (len(list(tmp_path.iterdir())), step) == (1, AT + 1)
    assert goes_on(path, mode, automatic)
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_after_a_step_that_no_checkpoint_is_due_at_is_saved_in_the_newest_ones_place(tmp_path, monkeypatch):
    saver = RunCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
    with pytest.raises(SIGTERMException):
        run("sonar", callbacks=[Sends("backward", signal.SIGTERM, monkeypatch=monkeypatch), saver])
    path, step = newest(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == ["step=4.ckpt"]
    assert step == AT + 1
    assert goes_on(path, "sonar", True)


@pytest.mark.parametrize("automatic", [True, False])
def test_sigterm_between_two_microbatches_saves_nothing_and_keeps_the_checkpoint_before(
    tmp_path, monkeypatch, automatic
):
    saver = RunCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3)
    sends = Sends("forward", signal.SIGTERM, monkeypatch=monkeypatch)
    with pytest.raises(SIGTERMException):
        run("sonar", automatic, callbacks=[sends, saver], accumulate_grad_batches=2)
    path, step = newest(tmp_path)
    assert (len(list(tmp_path.iterdir())), step) == (1, AT)
    assert goes_on(path, "sonar", automatic, microbatches=2)


@pytest.mark.parametrize("mode", ["standard", "sonar"])
def test_after_a_broken_off_step_a_checkpoint_asked_for_is_refused_until_the_next_fit(tmp_path, monkeypatch, mode):
    module, data = AutomaticLM(small_model(), fused()), DATA
    trainer = make_trainer(SonarMoEStrategy(mode=mode), STEPS, max_epochs=-1)
    trainer.callbacks.append(Sends("backward", signal.SIGINT, monkeypatch=monkeypatch))
    loader = ResumableLoader(data, ShuffledBatches(len(data), 1, seed=0), collate_fn=lambda examples: examples[0])
    with pytest.raises(SystemExit):
        trainer.fit(module, loader)
    with pytest.raises(RuntimeError, match=r"a fit that was broken off in the middle of a step.*not written"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())
    trainer = make_trainer(SonarMoEStrategy(mode=mode), 2, max_epochs=-1)
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()


SLURM = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "1", "NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0"}
REQUEUES = [("standard", True, "step", 1), ("sonar", True, "backward", 1), ("sonar", False, "backward", 2)]
REQUEUES += [("sonar_exact_clip", False, "backward", 1)]


@pytest.mark.parametrize(("mode", "automatic", "place", "microbatches"), REQUEUES)
def test_slurms_requeue_signal_inside_a_step_is_answered_after_it_with_a_checkpoint_of_it(
    tmp_path, monkeypatch, mode, automatic, place, microbatches
):
    wanted = undisturbed(mode, automatic, microbatches)
    called: list[list[str]] = []
    with monkeypatch.context() as slurm:
        for name, value in {**SLURM, "NODELIST": "localhost"}.items():
            slurm.setenv(f"SLURM_{name}", value)
        slurm.setattr(lightnings, "call", lambda command: called.append(command) or 0)
        trainer, module = run(
            mode,
            automatic,
            callbacks=[Sends(place, signal.SIGUSR1, monkeypatch=slurm)],
            plugins=[SLURMEnvironment(auto_requeue=True)],
            default_root_dir=tmp_path,
            accumulate_grad_batches=microbatches,
        )
    assert differing(snapshot(trainer, module), wanted) == [], "the run itself is not disturbed"
    assert called == [["scontrol", "requeue", "7"]]
    path, step = newest(tmp_path)
    assert (path.name, step) == ("hpc_ckpt_1.ckpt", AT + 1)
    assert goes_on(path, mode, automatic, microbatches)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["Sends"]
