"""The command when it is stopped, started twice, or loses its disk: exit codes, messages, and what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_kill import SETTINGS, checkpoints

ROOT = Path(__file__).resolve().parent.parent
OURS = [setting for setting in SETTINGS if "max_steps" not in setting]
ENDLESS = "trainer.max_steps=100000"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        # Flags come first: what parses the command line takes overrides in one piece.
        [sys.executable, str(ROOT / "experiments/run.py"), *sorted([*OURS, *arguments], key=lambda each: each != "-m")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "MKL_CBWR": "AVX2,STRICT"},
        start_new_session=True,  # so that Ctrl-C can be sent to it and its children alone
    )


def end(process: subprocess.Popen[str], timeout: float = 300) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in out + err, err[-3000:]
    return process.returncode, out, err


def until(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def in_folder(folder: Path) -> str:
    return f"hydra.run.dir='{folder}'"


def step_saved(folder: Path) -> int:
    newest = max(checkpoints(folder), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(newest, weights_only=True)["global_step"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_stopped_run_tells_how_to_go_on_keeps_others_out_and_its_files_apart(tmp_path):
    folder = tmp_path / "run"
    first = start(ENDLESS, in_folder(folder))
    until(lambda: checkpoints(folder), first)
    overrides = (folder / ".hydra/overrides.yaml").read_text()
    code, _, err = end(start(ENDLESS, "seed=5", in_folder(folder)))
    assert code == 2
    assert "Another run is at work in" in err
    assert (folder / ".hydra/overrides.yaml").read_text() == overrides
    assert first.poll() is None

    first.send_signal(signal.SIGTERM)
    code, _, err = end(first)
    assert code == 143
    assert f"stopped by SIGTERM. It goes on from its last checkpoint with ckpt_path=last hydra.run.dir={folder}" in err
    assert (folder / "error.txt").read_text() == "stopped by SIGTERM\n"
    assert len(checkpoints(folder)) == 1
    stopped = step_saved(folder)

    code, out, _ = end(start(f"trainer.max_steps={stopped + 4}", "ckpt_path=last", in_folder(folder)))
    assert code == 0
    assert "kept from an earlier run" in out
    assert json.loads((folder / "result.json").read_text())["steps"] == stopped + 4
    assert not (folder / "error.txt").exists()
    lines = (folder / "metrics.1.csv").read_text().splitlines() if stopped >= 50 else None
    assert lines is None or len(lines) > 1

    code, out, _ = end(start("trainer.max_steps=3", in_folder(folder)))
    assert code == 0
    assert json.loads((folder / "result.json").read_text())["steps"] == 3
    assert json.loads((folder / "result.2.json").read_text())["steps"] == stopped + 4
    assert torch.load(folder / "checkpoints.2/last.ckpt", weights_only=True)["global_step"] == stopped + 4
    assert step_saved(folder) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_run_with_130_and_the_checkpoint_before(tmp_path):
    process = start(ENDLESS, in_folder(tmp_path))
    until(lambda: checkpoints(tmp_path), process)
    before = step_saved(tmp_path)
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 130
    assert "stopped by Ctrl-C. It goes on from its last checkpoint" in err
    assert step_saved(tmp_path) >= before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_folder_is_removed_ends_in_one_message_or_makes_it_again(tmp_path):
    folder = tmp_path / "run"
    process = start(ENDLESS, in_folder(folder))
    until(lambda: (folder / "metrics.csv").exists(), process)
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(2)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code in (1, 143)
    assert f"the run in {folder} could not be written" in err if code == 1 else "stopped by SIGTERM" in err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    call = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(call, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_on_a_disk_that_fills_up_keeps_its_last_checkpoint_and_goes_on_when_there_is_room(small_disk):
    folder, filler = small_disk / "run", small_disk / "filler"
    process = start(ENDLESS, in_folder(folder))
    until(lambda: checkpoints(folder), process)
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    code, _, err = end(process)
    assert code == 1
    assert "error: " in err
    assert "free" in err or "No space left on device" in err
    assert f"ckpt_path=last hydra.run.dir={folder}" in err
    saved = step_saved(folder)
    assert saved > 0
    assert not list(folder.rglob("*.part"))
    filler.unlink()
    code, out, _ = end(start(f"trainer.max_steps={saved + 3}", "ckpt_path=last", in_folder(folder)))
    assert code == 0
    assert "resuming from" in out
    assert json.loads((folder / "result.json").read_text())["steps"] == saved + 3


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_sweep_goes_on_where_it_was_and_starts_its_half_finished_job_over(tmp_path, signum, code):
    # The second job has no end of its own; the first one is over in a few steps.
    call = ["-m", "trainer.max_steps=3,60", "callbacks.model_checkpoint.every_n_train_steps=2"]
    call += [f"hydra.sweep.dir='{tmp_path}'", "trainer.log_every_n_steps=2"]
    process = start(*call)
    until(lambda: checkpoints(tmp_path / "1"), process)
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)  # as a terminal does
    else:
        process.send_signal(signum)
    found, _, err = end(process)
    assert found == code, err[-2000:]
    assert (tmp_path / "0/result.json").exists()
    assert not (tmp_path / "1/result.json").exists()
    assert "1 run, 1 without a result" in (tmp_path / "report.md").read_text()
    stamp = (tmp_path / "0/result.json").stat().st_mtime_ns
    found, out, err = end(start(*call))
    assert found == 0, err[-2000:]
    assert out.count("skipped, its result.json is complete") == 1
    assert (tmp_path / "0/result.json").stat().st_mtime_ns == stamp
    assert json.loads((tmp_path / "1/result.json").read_text())["steps"] == 60
    assert len((tmp_path / "1/losses.csv").read_text().splitlines()) == 61, "it began anew"
    assert list((tmp_path / "1/checkpoints.1").iterdir()), "what the first attempt saved is kept"
