"""Turn a composed configuration into settled values: checked, with the defaults that depend on size and device."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, get_args

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.plans import model_values, plan_of
from experiments.rank_memory import MOST_RANKS, bucket_bytes, rank_bytes, ranks_that_fit
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
from lightning_sonar.optim.offload import check_state_device, check_streamable


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
            cfg.model.pretrained = cfg.model.size == "full" and not cfg.model.get("config")
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
    """Make the optimizer and the scheduler for two small parameters, so that a wrong value shows before data is read.

    Raises:
        SettingsError: with what they said.
    """
    key = "optimizer"
    try:
        dtype = PRECISIONS[str(cfg.trainer.precision)]
        # One of them has the shape of an expert tensor: optimizers may treat the two differently.
        shapes = ((2, 2), (2, 2, 2))
        optimizer = instantiate(cfg.optimizer)([torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes])
        if cfg.mode.expert_state_device is not None:
            check_streamable(optimizer)
        key = "scheduler"
        instantiate(cfg.scheduler)(optimizer)
    except Exception as error:  # whatever a class that the user named may raise
        raise SettingsError(f"{key}={cfg[key].get('_target_')}: {_cause_of(error)}".splitlines()[0]) from error


def try_strategy(cfg: DictConfig) -> None:
    """Make the strategy, so that what it refuses shows before data is read.

    Raises:
        SettingsError: with what it said.
    """
    try:
        instantiate(cfg.trainer.strategy)
    except Exception as error:  # whatever a class that the user named may raise
        raise SettingsError(f"trainer.strategy: {_cause_of(error)}") from error


def _cause_of(error: Exception) -> BaseException:
    """What a class said of its arguments, which Hydra wraps; an error of another kind has the better text itself."""
    return error.__cause__ or error if isinstance(error, InstantiationException) else error


def settle_size(cfg: DictConfig, device: torch.device, say: Callable[[str], None]) -> str:
    """``tiny`` or ``full``: as asked, if the machine can hold it, or what the machine can hold."""
    wanted, name = str(cfg.model.size), str(cfg.model.name)
    if wanted == "tiny":
        return wanted
    source = str(cfg.model.id or cfg.model.config) if name == "hf" else models.PRESETS[name].hub_id
    force = "Force a size with model.size=full or model.size=tiny."
    if wanted == "auto" and device.type == "cpu":
        say(
            "model.size=auto chose TINY, because there is no GPU. What the full size needs, and on which card it "
            f"trains, says python experiments/plan.py model={name}. {force}"
        )
        return "tiny"
    plan, there = plan_at(cfg, "full", device), memory_there(device)
    nbytes, needs = needed(cfg, plan, device)
    figures = f"training {source} in mode {cfg.mode.name} needs {needs}; {device} has {there / 1e9:.1f} GB free"
    if wanted == "full":
        if nbytes > there:
            small = "" if name == "hf" else " or take model.size=tiny"
            which = f"model=hf model.{'id' if cfg.model.id else 'config'}={source}" if name == "hf" else f"model={name}"
            raise SettingsError(
                f"model.size=full: {figures}. Use a larger device, another mode or fewer layers (model.num_layers)"
                f"{small}. What fits, finds python experiments/plan.py {which} device_memory={there / 1e9:.0f}GB."
                f"{more_ranks(cfg, plan, device, there, which)}"
            )
        return wanted
    reason = None
    if nbytes > there:
        reason = "the GPU cannot hold it"
        force += more_ranks(cfg, plan, device, there, f"model={name}")
    elif cfg.model.pretrained is not False and not checkpoint_reachable(source):
        reason = f"the checkpoint {source} cannot be reached (random weights: model.pretrained=false)"
    size = "full" if reason is None else "tiny"
    say(f"model.size=auto chose {size.upper()}{'' if reason is None else f', because {reason}'}: {figures}. {force}")
    return size


def needed(cfg: DictConfig, plan: MemoryPlan, device: torch.device) -> tuple[int, str]:
    """Bytes that a device must have for the planned training, and how to say so; on a CPU its ranks share memory."""
    ranks, parts = ranks_of(cfg), ", ".join(f"{n.replace('_', ' ')} {v / 1e9:.1f}" for n, v in plan.split.items())
    if ranks == 1 or (device.type == "cuda" and not is_sharded(cfg)):
        # A GPU's allocator holds more than is alive at once; on a CPU freed memory goes back to the system.
        nbytes = plan.peak_bytes if device.type == "cpu" else plan.reserved_bytes
        nbytes += bucket_bytes(plan) if ranks > 1 else 0
        share = "" if ranks == 1 else " a rank"
        return nbytes, f"{nbytes / 1e9:.1f} GB{share} by the plan (at the peak: {parts})"
    each = rank_bytes(plan, ranks, is_sharded(cfg), device.type)
    text = f"{each / 1e9:.1f} GB a rank on {ranks} ranks, by arithmetic on the plan"
    if device.type == "cuda":
        return each, text
    together = each * (ranks // int(cfg.trainer.num_nodes))
    return together, f"{text}, {together / 1e9:.1f} GB for those of one machine, which share its memory"


def more_ranks(cfg: DictConfig, plan: MemoryPlan, device: torch.device, room: int, which: str) -> str:
    """What a refusal says of more devices; nothing on a CPU, whose ranks share its memory."""
    if device.type == "cpu":
        return ""
    fewest = ranks_that_fit(plan, room)
    fits = f" On {fewest} devices, each with a shard, it fits: trainer=fsdp trainer.devices={fewest}."
    plan_py = f"python experiments/plan.py {which} ranks=2,4,{MOST_RANKS}"
    return f"{fits if fewest else ''} What each of several ranks needs, says {plan_py}."


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
            **model_values(cfg),
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
        if cfg.backend.name == "auto" and not models.takes_backend(config):
            cfg.backend.name = "eager"  # the model's own code


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
    if cfg.model.name == "hf" and not (cfg.model.id or cfg.model.config):
        faults.append(
            "model.id: a value is needed: a hub id or a local folder; or, for random weights, model.config: an "
            "architecture of transformers such as mixtral, or a config.json."
        )
    if cfg.model.name == "hf" and cfg.model.config and cfg.model.pretrained:
        faults.append("model.pretrained=true: model.config has no weights. Use model.id, or model.pretrained=false.")
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
    if not faults and str(cfg.trainer.strategy.get("_target_", "")).endswith(".SonarMoEStrategy"):
        ranks = ranks_of(cfg)
        if ranks > 1:
            faults.append(
                f"trainer.devices={cfg.trainer.devices} trainer.num_nodes={cfg.trainer.num_nodes}: {ranks} devices, "
                "but the strategy runs on one. Use trainer=ddp (each device holds the whole model) or trainer=fsdp "
                "(each holds a shard)."
            )
    if not faults:
        try:
            mode = resolve_mode(cfg.mode.name, cfg.mode.expert_clip)
            check_accumulation(mode, cfg.mode.accumulation)
            check_state_device(mode, cfg.mode.expert_state_device)
            check_clip(mode, cfg.trainer.gradient_clip_val, cfg.trainer.gradient_clip_algorithm)
            if mode.expert_clip != "none" and not cfg.trainer.gradient_clip_val:
                faults.append(
                    f"mode.expert_clip={mode.expert_clip}: trainer.gradient_clip_val={cfg.trainer.gradient_clip_val} "
                    "clips nothing. Set trainer.gradient_clip_val, or mode.expert_clip=none."
                )
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
