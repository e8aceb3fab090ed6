"""From a settled configuration to the memory plan of what it would train."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_sonar.memory.planner import MemoryPlan, plan_memory
from lightning_sonar.strategies.mixin import SonarMoEStrategyMixin


def model_values(cfg: DictConfig) -> dict[str, Any]:
    """What the model's configuration is made of beside the keys that every model has."""
    values: dict[str, Any] = OmegaConf.to_container(cfg.model.overrides)  # type: ignore[assignment]
    source = cfg.model.get("config")
    return values if source is None else {**values, "config": source}


def one_devices(strategy: DictConfig) -> DictConfig:
    """The strategy of one device with the same behaviour: the planner has no other ranks to train with."""
    target = str(strategy._target_)
    if not target.endswith(("SonarMoEDDPStrategy", "SonarMoEFSDPStrategy")):
        return strategy
    known = inspect.signature(SonarMoEStrategyMixin.__init__).parameters
    values = {str(key): value for key, value in strategy.items() if key in known}
    return OmegaConf.create({**values, "_target_": "lightning_sonar.SonarMoEStrategy"})


def plan_of(cfg: DictConfig, rounding: int | None = None) -> MemoryPlan:
    """The plan of what a settled configuration would train.

    Args:
        cfg: settled: nothing that depends on the size is null.
        rounding: see `plan_memory`; None is the CUDA allocator's.

    Raises:
        OSError: if the model's configuration cannot be loaded.
        ValueError: if the model cannot be built.
    """
    options: dict[str, Any] = {} if rounding is None else {"rounding": rounding}
    return plan_memory(
        cfg.model.name,
        size=cfg.model.size,
        backend=cfg.backend.name,
        optimizer=instantiate(cfg.optimizer),
        batch_size=cfg.data.batch_size,
        seq_len=cfg.data.seq_len,
        checkpointing=cfg.model.checkpointing,
        loss=cfg.model.loss,
        precision=str(cfg.trainer.precision),
        gradient_clip_val=cfg.trainer.gradient_clip_val,
        accumulate_grad_batches=cfg.trainer.accumulate_grad_batches,
        strategy=functools.partial(instantiate, one_devices(cfg.trainer.strategy)),
        model_id=cfg.model.id,
        num_layers=cfg.model.num_layers,
        router_aux_loss=cfg.model.router_aux_loss,
        attn_implementation=cfg.model.attn_implementation,
        trust_remote_code=cfg.model.trust_remote_code,
        **options,
        **model_values(cfg),
    )
