"""Turn a composed configuration into settled values: checked, with the defaults that depend on size and device."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, get_args

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.plans import plan_of
from lightning_sonar import models
from lightning_sonar.backends import BACKENDS, resolve_backend
from lightning_sonar.clipping import check_clip
from lightning_sonar.expert_clip import check_accumulation
from lightning_sonar.in_backward import Accumulation
from lightning_sonar.language_model import Loss
from lightning_sonar.memory.planner import PRECISIONS, MemoryPlan
from lightning_sonar.memory.sizing import checkpoint_reachable, memory_there
from lightning_sonar.modes import ExpertClip, resolve_mode
from lightning_sonar.nonfinite import Check, OnNonfinite


class SettingsError(ValueError):
    """A value that the run cannot work with; the message is meant for the user."""


def device_of(cfg: DictConfig) -> torch.device:
    """The device that the Trainer will choose for this rank."""
    wanted = str(cfg.trainer.accelerator)
    if wanted in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", torch.cuda.current_device())))
        return torch.device("cuda", local % torch.cuda.device_count())
    if wanted in ("gpu", "cuda"):
        raise SettingsError(f"trainer.accelerator={wanted}: torch sees no GPU here. Use trainer.accelerator=cpu.")
    return torch.device("cpu")


def is_sharded(cfg: DictConfig) -> bool:
    """Whether each rank holds a shard of the model only."""
    return str(cfg.trainer.strategy.get("_target_", "")).endswith("FSDPStrategy")


def build_device_of(cfg: DictConfig) -> torch.device:
    """Where a rank builds its model: on the CPU if one device need not hold it all."""
    return torch.device("cpu") if is_sharded(cfg) else device_of(cfg)


def ranks_of(cfg: DictConfig) -> int:
    """How many ranks train together, as far as the configuration tells."""
    devices = cfg.trainer.devices
    if OmegaConf.is_list(devices):
        count = len(devices)
    elif str(devices).lstrip("-").isdigit() and int(devices) > 0:
        count = int(devices)
    else:
        count = torch.cuda.device_count() if device_of(cfg).type == "cuda" else 1
    return count * int(cfg.trainer.num_nodes)


def settle(cfg: DictConfig, say: Callable[[str], None] = print) -> DictConfig:
    """Check the configuration and fill in, in place, what depends on the size and the device.

    Raises:
        SettingsError: naming the key, its value and what would work.
    """
    check_values(cfg)
    device = device_of(cfg)
    with open_dict(cfg):
        check_model(cfg)
        cfg.model.size = settle_size(cfg, device, say)
        if cfg.model.pretrained is None:
            cfg.model.pretrained = cfg.model.size == "full"
        settle_defaults(cfg, cfg.model.size)
        try:
            cfg.backend.name = resolve_backend(cfg.backend.name, device)
        except (ValueError, RuntimeError) as error:
            raise SettingsError(str(error)) from error
    try_optimizer(cfg)
    try_strategy(cfg)
    return cfg


def settle_defaults(cfg: DictConfig, size: str) -> None:
    """Fill in, in place, what depends on the size."""
    defaults = cfg.size_defaults[size]
    with open_dict(cfg):
        if cfg.data.seq_len is None:
            cfg.data.seq_len = defaults.seq_len
        if cfg.optimizer.get("lr", 0.0) is None:
            cfg.optimizer.lr = defaults.lr
        if cfg.trainer.max_steps is None:
            cfg.trainer.max_steps = defaults.max_steps if cfg.trainer.max_epochs is None else -1


def try_optimizer(cfg: DictConfig) -> None:
    """Make the optimizer and the scheduler for one small parameter, so that a wrong value shows before data is read.

    Raises:
        SettingsError: with what they said.
    """
    key = "optimizer"
    try:
        optimizer = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(2, 2))])
        key = "scheduler"
        instantiate(cfg.scheduler)(optimizer)
    except Exception as error:  # whatever a class that the user named may raise
        cause = error.__cause__ or error
        raise SettingsError(f"{key}={cfg[key].get('_target_')}: {cause}".splitlines()[0]) from error


def try_strategy(cfg: DictConfig) -> None:
    """Make the strategy, so that what it refuses shows before data is read.

    Raises:
        SettingsError: with what it said.
    """
    try:
        instantiate(cfg.trainer.strategy)
    except Exception as error:  # whatever a class that the user named may raise
        raise SettingsError(f"trainer.strategy: {error.__cause__ or error}") from error


def settle_size(cfg: DictConfig, device: torch.device, say: Callable[[str], None]) -> str:
    """``tiny`` or ``full``: as asked, if the machine can hold it, or what the machine can hold."""
    wanted, name = str(cfg.model.size), str(cfg.model.name)
    if wanted == "tiny":
        return wanted
    source = str(cfg.model.id) if name == "hf" else models.PRESETS[name].hub_id
    force = "Force a size with model.size=full or model.size=tiny."
    if wanted == "auto" and device.type == "cpu":
        say(
            "model.size=auto chose TINY, because there is no GPU. What the full size needs, and on which card it "
            f"trains, says python experiments/plan.py model={name}. {force}"
        )
        return "tiny"
    need, there = plan_at(cfg, "full", device), memory_there(device)
    # A GPU's allocator holds more than is alive at once; on a CPU freed memory goes back to the system.
    nbytes = need.peak_bytes if device.type == "cpu" else need.reserved_bytes
    parts = ", ".join(f"{name.replace('_', ' ')} {value / 1e9:.1f}" for name, value in need.split.items())
    figures = (
        f"training {source} in mode {cfg.mode.name} needs {nbytes / 1e9:.1f} GB by the plan (at the peak: {parts}); "
        f"{device} has {there / 1e9:.1f} GB free"
    )
    if wanted == "full":
        if nbytes > there:
            small = "" if name == "hf" else " or take model.size=tiny"
            raise SettingsError(
                f"model.size=full: {figures}. Use a larger device, another mode or fewer layers (model.num_layers)"
                f"{small}. What fits, finds python experiments/plan.py model={name} device_memory={there / 1e9:.0f}GB."
            )
        return wanted
    reason = None
    if nbytes > there:
        reason = "the GPU cannot hold it"
    elif cfg.model.pretrained is not False and not checkpoint_reachable(source):
        reason = f"the checkpoint {source} cannot be reached (random weights: model.pretrained=false)"
    size = "full" if reason is None else "tiny"
    say(f"model.size=auto chose {size.upper()}{'' if reason is None else f', because {reason}'}: {figures}. {force}")
    return size


def check_model(cfg: DictConfig) -> None:
    """Make the model's configuration, so that a wrong value shows before anything else is done.

    Raises:
        SettingsError: with what is wrong.
    """
    try:
        config = models.build_config(
            cfg.model.name,
            "full",
            num_layers=cfg.model.num_layers,
            model_id=cfg.model.id,
            trust_remote_code=cfg.model.trust_remote_code,
            **OmegaConf.to_container(cfg.model.overrides),  # type: ignore[arg-type]
        )
    except OSError as error:
        raise SettingsError(f"model.id={cfg.model.id}: no configuration could be loaded: {error}") from error
    except (ValueError, TypeError) as error:
        raise SettingsError(f"model.{error}") from error
    if cfg.model.name == "hf":
        try:
            models.count_parameters(config, cfg.model.trust_remote_code)
        except ValueError as error:
            raise SettingsError(f"model=hf: {error}") from error


def plan_at(cfg: DictConfig, size: str, device: torch.device) -> MemoryPlan:
    """The plan of the configuration at a size, as storages are rounded on ``device``.

    Raises:
        SettingsError: if the model cannot be built or trained.
    """
    at = copy.deepcopy(cfg)
    with open_dict(at):
        at.model.size = size
    settle_defaults(at, size)
    try:
        at.backend.name = resolve_backend(at.backend.name, device)
        return plan_of(at, rounding=1 if device.type == "cpu" else None)
    except (ValueError, TypeError, RuntimeError) as error:
        raise SettingsError(f"model={cfg.model.name}: {error}") from error


def check_values(cfg: DictConfig) -> None:
    """Check every value that has a closed set or a range; all faults are reported at once.

    Raises:
        SettingsError: one line a fault.
    """
    groups = {key: node for key, node in cfg.items() if key != "hydra" and OmegaConf.is_dict(node)}
    # OmegaConf gives some keys with their group and some without.
    missing = sorted(
        f"{group}.{key.removeprefix(f'{group}.')}"
        for group, node in groups.items()
        for key in OmegaConf.missing_keys(node)
    )
    faults = [f"{key}: a value is needed." for key in missing]
    if faults:
        raise SettingsError("\n".join(faults))
    if cfg.model.name == "hf" and cfg.model.size != "full":
        faults.append(f"model.size={cfg.model.size}: model=hf has only the checkpoint's own size; leave it at full.")
    for key, valid in CHOICES.items():
        value = OmegaConf.select(cfg, key)
        if str(value) not in valid:
            faults.append(f"{key}={value}: expected one of {', '.join(valid)}.")
    for key, (kind, least, optional) in NUMBERS.items():
        value = OmegaConf.select(cfg, key)
        if value is None and optional:
            continue
        if value is None or not isinstance(value, kind) or isinstance(value, bool) or value < least:
            what = "a whole number" if kind is int else "a number"
            faults.append(f"{key}={value}: expected {what}, at least {least}{', or null' if optional else ''}.")
    if not faults:
        try:
            mode = resolve_mode(cfg.mode.name, cfg.mode.expert_clip)
            check_accumulation(mode, cfg.mode.accumulation)
            check_clip(mode, cfg.trainer.gradient_clip_val, cfg.trainer.gradient_clip_algorithm)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise SettingsError("\n".join(faults))


CHOICES: dict[str, tuple[str, ...]] = {
    "model.size": ("auto", "tiny", "full"),
    "model.name": (*models.PRESETS, "hf"),
    "model.loss": get_args(Loss),
    "model.checkpointing": ("True", "False"),
    "backend.name": ("auto", *BACKENDS),
    "mode.expert_clip": get_args(ExpertClip),
    "mode.accumulation": get_args(Accumulation),
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
    "model.num_layers": (int, 1, True),
    "model.router_aux_loss": (_number, 0, False),
    "data.seq_len": (int, 8, True),
    "data.batch_size": (int, 1, False),
    "data.eval_batch_size": (int, 1, False),
    "data.heldout_size": (int, 1, False),
    "data.max_records": (int, 2, True),
    "trainer.max_steps": (int, -1, True),
    "trainer.max_epochs": (int, -1, True),
    "trainer.gradient_clip_val": (_number, 0, True),
    "trainer.accumulate_grad_batches": (int, 1, False),
    "trainer.log_every_n_steps": (int, 1, False),
}
