"""Faults of disks, files and folders: nothing that was saved is lost, and nothing half-written is taken for whole."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fault_files import disk_for, save, step_of
from report_runs import result, write_run

from experiments import job
from experiments.endings import OF_THE_DISK, could_not_write
from experiments.folder import set_aside
from experiments.report import report
from experiments.reporting.runs import Run
from experiments.result import write_json, write_losses
from experiments.resume import find_checkpoint
from experiments.status import write_status
from lightning_sonar.strategies.checkpoints import AtomicCheckpointIO
from lightning_sonar.strategies.intact import CheckpointError, check_intact

ROOT = Path(__file__).resolve().parent.parent
KILLS = int(os.environ.get("KILLS", "24"))


# Kills while a checkpoint is written.

SAVING = """
import os, random, signal, sys, time
sys.path[:0] = sys.argv[1].split(os.pathsep)
import torch
torch.set_num_threads(1)
from fault_files import save, step_of
from pathlib import Path

folder, kills, seed = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
path, chance, halves, saved = folder / "last.ckpt", random.Random(seed), 0, 0
save(path, 0)
for _ in range(kills):
    said, says = os.pipe()
    child = os.fork()
    if not child:
        for step in range(saved + 1, 10**6):
            save(path, step)
            os.write(says, b"%d " % step)
    os.close(says)
    first, began = os.read(said, 64), time.monotonic()  # it has begun to save
    more = os.read(said, 64)
    time.sleep(chance.random() * 2 * (time.monotonic() - began))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(said) as stream:
        least = int((first.decode() + more.decode() + stream.read()).split()[-1])
    halves += (folder / "last.ckpt.part").exists()
    saved = step_of(path)
    assert least <= saved <= least + 1, (least, saved)
print(kills, halves, saved)
"""


def kill_while_saving(folder: Path, kills: int, seed: int = 0) -> tuple[int, int, int]:
    folder.mkdir(exist_ok=True)
    places = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", SAVING, places, str(folder), str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made, halves, saved = done.stdout.split()[-3:]
    return int(made), int(halves), int(saved)


def test_a_process_killed_while_it_saves_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    kills, halves, saved = kill_while_saving(tmp_path, KILLS)
    assert kills == KILLS >= 20
    assert halves > 0, "no kill fell into a write"
    assert saved > 0
    # What the killed processes have left is cleared by the next run.
    set_aside(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


# Disks that are full.


def test_a_disk_that_fills_up_at_any_byte_of_a_checkpoint_leaves_the_old_one(tmp_path):
    path = save(tmp_path / "a.ckpt", 1)
    before, size = path.read_bytes(), path.stat().st_size
    chance = random.Random(0)
    for limit in [0, 1, 64, size // 2, size - 1, *(chance.randrange(size) for _ in range(25))]:
        with disk_for(limit), pytest.raises(OSError, match=r"File too large: '.*a\.ckpt'") as caught:
            save(path, 2)
        assert caught.value.errno in OF_THE_DISK
        assert path.read_bytes() == before
        assert [found.name for found in tmp_path.iterdir()] == ["a.ckpt"]
    save(path, 2)
    assert step_of(path) == 2


def test_a_disk_that_fills_up_leaves_whole_results_statuses_and_reports(tmp_path):
    folder = write_run(tmp_path / "0", result("sonar"))
    write_losses(folder / "losses.csv", [1.0, 2.0])
    write_status(folder, 0, 1.0)
    report([tmp_path], tmp_path / "out")
    files = [folder / "result.json", folder / "losses.csv", folder / "status.json"]
    files += [tmp_path / "out" / name for name in ("report.md", "report.html", "report.csv")]
    before = {path: path.read_bytes() for path in files}
    acts = [
        lambda: write_json(files[0], {"long": "x" * 500}),
        lambda: write_losses(files[1], [3.0] * 500),
        lambda: write_status(folder, 1, 2.0, "x" * 500),
        lambda: report([tmp_path], tmp_path / "out"),
    ]
    for act in acts:
        for limit in (0, 10, 100):
            with disk_for(limit), pytest.raises(OSError, match=r"\.(json|csv|md|html|png)"):
                act()
            assert {path: path.read_bytes() for path in files} == before
    assert not list(tmp_path.rglob("*.part"))


def test_a_metrics_line_that_was_cut_is_not_read_as_a_number(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,train_loss\r\n4,2.5\r\n9,2.2")
    assert Run(tmp_path, {}, ()).losses == ("step", [5], [2.5])


def test_a_job_whose_disk_is_full_ends_in_one_message_even_if_that_is_not_written_down(tmp_path, monkeypatch, capsys):
    def train(cfg, folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "metrics.csv"))

    monkeypatch.setattr(job, "train", train)
    save(tmp_path / "checkpoints/step-3.ckpt", 3)
    with disk_for(0):
        assert job.run_job(None, tmp_path) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "metrics.csv" in said
    assert f"ckpt_path=last hydra.run.dir={tmp_path}" in said
    assert "Traceback" not in said


def test_a_file_that_is_missing_elsewhere_is_no_fault_of_the_disk(tmp_path):
    inside, outside = (FileNotFoundError(errno.ENOENT, "gone", str(place)) for place in (tmp_path / "a", "/nowhere/a"))
    assert could_not_write(inside, tmp_path)
    assert not could_not_write(outside, tmp_path)
    assert not could_not_write(ValueError(), tmp_path)
    assert not could_not_write(None, tmp_path)


# Files that are damaged.


def test_a_checkpoint_with_changed_bytes_is_refused_by_name_or_loads_as_it_was(tmp_path):
    whole = save(tmp_path / "whole.ckpt", 7).read_bytes()
    path, chance, refused = tmp_path / "flipped.ckpt", random.Random(0), 0
    for place in [0, len(whole) // 2, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(80))]:
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        said = ""
        try:
            found = step_of(path)  # a byte of padding
        except CheckpointError as error:
            found, said = 7, str(error)
            refused += 1
        assert found == 7
        assert not said or "flipped.ckpt cannot be read as a checkpoint" in said
        assert path.read_bytes() == bytes(changed)
    assert refused > 60


def test_a_truncated_checkpoint_is_refused_by_name_wherever_it_ends(tmp_path):
    whole = save(tmp_path / "whole.ckpt", 7).read_bytes()
    path = tmp_path / "short.ckpt"
    for size in [0, 1, 2, 100, *range(200, len(whole), len(whole) // 30), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"short\.ckpt cannot be read as a checkpoint.*left as it is"):
            AtomicCheckpointIO().load_checkpoint(path, weights_only=True)


def test_a_file_is_read_again_once_it_has_changed(tmp_path):
    path = save(tmp_path / "a.ckpt", 1)
    check_intact(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        check_intact(path)


def sharded(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    tensors = {f"layer {index}": torch.arange(2000.0) + index for index in range(4)}
    dcp.save({"state_dict": tensors, "note": {"step": 3}}, checkpoint_id=str(folder), no_dist=True)
    torch.save({"global_step": 3}, folder / "meta.pt")
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_checkpoint_with_a_missing_short_or_changed_file_is_refused_by_name(tmp_path):
    whole = sharded(tmp_path / "whole.ckpt")
    check_intact(whole)
    data = next(path.name for path in whole.glob("*.distcp"))
    for name, act in {
        ".metadata": lambda path: path.unlink(),
        "meta.pt": lambda path: path.write_bytes(path.read_bytes()[:-30]),
        data: lambda path: path.write_bytes(path.read_bytes()[:-30]),
    }.items():
        shutil.rmtree(tmp_path / "bad.ckpt", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "bad.ckpt")
        act(tmp_path / "bad.ckpt" / name)
        with pytest.raises(CheckpointError, match=r"bad\.ckpt cannot be read as a checkpoint \(.*" + name):
            check_intact(tmp_path / "bad.ckpt")
    shutil.rmtree(tmp_path / "bad.ckpt")
    shutil.copytree(whole, tmp_path / "bad.ckpt")
    raw = bytearray((whole / data).read_bytes())
    place = raw.find(torch.arange(2000.0).numpy().tobytes()) + 4000
    raw[place] ^= 8
    (tmp_path / "bad.ckpt" / data).write_bytes(raw)
    with pytest.raises(CheckpointError, match="is not what was written, by its checksum"):
        check_intact(tmp_path / "bad.ckpt")


# Which checkpoint a run goes on from.


@pytest.mark.parametrize("wanted", ["last", "auto"])
@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path, wanted, damage):
    older, newest = save(tmp_path / "r/checkpoints/step-3.ckpt", 3), save(tmp_path / "r/checkpoints/step-6.ckpt", 6)
    whole = newest.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    newest.write_bytes({"empty": b"", "truncated": whole[:-50], "flipped": bytes(flipped)}[damage])
    with pytest.warns(UserWarning, match=r"step-6\.ckpt cannot be read.*Going on from .*step-3\.ckpt"):
        assert find_checkpoint(wanted, tmp_path / "r") == str(older)
    older.write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"ckpt_path={wanted}: none of the 2 checkpoints in .* ckpt_path=null"):
        find_checkpoint(wanted, tmp_path / "r")


def test_what_was_saved_last_is_the_newest_though_the_clock_went_backwards(tmp_path):
    folder = tmp_path / "r/checkpoints"
    older = save(folder / "step-9.ckpt", 9)
    ahead = time.time() + 86_400
    os.utime(older, (ahead, ahead))
    newer = save(folder / "step-2.ckpt", 2)
    assert newer.stat().st_mtime_ns > older.stat().st_mtime_ns
    assert find_checkpoint("last", tmp_path / "r") == str(newer)
