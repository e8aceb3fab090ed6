"""What a run leaves in its folder."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import sys
from array import array
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from lightning import Callback, Trainer
from omegaconf import DictConfig
from torch import Tensor

from experiments.environment import as_given
from experiments.machine import processor
from experiments.status import write_text
from lightning_sonar.experts import find_expert_tensors
from lightning_sonar.memory import MemoryProfiler


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader finds the old file or the new one."""
    write_text(path, json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_losses(path: Path, losses: list[float], first: int = 1) -> None:
    """Write ``batch,train_loss``, a line a training batch; a loss that is not finite stays empty.

    Args:
        path: the file.
        losses: nats a token, in order.
        first: number of the first batch: 1, or of a resumed run the one that it went on with.
    """
    lines = [f"{index},{loss if math.isfinite(loss) else ''}" for index, loss in enumerate(losses, first)]
    write_text(path, "\n".join(["batch,train_loss", *lines]) + "\n")


def task_overrides() -> list[str]:
    """What the command line set, Hydra's own settings left out; empty where Hydra did not start the run."""
    return as_given(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


class History(Callback):
    """Keeps the loss of every training batch. It waits for the device once in `CHUNK` batches."""

    CHUNK = 512
    """Losses kept on their device before they are read; of all the others a float64 each in host memory is left."""

    def __init__(self) -> None:
        self._read = array("d")
        self._recent: Tensor | None = None
        self._count = 0
        self.first = 1

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A resumed run counts on where its checkpoint was written."""
        self.first = trainer.fit_loop.total_batch_idx + 2

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if not isinstance(loss, Tensor):
            return
        if self._recent is None:
            self._recent = torch.empty(self.CHUNK, dtype=loss.dtype, device=loss.device)
        self._recent[self._count] = loss.detach()
        self._count += 1
        if self._count == self.CHUNK:
            self._collect()

    def _collect(self) -> None:
        if self._recent is not None:
            self._read.extend(self._recent[: self._count].tolist())
            self._count = 0

    @property
    def losses(self) -> list[float]:
        """The losses in order, read from the device."""
        self._collect()
        return self._read.tolist()


LIBRARIES = ("torch", "lightning", "transformers", "triton", "torchmetrics", "bitsandbytes", "torchao", "flashoptim")


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in (*LIBRARIES, "lightning-sonar"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__
    return found


def optimizer_name(optimizer: DictConfig) -> str:
    """What makes the optimizer, and how it rounds; of one made of two, both."""
    name = str(optimizer._target_).rsplit(".", 1)[-1]
    if name != "ExpertsAndDense":
        at_random = optimizer.get("stochastic_rounding") or optimizer.get("bf16_stochastic_round")
        return f"{name}, stochastic rounding" if at_random else name
    return f"{optimizer_name(optimizer.experts)} for experts, {optimizer_name(optimizer.dense)}"


def collect(
    cfg: DictConfig,
    trainer: Trainer,
    model: torch.nn.Module,
    validation: dict[str, float],
    losses: list[float],
    predicted: int | None = None,
) -> dict[str, Any]:
    """All figures of a finished run, ready for JSON. Bytes, milliseconds, nats."""
    experts = find_expert_tensors(model, cfg.mode.experts)
    profiler = next((c for c in trainer.callbacks if isinstance(c, MemoryProfiler)), None)  # type: ignore[attr-defined]
    report = profiler.report.to_dict() if profiler is not None and profiler.report is not None else {}
    times = report.get("step_time_ms") or {}
    median = times.get("median")
    norm = getattr(trainer.strategy, "last_norm", None)
    norms = getattr(trainer.strategy, "grad_norms", {})
    tokens = cfg.data.batch_size * cfg.data.seq_len * cfg.trainer.accumulate_grad_batches * trainer.world_size
    device = trainer.strategy.root_device
    return {
        "model": cfg.model.name,
        "size": cfg.model.size,
        "params_total": experts.total_numel,
        "params_expert": experts.numel,
        "mode": cfg.mode.name,
        "expert_clip": cfg.mode.expert_clip,
        "accumulation": cfg.mode.accumulation,
        "expert_state_device": cfg.mode.expert_state_device,
        "backend": cfg.backend.name,
        "loss": cfg.model.loss,
        "optimizer": optimizer_name(cfg.optimizer),
        "data": cfg.data.source,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "dtype": str(next(iter(experts.values())).dtype).removeprefix("torch."),
        "precision": str(cfg.trainer.precision),
        "seed": cfg.seed,
        "steps": trainer.global_step,
        "batch_size": cfg.data.batch_size,
        "accumulate_grad_batches": cfg.trainer.accumulate_grad_batches,
        "seq_len": cfg.data.seq_len,
        "peak_memory_bytes": report.get("peak_bytes"),
        "predicted_peak_bytes": predicted,
        "peak_phase": report.get("peak_phase"),
        "peak_expert_grad_bytes": report.get("peak_expert_gradient_bytes"),
        "host_memory_bytes": report.get("host_bytes"),
        "ranks": trainer.world_size,
        "peak_memory_bytes_per_rank": report.get("peak_bytes_per_rank"),
        "peak_expert_grad_bytes_per_rank": report.get("peak_expert_gradient_bytes_per_rank"),
        "memory_split": report.get("split"),
        "hooks_per_step": report.get("hooks_per_step"),
        "step_time_ms": {key: times.get(key) for key in ("median", "p10", "p90")},
        "tokens_per_second": tokens / median * 1e3 if median else None,
        "train_loss_first": losses[0] if losses else None,
        "train_loss": sum(losses[-10:]) / len(losses[-10:]) if losses else None,
        "heldout_loss": validation.get("heldout_loss"),
        "heldout_perplexity": validation.get("heldout_perplexity"),
        "grad_norm": float(norms["total"]) if norms else None,
        "clip_norm": None if norm is None else float(norm),
        "skipped_steps": getattr(trainer.strategy, "skipped_steps", 0),
        "skipped_tensors": getattr(trainer.strategy, "skipped_tensors", 0),
        "command": " ".join(sys.argv[1:]),
        "versions": versions(),
    }
