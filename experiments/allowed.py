"""What the values of a configuration may be: sets, ranges and types, by key."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_sonar import models
from lightning_sonar.backends import BACKENDS
from lightning_sonar.in_backward import Accumulation
from lightning_sonar.language_model import Loss
from lightning_sonar.memory.planner import PRECISIONS
from lightning_sonar.modes import ExpertClip
from lightning_sonar.nonfinite import Check, OnNonfinite

CHOSEN = ("model", "mode", "backend", "data", "optimizer", "scheduler", "trainer", "callbacks", "logger")
GROUPS = (*CHOSEN, "size_defaults")
"""What a run cannot be without."""

CHOICES: dict[str, tuple[str, ...]] = {
    "model.size": ("auto", "tiny", "full"),
    "model.name": (*models.PRESETS, "hf"),
    "model.loss": get_args(Loss),
    "backend.name": ("auto", *BACKENDS),
    "mode.expert_clip": get_args(ExpertClip),
    "mode.accumulation": get_args(Accumulation),
    "mode.expert_state_device": ("None", "cpu"),
    "mode.on_nonfinite": get_args(OnNonfinite),
    "mode.check": get_args(Check),
    "trainer.precision": tuple(PRECISIONS),
    "trainer.accelerator": ("auto", "cpu", "gpu", "cuda"),
    "trainer.gradient_clip_algorithm": ("norm", "value", "None"),
    "export": ("None", "hf"),
}

_number = (int, float)
NUMBERS: dict[str, tuple[Any, float, bool]] = {
    "seed": (int, 0, False),
    **{f"size_defaults.{size}.seq_len": (int, 8, False) for size in ("tiny", "full")},
    **{f"size_defaults.{size}.lr": (_number, 0, False) for size in ("tiny", "full")},
    **{f"size_defaults.{size}.max_steps": (int, -1, False) for size in ("tiny", "full")},
    "model.num_layers": (int, 1, True),
    "model.router_aux_loss": (_number, 0, False),
    "data.seq_len": (int, 8, True),
    "data.batch_size": (int, 1, False),
    "data.eval_batch_size": (int, 1, False),
    "data.heldout_size": (int, 1, False),
    "data.max_records": (int, 2, True),
    "data.num_workers": (int, 0, False),
    "optimizer.lr": (_number, 0, True),
    "optimizer.weight_decay": (_number, 0, False),
    "optimizer.watch_every": (int, 0, False),
    "optimizer.experts.watch_every": (int, 0, False),
    "scheduler.total_iters": (int, 0, False),
    "trainer.num_nodes": (int, 1, False),
    "trainer.max_steps": (int, -1, True),
    "trainer.max_epochs": (int, -1, True),
    "trainer.min_steps": (int, 0, True),
    "trainer.min_epochs": (int, 0, True),
    "trainer.gradient_clip_val": (_number, 0, True),
    "trainer.accumulate_grad_batches": (int, 1, False),
    "trainer.log_every_n_steps": (int, 1, False),
    "trainer.num_sanity_val_steps": (int, -1, True),
    "trainer.check_val_every_n_epoch": (int, 1, True),
    "trainer.reload_dataloaders_every_n_epochs": (int, 0, False),
    "trainer.strategy.timeout.seconds": (_number, 1, False),
}
"""Key: its type, the least value, and whether null is allowed. A key that the configuration has not is passed over."""

TYPES: dict[str, Any] = {
    "ckpt_path": str | None,
    "objective": str,
    "data.path": str | None,
    "data.cache_dir": str | None,
    "model.id": str | None,
    "model.config": str | None,
    "model.pretrained": bool | None,
    "model.low_memory": bool,
    "model.attn_implementation": str | None,
    "model.checkpointing": bool,
    "model.trust_remote_code": bool,
    "model.overrides": dict[str, Any],
    "mode.experts": str | list[str],
    "optimizer.betas": list[float],
    "optimizer.eps": float | list[float | None],
    "optimizer._partial_": Literal[True],
    "scheduler._partial_": Literal[True],
    "trainer.strategy": dict[str, Any],
    "trainer.strategy.find_unused_parameters": bool,
    "trainer.strategy.save_distributed_checkpoint": bool,
    "trainer.strategy.reshard_after_forward": bool | int | None,
}
"""What no class declares that is made from these values."""

HINTS = {
    "trainer.strategy": " Choose one with trainer=default, trainer=ddp or trainer=fsdp.",
    "model.overrides": " Set its keys one by one with +model.overrides.KEY=VALUE.",
    "mode.experts": " auto finds them; regular expressions over parameter names choose them.",
}
"""What to do instead, where the type alone does not say it."""

KEYS: dict[str, tuple[str, ...]] = {
    "model": (
        *("name", "id", "size", "pretrained", "low_memory", "num_layers", "attn_implementation", "checkpointing"),
        *("loss", "router_aux_loss", "trust_remote_code", "overrides"),
    ),
    "mode": (
        *("name", "experts", "expert_clip", "accumulation", "on_nonfinite", "check", "log_grad_norm"),
        "expert_state_device",
    ),
    "backend": ("name",),
    "data": ("_target_", "source", "seq_len", "batch_size"),
    "optimizer": ("_target_",),
    "scheduler": ("_target_",),
    "trainer": (
        *("_target_", "accelerator", "devices", "num_nodes", "precision", "strategy", "max_steps", "max_epochs"),
        *("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "log_every_n_steps"),
        "enable_progress_bar",
    ),
    **{f"size_defaults.{size}": ("seq_len", "lr", "max_steps") for size in ("tiny", "full")},
}
"""Keys that this command reads itself."""
