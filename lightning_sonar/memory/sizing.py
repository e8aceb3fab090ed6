"""What a model needs at the least, by arithmetic, and which size this machine can hold."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lightning_sonar.modes import Mode

MARGIN = 0.10
"""Added to the arithmetic for activations, temporaries and the largest expert gradient."""


@dataclass(frozen=True)
class Requirement:
    """Bytes a training step needs.

    Attributes:
        parameters: bytes of the parameters.
        gradients: bytes of the gradients that are alive when backward ends.
        states: bytes of AdamW's two moments.
    """

    parameters: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        """All of it and the margin, in bytes."""
        return int((self.parameters + self.gradients + self.states) * (1 + MARGIN))

    def __str__(self) -> str:
        return (
            f"about {self.total / 1e9:.1f} GB (parameters {self.parameters / 1e9:.1f}, optimizer states "
            f"{self.states / 1e9:.1f}, gradients {self.gradients / 1e9:.1f}, and {MARGIN:.0%} for the rest)"
        )


def training_requirement(total_params: int, expert_params: int, mode: Mode, dtype: torch.dtype) -> Requirement:
    """Bytes that training needs in a mode, with parameters, gradients and two moments in ``dtype``."""
    width = dtype.itemsize
    dense = total_params - expert_params
    kept = (0 if mode.steps_in_backward(True) else expert_params) + (0 if mode.steps_in_backward(False) else dense)
    return Requirement(width * total_params, width * kept, 2 * width * total_params)


def memory_there(device: torch.device) -> int:
    """Bytes that this process can still get: free GPU memory, or available memory within the cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_limit()
    return available if limit is None else min(available, limit - psutil.Process().memory_info().rss)


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def checkpoint_reachable(hub_id: str) -> bool:
    """Whether a checkpoint is in the local cache or on a hub that answers within a few seconds."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if os.path.isdir(hub_id) or isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(hub_id, timeout=5)
    except Exception:  # whatever keeps the hub from answering, the checkpoint is out of reach
        return False
    return True
