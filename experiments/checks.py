"""Every value of a composed configuration looked at before anything is made of it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.allowed import CHOICES, CHOSEN, GROUPS, HINTS, KEYS, NUMBERS, TYPES
from experiments.typed import close_to, mismatch, one_line, show, source_of, type_faults, words
from lightning_sonar.clipping import check_clip
from lightning_sonar.expert_clip import check_accumulation
from lightning_sonar.modes import MODES, resolve_mode
from lightning_sonar.nonfinite import check_nonfinite
from lightning_sonar.optim.offload import check_state_device


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


def ranks_of(cfg: DictConfig) -> int:
    """How many ranks train together, as far as the configuration tells."""
    devices = cfg.trainer.devices
    if OmegaConf.is_list(devices):
        count = len(devices)
    elif str(devices).isdecimal() and int(devices) > 0:
        count = int(devices)
    else:
        count = torch.cuda.device_count() if device_of(cfg).type == "cuda" else 1
    return count * int(cfg.trainer.num_nodes)


def check_values(cfg: DictConfig) -> None:
    """Check every value that has a type, a closed set or a range; all faults are reported at once.

    Raises:
        SettingsError: one line a fault.
    """
    try:
        # Each kind of fault would hide behind the ones before it, or be said twice.
        for look in (_absent, _missing, _unnumbered, _values, _together):
            if faults := look(cfg):
                raise SettingsError("\n".join(faults))
    except OmegaConfBaseException as error:  # a value that refers to another one, which is not there
        raise SettingsError(f"{error.full_key or 'configuration'}: {one_line(error)}") from error


def _absent(cfg: DictConfig) -> list[str]:
    """Groups that are not there, or are a value."""
    faults = []
    for group in GROUPS:
        node = cfg.get(group)
        if node is None and group in CHOSEN:
            choose = f"{group}=none" if group in ("callbacks", "logger") else f"{group}=NAME"
            faults.append(f"{group}=null: expected a configuration of this group. Choose one with {choose}.")
        elif not OmegaConf.is_dict(node):
            faults.append(f"{group}={show(node)}: expected keys with values, as in conf/.")
    if faults:
        return faults
    for path, keys in KEYS.items():
        node = OmegaConf.select(cfg, path)
        if not OmegaConf.is_dict(node):
            faults.append(f"{path}={show(node)}: expected keys with values: {', '.join(keys)}.")
        else:
            faults += [f"{path}.{key}: this key is gone, and the run needs it." for key in keys if key not in node]
    return faults


def _missing(cfg: DictConfig) -> list[str]:
    return [f"{key}: a value is needed." for key, value in leaves(cfg) if value == "???"]


def _unnumbered(cfg: DictConfig) -> list[str]:
    """Numbers that are none."""
    return [
        f"{key}=nan: expected a number, and this is none. Leave the key out for its default."
        for key, value in leaves(cfg)
        if isinstance(value, float) and math.isnan(value)
    ]


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a configuration and its key, what refers to another key and Hydra's own left out."""
    # What is not resolved can be walked through in private ways only.
    items = node.items_ex(resolve=False) if OmegaConf.is_dict(node) else enumerate(node._content or ())
    for name, value in items:
        key = f"{path}.{name}" if path else str(name)
        if key == "hydra":
            continue
        if OmegaConf.is_config(value) and not value._is_none():
            yield from leaves(value, key)
        else:
            raw = value._value() if hasattr(value, "_value") else value
            if not (isinstance(raw, str) and "${" in raw):
                yield key, raw


def _values(cfg: DictConfig) -> list[str]:
    """Values outside of their set, their range or their type."""
    faults: dict[str, str] = {}
    for key, valid in CHOICES.items():
        value = OmegaConf.select(cfg, key)
        if isinstance(value, float) or str(value) not in valid:
            faults[key] = f"{key}={show(value)}: expected one of {', '.join(_yaml(v) for v in valid)}."
    for key, (kind, least, optional) in NUMBERS.items():
        value: Any = OmegaConf.select(cfg, key)
        if (value is None and optional) or _parent(cfg, key) is None:
            continue
        # An infinite norm is one that is measured and never clips.
        most = math.inf if key == "trainer.gradient_clip_val" else sys.float_info.max
        right = isinstance(value, kind) and not isinstance(value, bool)
        if not right or value is None or not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            faults[key] = f"{key}={show(value)}: expected {what}, at least {least}{', or null' if optional else ''}."
    for key, declared in TYPES.items():
        if _parent(cfg, key) is not None:
            value = OmegaConf.select(cfg, key)
            text = mismatch(key, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value, declared)
            if value == "":
                text = f"{key}='': expected {words(declared)}, and this one is empty."
            if text is not None:
                faults[key] = text + HINTS.get(key, "")
    faults.update(_of_several_kinds(cfg))
    faults.update(_optional(cfg))
    for group in GROUPS:
        for key, text in type_faults(cfg, group, cfg[group]):
            if not (key in NUMBERS or key in CHOICES or key in TYPES):
                faults.setdefault(key, text)
    return [*faults.values(), *_hugging_face(cfg)]


def _parent(cfg: DictConfig, key: str) -> Any:
    """The node that holds ``key``; None if there is none."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return node if OmegaConf.is_dict(node) and name in node else None


def _yaml(value: str) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(value, value)


def _of_several_kinds(cfg: DictConfig) -> dict[str, str]:
    """The mode's name, and values that may be of one kind or another, each with bounds of its own."""
    name = cfg.mode.name
    faults = {}
    if name not in MODES:
        faults["mode.name"] = (
            f"mode.name={show(name)}: expected one of {', '.join(MODES)}.{close_to(str(name), list(MODES))} Choose it "
            "with mode=NAME, which sets what belongs to it."
        )
    for key in ("mode.log_grad_norm", "trainer.strategy.log_grad_norm"):
        norms: Any = OmegaConf.select(cfg, key) if _parent(cfg, key) is not None else 0
        if (not isinstance(norms, int) or norms < 0) and (source := source_of(cfg, key)) not in faults:
            faults[source] = f"{source}={show(norms)}: expected true, false or a whole number, at least 0."
    interval = cfg.trainer.get("val_check_interval")
    if isinstance(interval, (int, float)) and interval <= 0:
        faults["trainer.val_check_interval"] = (
            f"trainer.val_check_interval={show(interval)}: expected more than 0, or null: batches between validations, "
            "or a part of an epoch, up to 1.0."
        )
    return faults


def _optional(cfg: DictConfig) -> dict[str, str]:
    """Callbacks and loggers that name no class."""
    faults = {}
    for group in ("callbacks", "logger"):
        for name, node in cfg[group].items():
            if node is not None and not (OmegaConf.is_dict(node) and "_target_" in node):
                key = f"{group}.{name}"
                faults[key] = (
                    f"{key}={show(node)}: expected keys with values, _target_ among them, or null to leave it out."
                )
    return faults


def _hugging_face(cfg: DictConfig) -> list[str]:
    if cfg.model.name != "hf":
        only = f"only model=hf takes it, and the model is {cfg.model.name}. Use model=hf, or leave it at null."
        return [f"model.id={cfg.model.id}: {only}"] if cfg.model.id else []
    faults = []
    config = cfg.model.get("config")
    if cfg.model.size != "full":
        faults.append(f"model.size={cfg.model.size}: model=hf has only the checkpoint's own size; leave it at full.")
    if not (cfg.model.id or config):
        faults.append(
            "model.id: a value is needed: a hub id or a local folder; or, for random weights, model.config: an "
            "architecture of transformers such as mixtral, or a config.json."
        )
    if config and cfg.model.pretrained:
        faults.append("model.pretrained=true: model.config has no weights. Use model.id, or model.pretrained=false.")
    return faults


def _together(cfg: DictConfig) -> list[str]:
    """Values that are right alone and do not go together."""
    faults = []
    if str(cfg.trainer.strategy.get("_target_", "")).endswith(".SonarMoEStrategy"):
        ranks = ranks_of(cfg)
        if ranks > 1:
            faults.append(
                f"trainer.devices={cfg.trainer.devices} trainer.num_nodes={cfg.trainer.num_nodes}: {ranks} devices, "
                "but the strategy runs on one. Use trainer=ddp (each device holds the whole model) or trainer=fsdp "
                "(each holds a shard)."
            )
    elif cfg.trainer.get("overfit_batches"):
        faults.append(
            f"trainer.overfit_batches={cfg.trainer.overfit_batches}: Lightning cannot share out these batches among "
            "several ranks. Use trainer.limit_train_batches, or trainer=default."
        )
    if faults:
        return faults
    try:
        mode = resolve_mode(cfg.mode.name, cfg.mode.expert_clip)
        check_accumulation(mode, cfg.mode.accumulation)
        check_state_device(mode, cfg.mode.expert_state_device)
        check_nonfinite(cfg.mode.on_nonfinite, cfg.mode.check)
        check_clip(mode, cfg.trainer.gradient_clip_val, cfg.trainer.gradient_clip_algorithm)
        if mode.expert_clip != "none" and not cfg.trainer.gradient_clip_val:
            faults.append(
                f"mode.expert_clip={mode.expert_clip}: trainer.gradient_clip_val={show(cfg.trainer.gradient_clip_val)} "
                "clips nothing. Set trainer.gradient_clip_val, or mode.expert_clip=none."
            )
    except ValueError as error:
        faults.append(str(error))
    return faults
