"""Folders that two runs want, and runs that are stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fault_files import save, step_of
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from experiments import job, sweep
from experiments.folder import FolderError, check_writable, is_taken, set_aside, take
from experiments.launch import RunFolder, SweepFolder, Terminated
from experiments.result import History, write_json
from experiments.resume import find_checkpoint
from experiments.status import read_json

ROOT = Path(__file__).resolve().parent.parent

# Folders.


def test_a_checkpoint_that_has_gone_by_the_time_it_is_read_is_none(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-1.ckpt").symlink_to(tmp_path / "gone")
    assert find_checkpoint("auto", tmp_path) is None


def test_files_of_an_earlier_run_get_another_name_and_stay(tmp_path):
    (tmp_path / "result.json").write_text("first")
    (tmp_path / "metrics.csv").write_text("first")
    (tmp_path / "mine.txt").write_text("kept")
    save(tmp_path / "checkpoints/last.ckpt", 1)
    (tmp_path / "checkpoints/step-2.ckpt.part").write_text("half")
    assert set_aside(tmp_path, None) == ["result.1.json", "metrics.1.csv", "checkpoints.1"]
    assert step_of(tmp_path / "checkpoints.1/last.ckpt") == 1
    assert not (tmp_path / "checkpoints.1/step-2.ckpt.part").exists()
    assert find_checkpoint("auto", tmp_path) is None
    resumed_from = save(tmp_path / "checkpoints/last.ckpt", 2)
    (tmp_path / "result.json").write_text("second")
    assert set_aside(tmp_path, str(resumed_from)) == ["result.2.json"]
    assert step_of(resumed_from) == 2
    assert (tmp_path / "result.1.json").read_text() == "first"
    assert (tmp_path / "mine.txt").read_text() == "kept"
    assert set_aside(tmp_path / "new", None) == []


HOLDING = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from experiments import folder; "
HOLDING += "folder.take(Path(sys.argv[2])); print('taken', flush=True); sys.stdin.read()"


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen]:
    call = [sys.executable, "-c", HOLDING, str(ROOT), str(folder)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_folder_is_taken_by_one_process_at_a_time_and_free_again_however_that_ends(tmp_path):
    with held(tmp_path) as process:
        assert is_taken(tmp_path)
        with pytest.raises(FolderError, match=r"Another run is at work in .* Nothing was changed"):
            take(tmp_path)
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(SystemExit) as caught:
            RunFolder().on_run_start(OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}}))
        assert caught.value.code == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == before == [".lock"]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_taken(tmp_path)
        take(tmp_path)
        take(tmp_path)


def test_a_sweep_leaves_a_job_alone_that_another_process_trains(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "_spawn", lambda *_: pytest.fail("was started"))
    cfg = OmegaConf.create({"objective": "heldout_loss", "ckpt_path": None})
    (tmp_path / "error.txt").write_text("theirs")
    with held(tmp_path):
        assert sweep.run_in_sweep(cfg, Path("run.py"), [], tmp_path) == float("inf")
    assert "another process trains there" in capsys.readouterr().err
    assert (tmp_path / "error.txt").read_text() == "theirs"
    assert not (tmp_path / "status.json").exists()


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_done(tmp_path, place, capsys):
    (tmp_path / "file").write_text("")
    folder = tmp_path / place
    with pytest.raises(FolderError, match=r"cannot be written: .*Set hydra\.run\.dir"):
        check_writable(folder)
    for callback, event in ((RunFolder(), "on_run_start"), (SweepFolder(), "on_multirun_start")):
        cfg = OmegaConf.create({"hydra": {"run": {"dir": str(folder)}, "sweep": {"dir": str(folder)}}})
        with pytest.raises(SystemExit) as caught:
            getattr(callback, event)(cfg)
        assert caught.value.code == 2
        assert "cannot be written" in capsys.readouterr().err


def test_a_folder_that_was_removed_is_made_again_for_what_a_run_leaves(tmp_path):
    folder = tmp_path / "gone"
    write_json(folder / "result.json", {"steps": 3})
    save(folder / "checkpoints/last.ckpt", 3)
    assert read_json(folder / "result.json") == {"steps": 3}


# What stops a run.


@pytest.mark.parametrize(
    ("stop", "code", "name"), [(SIGTERMException, 143, "SIGTERM"), (KeyboardInterrupt, 130, "Ctrl-C")]
)
def test_a_stopped_job_says_what_stopped_it_and_how_to_go_on(tmp_path, monkeypatch, capsys, stop, code, name):
    def train(cfg, folder):
        try:
            raise stop
        except KeyboardInterrupt:
            sys.exit(1)  # as Lightning does

    monkeypatch.setattr(job, "train", train)
    assert job.run_job(None, tmp_path) == code
    assert f"stopped by {name}. It has written no checkpoint" in capsys.readouterr().err
    assert (tmp_path / "error.txt").read_text() == f"stopped by {name}\n"
    save(tmp_path / "checkpoints/last.ckpt", 3)
    assert job.run_job(None, tmp_path) == code
    assert f"ckpt_path=last hydra.run.dir={tmp_path}" in capsys.readouterr().err


def test_other_exits_stay_what_they_are(tmp_path, monkeypatch):
    def train(cfg, folder):
        sys.exit(7)

    monkeypatch.setattr(job, "train", train)
    with pytest.raises(SystemExit) as caught:
        job.run_job(None, tmp_path)
    assert caught.value.code == 7


JOB = """
import signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def end(*_):
    (folder / "saved").write_text("whole")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
(folder / "began").write_text("")
time.sleep(60)
"""


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
def test_a_stopped_sweep_lets_its_job_save_and_leaves_no_process_behind(tmp_path, monkeypatch, stop):
    script = tmp_path / "job.py"
    script.write_text(JOB)

    class Stopped(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None and not (tmp_path / "saved").exists():
                while not (tmp_path / "began").exists():
                    time.sleep(0.02)
                raise stop
            return super().wait(timeout)

    made = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: made.append(Stopped(*args, **kwargs)) or made[-1])
    with pytest.raises(stop):
        sweep._spawn(script, [str(tmp_path)], tmp_path)
    assert (tmp_path / "saved").read_text() == "whole"
    assert made[0].poll() == 143


def test_the_history_keeps_every_loss_and_reads_the_device_once_in_a_chunk():
    history = History()
    wanted = [index / 8 for index in range(2 * History.CHUNK + 5)]
    for loss in wanted:
        history.on_train_batch_end(None, None, {"loss": torch.tensor(loss)}, None, 0)
    assert len(history._read) == 2 * History.CHUNK
    assert history.losses == wanted == history.losses
    history.on_train_batch_end(None, None, {"loss": torch.tensor(-1.0)}, None, 0)
    assert history.losses == [*wanted, -1.0]
    assert json.dumps(history.losses)
