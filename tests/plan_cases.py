"""Real CPU steps in a process of their own, beside the plan of the same step. Prints one JSON line a case.

Run with a fixed malloc mmap threshold, so that freed tensors go back to the system and process memory follows them.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_sonar import MODES, FusedAdamW, MemoryProfiler, SonarMoEStrategy, models
from lightning_sonar.language_model import LanguageModel, Loss
from lightning_sonar.memory.planner import plan_memory

# About 300 MB of bf16 expert tensors each.
CASES: dict[str, dict[str, int]] = {
    "olmoe": {"num_layers": 4, "hidden_size": 512, "intermediate_size": 384, "vocab_size": 4096},
    "granite": {"num_layers": 6, "hidden_size": 512, "intermediate_size": 416, "vocab_size": 4096},
}
TOKENS = (2, 128)
# Loads the kernels, whose code and tables would otherwise count as the first step's memory.
WARM_UP = {"num_layers": 1, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 4096}


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (at most since it was cleared) of this process, in bytes."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{key}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


class ProcessPeak(L.Callback):
    """The most resident memory of the process during the last step."""

    def __init__(self, step: int) -> None:
        self.step, self.peak = step, 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.step + 1:
            self.peak = resident("VmHWM")


def measure(
    family: str,
    mode: str,
    shape: dict[str, int],
    tokens: tuple[int, int] = TOKENS,
    checkpointing: bool = False,
    loss: Loss = "full",
) -> dict[str, float | str]:
    overrides = dict(shape)
    layers = overrides.pop("num_layers")
    plan = plan_memory(
        family, size="tiny", mode=mode, num_layers=layers, batch_size=tokens[0], seq_len=tokens[1], rounding=1,
        checkpointing=checkpointing, loss=loss, **overrides,
    )  # fmt: skip
    gc.collect()
    before = resident("VmRSS")
    torch.manual_seed(0)
    model = models.build(family, "tiny", num_layers=layers, checkpointing=checkpointing, **overrides)
    module = LanguageModel(model, functools.partial(FusedAdamW, lr=1e-5), loss=loss)
    rows = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        for ids in torch.randint(0, 4096, (4 * tokens[0], tokens[1]))
    ]
    profiler, process = MemoryProfiler(warmup=1, steps=1), ProcessPeak(3)
    trainer = L.Trainer(
        strategy=SonarMoEStrategy(mode=mode), accelerator="cpu", max_steps=4, precision="bf16-true",
        gradient_clip_val=None if MODES[mode].clip == "none" else 1.0, callbacks=[profiler, process], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=tokens[0]))  # type: ignore[arg-type]
    assert profiler.report is not None
    return {
        "family": family,
        "mode": mode,
        "tokens": tokens[0] * tokens[1],
        "checkpointing": checkpointing,
        "loss": loss,
        "experts": plan.params_expert * 2,
        "planned": plan.peak_bytes,
        "tracked": profiler.report.peak_bytes,
        "process": process.peak - before,
        "planned_phase": plan.peak_phase,
        "tracked_phase": profiler.report.peak_phase,
    }


def trend(family: str) -> None:
    """Standard and sonar with few tokens and with many, plainly and with what keeps activations small."""
    for tokens in ((2, 128), (16, 128)):
        for checkpointing, loss in ((False, "full"), (True, "chunked")):
            for mode in ("standard", "sonar"):
                print(json.dumps(measure(family, mode, CASES[family], tokens, checkpointing, loss)), flush=True)


if __name__ == "__main__":
    family, *chosen = sys.argv[1:]
    measure(family, "standard", WARM_UP)
    if chosen == ["trend"]:
        trend(family)
    else:
        for name in chosen:
            print(json.dumps(measure(family, name, CASES[family])), flush=True)
