"""When a run is out of memory: which change to it would fit, by the plan of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.checks import SettingsError
from experiments.settings import plan_at
from experiments.typed import show
from lightning_sonar.memory.out_of_memory import OutOfMemory
from lightning_sonar.memory.report import size_text
from lightning_sonar.modes import resolve_mode


@dataclass(frozen=True)
class Change:
    """One change to a run.

    Attributes:
        values: the settings to change, by key.
        cost: what it costs.
    """

    values: dict[str, object]
    cost: str

    def __str__(self) -> str:
        """As it is typed."""
        return " ".join(f"{key}={show(value)}" for key, value in self.values.items())


MOST = 5
"""Changes that are planned; a plan takes some seconds."""


def changes(cfg: DictConfig) -> list[Change]:
    """What may help a run: what costs least comes first, and all of it together last; at most `MOST`."""
    steps: list[Change] = []
    if cfg.model.loss == "full":
        steps.append(Change({"model.loss": "chunked"}, "the same loss"))
    if resolve_mode(cfg.mode.name, cfg.mode.expert_clip).in_backward == "none":
        steps.append(Change({"mode": "sonar"}, "experts are not clipped"))
    if not cfg.model.checkpointing:
        steps.append(Change({"model.checkpointing": True}, "each layer runs forward twice"))
    if cfg.data.batch_size > 1:
        steps.append(Change({"data.batch_size": cfg.data.batch_size // 2}, "half the tokens a microbatch"))
    if len(steps) > 1:
        # The batch is cut only where that is all that is left.
        together = [step for step in steps if "data.batch_size" not in step.values] or steps
        if len(together) > 1:
            values = {key: value for step in together for key, value in step.values.items()}
            steps.append(Change(values, "; ".join(step.cost for step in together)))
    return steps[:MOST]


def adviser(cfg: DictConfig, device: torch.device) -> Callable[[OutOfMemory], list[str]]:
    """For ``MemoryProfiler(advise=...)``: names the changes to a settled run that fit what there was, cheapest first.

    Args:
        cfg: the settled configuration.
        device: where it runs.
    """

    def advise(failure: OutOfMemory) -> list[str]:
        # On a GPU capacity is the allocator's, which holds more than is alive; elsewhere the process itself is in it.
        room = failure.capacity_bytes - failure.process_bytes
        fitting, others, trouble = [], [], []
        for change in changes(cfg):
            try:
                plan = plan_at(changed(cfg, change), cfg.model.size, device)
            except (SettingsError, OSError) as error:
                trouble.append(f"{change}: no plan ({str(error).splitlines()[0]})")
                continue
            needed = plan.reserved_bytes if device.type == "cuda" else plan.peak_bytes
            entry = (needed, f"{change}: needs {size_text(needed)} of {size_text(room)} ({change.cost})")
            (fitting if needed <= room else others).append(entry)
        if fitting:
            return [f"{index}. {line}" for index, (_, line) in enumerate(fitting, 1)] + trouble
        if not others:
            return trouble
        return [f"nothing of what was planned; the least was {min(others)[1]}", *trouble]

    return advise


def changed(cfg: DictConfig, change: Change) -> DictConfig:
    """A copy of a settled configuration with the change made."""
    copied = copy.deepcopy(cfg)
    with open_dict(copied):
        for key, value in change.values.items():
            OmegaConf.update(copied, "mode.name" if key == "mode" else key, value)
    return copied
