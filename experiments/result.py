"""What a run leaves in its folder."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from omegaconf import DictConfig

from lightning_sonar.experts import find_expert_tensors
from lightning_sonar.memory import MemoryProfiler


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader finds the old file or the new one."""
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=True) + "\n")
    os.replace(temporary, path)


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "lightning", "transformers", "triton", "torchmetrics", "lightning-sonar"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = torch.__version__
    return found


def collect(
    cfg: DictConfig, trainer: Trainer, model: torch.nn.Module, validation: dict[str, float], folder: Path
) -> dict[str, Any]:
    """All figures of a finished run, ready for JSON. Bytes, milliseconds, nats."""
    experts = find_expert_tensors(model, cfg.mode.experts)
    profiler = next((c for c in trainer.callbacks if isinstance(c, MemoryProfiler)), None)  # type: ignore[attr-defined]
    report = profiler.report.to_dict() if profiler is not None and profiler.report is not None else {}
    times = report.get("step_time_ms") or {}
    median = times.get("median")
    losses = logged(folder / "metrics.csv", "train_loss")
    norms = logged(folder / "metrics.csv", "grad_norm")
    tokens = cfg.data.batch_size * cfg.data.seq_len
    device = trainer.strategy.root_device
    return {
        "model": cfg.model.name,
        "size": cfg.model.size,
        "params_total": experts.total_numel,
        "params_expert": experts.numel,
        "mode": cfg.mode.name,
        "backend": cfg.backend.name,
        "optimizer": str(cfg.optimizer._target_).rsplit(".", 1)[-1],
        "data": cfg.data.source,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "dtype": str(next(iter(experts.values())).dtype).removeprefix("torch."),
        "precision": str(cfg.trainer.precision),
        "seed": cfg.seed,
        "steps": trainer.global_step,
        "batch_size": cfg.data.batch_size,
        "seq_len": cfg.data.seq_len,
        "peak_memory_bytes": report.get("peak_bytes"),
        "peak_phase": report.get("peak_phase"),
        "peak_expert_grad_bytes": report.get("peak_expert_gradient_bytes"),
        "memory_split": report.get("split"),
        "hooks_per_step": report.get("hooks_per_step"),
        "step_time_ms": {key: times.get(key) for key in ("median", "p10", "p90")},
        "tokens_per_second": tokens / median * 1e3 if median else None,
        "train_loss_first": losses[0] if losses else None,
        "train_loss": sum(losses[-5:]) / len(losses[-5:]) if losses else None,
        "heldout_loss": validation.get("heldout_loss"),
        "heldout_perplexity": validation.get("heldout_perplexity"),
        "grad_norm": norms[-1] if norms else None,
        "skipped_steps": int(trainer.callback_metrics.get("skipped_steps", 0)),
        "command": " ".join(sys.argv[1:]),
        "versions": versions(),
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def logged(path: Path, column: str) -> list[float]:
    """The values of one column of a metrics file, in order; empty if there is no such file or column."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]
