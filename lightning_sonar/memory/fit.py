"""What a callback can find out about the fit that it is in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_sonar.experts import find_expert_tensors


def longest_warmup(trainer: pl.Trainer, warmup: int, steps: int) -> int:
    """How many optimizer steps, at most ``warmup``, may pass so that ``steps`` are left to watch."""
    batches = trainer.num_training_batches / max(1, trainer.accumulate_grad_batches)
    epochs = trainer.max_epochs
    total = math.inf
    if epochs is not None and epochs != -1 and batches != math.inf:
        total = epochs * math.ceil(batches)
    if trainer.max_steps != -1:
        # By hand each optimizer's step counts, so several optimizers reach max_steps in fewer batches.
        total = min(total, trainer.max_steps // max(1, len(trainer.optimizers)))
    left = total - trainer.global_step
    if left == math.inf:
        return warmup
    return min(warmup, max(1 if left > 1 else 0, int(left) - steps))


def expert_ids(engine: Any, module: pl.LightningModule) -> set[int]:
    """``id`` of each expert tensor, as the strategy's handle has them, or by structure."""
    if engine is not None:
        experts = engine.experts
        return {id(tensor) for tensor in (experts.values() if isinstance(experts, Mapping) else experts.tensors)}
    try:
        return {id(tensor) for tensor in find_expert_tensors(module).tensors}
    except ValueError:
        # A model without experts is nothing wrong here: all its gradients are dense.
        return set()
