"""Checkpoints that say of which step they are, and disks that are too small for them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lightning_sonar.strategies.checkpoints import AtomicCheckpointIO


def content(step: int) -> dict:
    """A checkpoint of which every part says of which step it is."""
    parts = {f"layer {index}": torch.full((1000 + index,), float(step)) for index in range(12)}
    states = {index: {"exp_avg": torch.full((500,), float(step)), "step": step} for index in range(12)}
    return {"global_step": step, "state_dict": parts, "optimizer_states": [{"state": states}]}


def step_of(path: Path) -> int:
    """The step of a checkpoint; fails if its parts are of two."""
    loaded = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)
    step = loaded["global_step"]
    for part in loaded["state_dict"].values():
        assert torch.equal(part, torch.full_like(part, float(step)))
    for state in loaded["optimizer_states"][0]["state"].values():
        assert state["step"] == step
        assert torch.equal(state["exp_avg"], torch.full((500,), float(step)))
    return step


def save(path: Path, step: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    AtomicCheckpointIO().save_checkpoint(content(step), path)
    return path


@contextmanager
def disk_for(size: int) -> Iterator[None]:
    """No file can become larger than ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
