"""Processes that are killed at random moments lose nothing but the steps since their last checkpoint."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
KILLS = 20
STEPS = 400
SETTINGS = [
    f"trainer.max_steps={STEPS}",
    "trainer.limit_val_batches=0",
    "trainer.deterministic=true",
    "trainer.log_every_n_steps=50",
    "trainer.enable_progress_bar=false",
    "callbacks=checkpoint",
    "~callbacks.memory_profiler",
    "~callbacks.progress_bar",
    "callbacks.model_checkpoint.every_n_train_steps=3",
    "model.num_layers=1",
    *(f"+model.overrides.{key}" for key in ("hidden_size=64", "intermediate_size=32")),
    *(f"+model.overrides.{key}" for key in ("num_attention_heads=2", "num_key_value_heads=2")),
    "data.seq_len=128",
    "data.max_records=200",
]


def start(folder: Path, log: Path, *more: str) -> subprocess.Popen:
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "experiments/run.py"), *SETTINGS, f"hydra.run.dir='{folder}'", *more],
            stdout=output,
            stderr=subprocess.STDOUT,
            # MKL promises equal bits in two processes only if told to: memory alignment may choose another path.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "MKL_CBWR": "AVX2,STRICT"},
        )


def checkpoints(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_and_resumed_runs_end_with_the_undisturbed_runs_state(tmp_path):
    undisturbed, folder, log = tmp_path / "undisturbed", tmp_path / "killed", tmp_path / "log.txt"
    process = start(undisturbed, log)
    assert process.wait(600) == 0, log.read_text()
    chance = random.Random(0)
    kills = after_first_checkpoint = 0
    while kills < KILLS:
        resumes = ["ckpt_path=last"] if checkpoints(folder) else []
        process = start(folder, log, *resumes)
        # Wait until it writes, so that kills fall into training rather than into imports, then a random moment more.
        newest = max((path.stat().st_mtime for path in checkpoints(folder)), default=0.0)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if max((path.stat().st_mtime for path in checkpoints(folder)), default=0.0) > newest:
                break
            time.sleep(0.02)
        time.sleep(chance.random() * 0.5)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGTERM if kills % 5 == 4 else signal.SIGKILL)
        process.wait(120)
        kills += 1
        after_first_checkpoint += bool(resumes)
    process = start(folder, log, "ckpt_path=last")
    assert process.wait(600) == 0, log.read_text()[-3000:]
    assert kills >= KILLS, f"the run ended after {kills} kills; give it more steps"
    assert after_first_checkpoint >= KILLS - 2
    left, right = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (undisturbed, folder))
    assert left["global_step"] == right["global_step"] == STEPS
    assert all(torch.equal(left["state_dict"][name], right["state_dict"][name]) for name in left["state_dict"])
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (left, right)]
    for index, state in states[0].items():
        assert all(torch.equal(value, states[1][index][key]) for key, value in state.items())


@pytest.mark.slow
def test_the_command_resumes_exports_and_explains_what_it_cannot_resume_from(tmp_path):
    from test_run import command

    small = [setting for setting in SETTINGS if "max_steps" not in setting]
    done = command(*small, "trainer.max_steps=4", folder=tmp_path / "a")
    assert done.returncode == 0, done.stderr
    done = command(*small, "trainer.max_steps=8", "ckpt_path=last", "mode=standard", "export=hf", folder=tmp_path / "b")
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stdout
    assert f"checkpoint in  {tmp_path / 'b/checkpoints/last.ckpt'}\n  model in       {tmp_path / 'b/hf'}" in done.stdout
    # Lightning's remarks on what is as it should be.
    assert not re.search("weights_only|dirpath has changed", done.stdout + done.stderr)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b/hf").state_dict()
    saved = torch.load(tmp_path / "b/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert {f"model.{name}" for name in loaded} == set(saved)
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in loaded.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "b/hf").decode([1]) == "<|end|>"

    broken = tmp_path / "broken.ckpt"
    broken.write_bytes((tmp_path / "a/checkpoints/last.ckpt").read_bytes()[:5000])
    for ckpt, message in (
        (broken, "cannot be read as a checkpoint"),
        (tmp_path / "nowhere.ckpt", "there is no such file"),
    ):
        done = command(*small, "trainer.max_steps=8", f"ckpt_path='{ckpt}'", folder=tmp_path / "c")
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    done = command(
        *small,
        "trainer.max_steps=8",
        f"ckpt_path='{tmp_path}/a/checkpoints/last.ckpt'",
        "seed=5",
        folder=tmp_path / "d",
    )
    assert done.returncode == 2
    assert "seed was 0 and is 5" in done.stderr
    done = command(
        *small,
        "trainer.max_steps=8",
        f"ckpt_path='{tmp_path}/a/checkpoints/last.ckpt'",
        "model.num_layers=2",
        folder=tmp_path / "e",
    )
    assert done.returncode == 2
    assert "another model" in done.stderr
    (tmp_path / "lonely").mkdir()
    done = command(*small, "ckpt_path=last", folder=tmp_path / "lonely/run")
    assert done.returncode == 2
    assert "no checkpoint in" in done.stderr
