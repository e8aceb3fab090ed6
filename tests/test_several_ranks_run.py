"""`experiments/run.py` with parallel strategies: one device, several, one after the other; a stuck rank."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Not in the second step, in which DDP makes its buckets anew and the tracker sees them.
TINY = [
    *(
        "trainer.accelerator=cpu",
        "model.size=tiny",
        "model.num_layers=2",
        "data.max_records=400",
        "data.heldout_size=8",
    ),
    *(f"+model.overrides.{key}" for key in ("hidden_size=64", "intermediate_size=32", "num_experts=8")),
    *(f"+model.overrides.num_{key}" for key in ("experts_per_tok=2", "attention_heads=4", "key_value_heads=4")),
    *("trainer.enable_progress_bar=false", "callbacks.memory_profiler.warmup=2", "callbacks.memory_profiler.steps=1"),
]


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "experiments/run.py"), *TINY, f"hydra.run.dir='{folder}'", *arguments]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
        "PYTHONPATH": str(ROOT / "tests"),
    }


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments), capture_output=True, text=True, env=environment(), timeout=500, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_one_device_ends_with_a_result_and_no_error_of_the_run_before(tmp_path, trainer):
    for name in ("error.txt", "error_rank1.txt"):
        (tmp_path / name).write_text("of the run before")
    done = run(tmp_path, f"trainer={trainer}", "trainer.devices=1", "trainer.max_steps=3", "ckpt_path=auto")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["steps"]) == (1, 3)
    assert result["heldout_loss"] > 0
    assert result["predicted_peak_bytes"] == pytest.approx(result["peak_memory_bytes"], rel=0.05)
    assert not list(tmp_path.glob("error*"))


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_one_rank_and_again_with_two(tmp_path):
    for ranks, steps in ((2, 3), (1, 5), (2, 8)):
        done = run(
            tmp_path,
            *("trainer=fsdp", f"trainer.devices={ranks}", f"trainer.max_steps={steps}", "ckpt_path=auto"),
            *("callbacks=checkpoint", "trainer.log_every_n_steps=1"),
        )
        assert done.returncode == 0, done.stderr
        assert ("resuming from" in done.stdout) == (steps > 3)
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["ranks"], result["steps"]) == (ranks, steps)
        assert (tmp_path / "checkpoints/last.ckpt").is_dir()
    refused = run(tmp_path, "trainer.max_steps=9", f"ckpt_path='{tmp_path}/checkpoints/last.ckpt'")
    assert refused.returncode == 2
    assert "is a sharded checkpoint, a folder" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_logged_losses_are_the_mean_of_the_ranks_and_peaks_are_as_estimated(tmp_path):
    done = run(tmp_path, "trainer=ddp", "trainer.devices=2", "trainer.max_steps=4", "trainer.log_every_n_steps=1")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "metrics.csv").open() as file:
        logged = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    with (tmp_path / "losses.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 4
    assert logged == pytest.approx(losses, rel=1e-6)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["peak_memory_bytes_per_rank"] == [pytest.approx(result["predicted_peak_bytes"], rel=0.05)] * 2
    assert "estimated for each rank" in done.stdout


@pytest.mark.slow
def test_a_stuck_rank_does_not_outlive_the_job(tmp_path):
    sleeper = "+callbacks.sleeper._target_=distributed_run.Sleeper"
    arguments = [
        "trainer=ddp",
        "trainer.devices=2",
        "trainer.max_steps=4",
        "trainer.strategy.timeout.seconds=60",
        sleeper,
    ]
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command(tmp_path, *arguments), stdout=output, stderr=output, env=environment())
    other: set[int] = set()
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if listing.exists():
            other |= {int(pid) for pid in listing.read_text().split()}
        time.sleep(0.1)
    assert process.poll() not in (None, 0), log.read_text()[-3000:]
    assert (tmp_path / "error.txt").exists()
    assert other
    assert not [pid for pid in other if is_training(pid)]


def is_training(pid: int) -> bool:
    try:
        return "run.py" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
