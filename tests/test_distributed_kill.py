"""Runs on two ranks of which one is killed at random moments: the others end with an error, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_kill import SETTINGS, checkpoints

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
KILLS = int(os.environ.get("KILLS", "6"))
GONE_WITHIN = 60
OURS = [
    *(setting for setting in SETTINGS if "max_steps" not in setting and "deterministic" not in setting),
    f"trainer.max_steps={STEPS}",
    "trainer.deterministic=true",
    "trainer.devices=2",
    "trainer.accelerator=cpu",
    "trainer.strategy.timeout.seconds=30",
]


def start(folder: Path, log: Path, *more: str) -> subprocess.Popen:
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "experiments/run.py"), *OURS, f"hydra.run.dir='{folder}'", *more],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_CBWR": "AVX2,STRICT"},
        )


def child_of(process: subprocess.Popen) -> int | None:
    """The process of rank 1, which rank 0 has started."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for pid in found.read_text().split() if found.exists() else []:
        if "run.py" in Path(f"/proc/{pid}/cmdline").read_text():
            return int(pid)
    return None


def is_alive(pid: int) -> bool:
    try:
        return "run.py" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def newest(folder: Path) -> float:
    return max((path.stat().st_mtime for path in checkpoints(folder)), default=0.0)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint's weights and optimizer state, whole."""
    path = folder / "checkpoints/last.ckpt"
    found: dict[str, torch.Tensor] = {}

    def visit(key: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[key] = value
        elif isinstance(value, dict):
            for name, inner in value.items():
                visit(f"{key}.{name}", inner)

    if path.is_dir():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        whole = path.with_suffix(".whole")
        dcp_to_torch_save(path, whole)
        visit("", torch.load(whole, weights_only=False))
    else:
        loaded = torch.load(path, weights_only=True)
        visit("", {"state_dict": loaded["state_dict"], "optimizer": loaded["optimizer_states"][0]["state"]})
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
def test_a_killed_rank_takes_the_others_down_and_the_resumed_run_ends_as_the_undisturbed_one(tmp_path, trainer):
    undisturbed, folder, log = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "log.txt"
    process = start(undisturbed, log, f"trainer={trainer}")
    assert process.wait(600) == 0, log.read_text()[-3000:]
    chance = random.Random(1)
    kills = 0
    while kills < KILLS:
        begun = log.stat().st_size
        process = start(folder, log, f"trainer={trainer}", *(["ckpt_path=last"] if checkpoints(folder) else []))
        before, deadline = newest(folder), time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and newest(folder) <= before:
            time.sleep(0.02)
        time.sleep(chance.random() * 0.5)
        other = child_of(process)
        assert process.poll() is None, f"the run ended after {kills} kills; give it more steps"
        assert other is not None
        victim, survivor = (other, process.pid) if kills % 2 == 0 else (process.pid, other)
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + GONE_WITHIN
        while time.monotonic() < deadline and (process.poll() is None or is_alive(survivor)):
            time.sleep(0.05)
        assert process.poll() not in (None, 0)
        assert not is_alive(survivor)
        assert "Connection" in log.read_text()[begun:], log.read_text()[begun:][-3000:]
        kills += 1
    process = start(folder, log, f"trainer={trainer}", "ckpt_path=last")
    assert process.wait(600) == 0, log.read_text()[-3000:]
    left, right = state_of(undisturbed), state_of(folder)
    assert left.keys() == right.keys()
    assert len(left) > 20
    assert [name for name in left if not torch.equal(left[name], right[name])] == []
