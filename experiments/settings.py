"""Turn a composed configuration into settled values: checked, with the defaults that depend on size and device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict

from experiments.checks import SettingsError, check_values, device_of, ranks_of
from experiments.plans import model_values, plan_of
from experiments.rank_memory import MOST_RANKS, bucket_bytes, rank_bytes, ranks_that_fit
from experiments.trying import attempt, try_data, try_strategy
from lightning_sonar import models
from lightning_sonar.backends import resolve_backend
from lightning_sonar.memory.planner import PRECISIONS, MemoryPlan
from lightning_sonar.memory.sizing import checkpoint_reachable, memory_there
from lightning_sonar.modes import resolve_mode
from lightning_sonar.optim.offload import check_streamable
from lightning_sonar.optim.step_one import is_element_wise


def is_sharded(cfg: DictConfig) -> bool:
    """Whether each rank holds a shard of the model only."""
    return str(cfg.trainer.strategy.get("_target_", "")).endswith("FSDPStrategy")


def build_device_of(cfg: DictConfig) -> torch.device:
    """Where a rank builds its model: on the CPU if one device need not hold it all."""
    return torch.device("cpu") if is_sharded(cfg) else device_of(cfg)


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
        if cfg.model.pretrained and cfg.model.size == "tiny":
            raise SettingsError(
                "model.pretrained=true: there is no checkpoint of the tiny size. Use model.size=full, or leave "
                "model.pretrained at null."
            )
        settle_defaults(cfg, cfg.model.size)
        try:
            cfg.backend.name = resolve_backend(cfg.backend.name, device)
        except (ValueError, RuntimeError) as error:
            raise SettingsError(str(error)) from error
    try_optimizer(cfg)
    try_strategy(cfg)
    try_data(cfg)
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
    dtype = PRECISIONS[str(cfg.trainer.precision)]
    # One of them has the shape of an expert tensor: optimizers may treat the two differently.
    shapes = ((2, 2), (2, 2, 2))

    def make(node: DictConfig) -> torch.optim.Optimizer:
        made = instantiate(node)([torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes])
        if cfg.mode.expert_state_device is not None:
            check_streamable(made)
        if resolve_mode(cfg.mode.name).granularity == "expert" and not is_element_wise(made):
            raise ValueError(
                f"mode={cfg.mode.name} updates each expert's slice on its own, which equals updating the tensor only "
                f"for element-wise optimizers; {type(made).__name__} is not known to be one. Use mode=sonar, or "
                "optimizer=fused_adamw."
            )
        return made

    optimizer = attempt(cfg, "optimizer", make)
    attempt(cfg, "scheduler", lambda node: instantiate(node)(optimizer))


def settle_size(cfg: DictConfig, device: torch.device, say: Callable[[str], None]) -> str:
    """``tiny`` or ``full``: as asked, if the machine can hold it, or what the machine can hold."""
    wanted, name = str(cfg.model.size), str(cfg.model.name)
    if wanted == "tiny":
        return wanted
    source = str(cfg.model.id or cfg.model.config) if name == "hf" else models.PRESETS[name].hub_id
    force = "Force a size with model.size=full or model.size=tiny."
    if wanted == "auto" and device.type == "cpu":
        say(
            "model.size=auto chose TINY, because there is no GPU. To see what the full size needs, and which cards "
            f"hold it: python experiments/plan.py model={name}. {force}"
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
