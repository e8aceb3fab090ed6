"""What the GPU check and the CPU benchmark share: clocks, rates, models of a size, one mode's training step.

Nothing here, nor below it, imports Hydra, omegaconf or datasets: a bare machine may have none of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sonar import models
from lightning_sonar.experts import find_expert_tensors
from lightning_sonar.losses import response_cross_entropy
from lightning_sonar.memory.tracker import StorageTracker
from lightning_sonar.optim import FusedAdamW
from lightning_sonar.release import release_in_backward

TABLE_MODES = ("standard", "standard_no_expert_clip", "in_backward_all", "sonar", "sonar_per_expert")
"""The rows of the paper's table, and its per-expert hooks."""

_TOY = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 96, "num_attention_heads": 2}
TOY: dict[str, dict[str, Any]] = {
    "olmoe": {**_TOY, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "granite": {**_TOY, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1},
}
"""What makes a model small enough for Triton's interpreter."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Repeatable kernels: the fp32 backward of grouped_mm on a CPU does not repeat itself otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def times_ms(function: Callable[[], Any], device: torch.device, count: int, warmup: int = 3) -> list[float]:
    """Milliseconds of each of ``count`` calls after ``warmup`` others; by device events on CUDA."""
    for _ in range(warmup):
        function()
    wait(device)
    if device.type != "cuda":
        found = []
        for _ in range(count):
            start = time.perf_counter()
            function()
            found.append((time.perf_counter() - start) * 1e3)
        return found
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in pairs:
        start.record()
        function()
        end.record()
    wait(device)
    return [start.elapsed_time(end) for start, end in pairs]


def median_ms(function: Callable[[], Any], device: torch.device, count: int, warmup: int = 3) -> float:
    return statistics.median(times_ms(function, device, count, warmup))


def copy_rate(nbytes: int, device: torch.device, count: int = 20) -> float:
    """GB/s (10**9, read and written bytes both counted) of copying so that ``nbytes`` move in all."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), device, count) / 1e6


def matrix_rate(size: int, device: torch.device, count: int = 10) -> float:
    """TFLOP/s of one square bf16 product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_ms(lambda: torch.mm(a, b, out=out), device, count) / 1e9


def build(
    name: str, backend: str, device: torch.device, *, toy: bool, layers: int | None = None, **options: Any
) -> Any:
    """OLMoE or Granite with random bf16 weights: at its published size, or as a toy of one layer."""
    torch.manual_seed(0)
    if toy:
        options = {**TOY[name], **options}
    size = "tiny" if toy else "full"
    layers = 1 if toy else layers
    return models.build(name, size, num_layers=layers, backend=backend, device=device, dtype=torch.bfloat16, **options)


def batch_of(model: Any, batch_size: int, seq_len: int, device: torch.device, seed: int = 1) -> dict[str, Tensor]:
    """Random tokens, int64 ``[B, T]``; every one of them counts for the loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch_size, seq_len), generator=generator).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    # The output dies here: held in the caller's frame, its logits would be alive during backward.
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    return response_cross_entropy(output.logits, batch["labels"])[0]


class Training:
    """A model, its optimizer and one mode's hooks, in a plain loop; `options` go to `release_in_backward`."""

    def __init__(self, model: nn.Module, mode: str, lr: float = 1e-5, **options: Any) -> None:
        self.model = model
        self.mode = mode
        self.optimizer = FusedAdamW(model.parameters(), lr=lr)
        self.handle = release_in_backward(self.optimizer, find_expert_tensors(model), mode=mode, **options)
        self.optimizer.init_state()  # after states in host memory have been made: the device may not hold them all
        self.max_norm = 0.0 if mode == "in_backward_all" else 1.0

    def step(self, *microbatches: dict[str, Tensor]) -> Tensor:
        """One step; returns the last microbatch's loss, detached."""
        for index, batch in enumerate(microbatches, 1):
            loss = loss_of(self.model, batch)
            last = index == len(microbatches)
            self.handle.train_step(
                loss if len(microbatches) == 1 else loss / len(microbatches), max_norm=self.max_norm, last=last
            )
            if last:
                return loss.detach()
        raise ValueError("A step needs at least one batch.")

    def close(self) -> None:
        """Leave nothing of this mode's behind: the next one starts with the model alone."""
        self.handle.remove()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        gc.collect()

    def values(self) -> dict[str, Tensor]:
        """Copies of every parameter and all optimizer state, by name, on the CPU."""
        if self.handle.host_states is not None:
            self.handle.host_states.wait()
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().to("cpu", copy=True)
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = value.to("cpu", copy=True)
        return found


@dataclass(frozen=True)
class StepFigures:
    """One mode's steps: peak in bytes, each step's ms, the last loss."""

    peak_bytes: int
    ms: list[float]
    loss: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)


def measure_mode(
    model: Any,
    mode: str,
    batch: dict[str, Tensor],
    device: torch.device,
    *,
    steps: int,
    warmup: int,
    microbatches: int = 1,
    **options: Any,
) -> StepFigures:
    """Train ``model`` for a few steps in ``mode`` on one batch, given ``microbatches`` times a step.

    The peak is CUDA's own count of what was allocated; on a CPU, the tracker's, in a step of its own, untimed.
    """
    training = Training(model, mode, **options)
    given = [batch] * microbatches
    losses: list[Tensor] = []
    try:
        for _ in range(warmup):
            training.step(*given)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        ms = times_ms(lambda: losses.append(training.step(*given)), device, steps, warmup=0)
        if device.type == "cuda":
            return StepFigures(torch.cuda.max_memory_allocated(device), ms, losses[-1].item())
        tracker = StorageTracker()
        tracker.track([*model.parameters(), *model.buffers(), *batch.values()])
        for state in training.optimizer.state.values():
            tracker.track(state.values())
        with tracker:
            training.step(*given)
        return StepFigures(tracker.ledger.peak_bytes, ms, losses[-1].item())
    finally:
        training.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
