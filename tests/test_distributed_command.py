"""`experiments/run.py` on two ranks."""

from __future__ import annotations

import json
import math
import re

import pytest
from test_run import SMALL, command

RUN = [*(s for s in SMALL if "limit_val" not in s), "trainer.accelerator=cpu", "data.heldout_size=15", "export=hf"]


@pytest.mark.slow
def test_two_ranks_end_with_one_result_which_is_that_of_one_process(tmp_path):
    done = command(*RUN, "trainer.accumulate_grad_batches=2", folder=tmp_path / "one")
    assert done.returncode == 0, done.stderr
    one = json.loads((tmp_path / "one/result.json").read_text())
    for trainer in ("ddp", "fsdp"):
        folder = tmp_path / f"{trainer}, two=2"
        done = command(*RUN, f"trainer={trainer}", "trainer.devices=2", "callbacks=checkpoint", folder=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("held-out loss") == 1
        assert not re.search("warn", done.stderr, re.IGNORECASE), done.stderr
        two = json.loads((folder / "result.json").read_text())
        assert two["ranks"] == 2
        assert two["steps"] == 4
        assert two["hooks_per_step"] == 2
        assert len(set(two["peak_expert_grad_bytes_per_rank"])) == 1
        assert two["peak_expert_grad_bytes_per_rank"][0] > 0
        # bfloat16, and held-out examples in other batches.
        assert math.isclose(two["heldout_loss"], one["heldout_loss"], rel_tol=2e-3)
        assert math.isclose(two["train_loss_first"], one["train_loss_first"], rel_tol=2e-2)
        assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.ckpt"}
        exported = [path / "hf/model.safetensors" for path in (folder, tmp_path / "one")]
        assert exported[0].stat().st_size == exported[1].stat().st_size
        assert not list(folder.glob("error*"))
        done = command(
            *RUN,
            f"trainer={trainer}",
            "trainer.devices=2",
            f"ckpt_path='{folder}/checkpoints/last.ckpt'",
            "trainer.max_steps=6",
            folder=tmp_path / f"{trainer} on",
        )
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / f"{trainer} on/result.json").read_text())["steps"] == 6


@pytest.mark.slow
def test_a_mistake_on_two_ranks_ends_in_one_message(tmp_path):
    done = command(*RUN, "trainer=fsdp", "trainer.devices=2", "mode=sonar_per_expert", folder=tmp_path / "run")
    assert done.returncode != 0
    assert "one hook an expert" in done.stderr
    assert "Traceback" not in done.stderr
