"""Low-bit optimizers, which do not run on fake tensors, modelled by what they allocate; for the planner only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_sonar.memory.optimizer_models.layouts import BITSANDBYTES, FLASH, TORCHAO_4BIT, TORCHAO_8BIT, TORCHAO_FP8
from lightning_sonar.memory.optimizer_models.stand_in import StandIn
from lightning_sonar.optim import ExpertsAndDense, ao_adamw4bit, ao_adamw8bit, ao_adamw_fp8, bnb_adamw8bit, flash_adamw

Factory = Callable[..., torch.optim.Optimizer]

MODELLED: dict[Factory, Any] = {
    ao_adamw4bit: TORCHAO_4BIT,
    ao_adamw8bit: TORCHAO_8BIT,
    ao_adamw_fp8: TORCHAO_FP8,
    bnb_adamw8bit: BITSANDBYTES,
    flash_adamw: FLASH,
}
"""Layouts by the function that makes the real optimizer."""


def with_models(factory: Factory) -> Factory:
    """The same factory, or one that makes a stand-in, if it makes a low-bit optimizer, whole or in part."""
    function, settings = _taken_apart(factory)
    if function in MODELLED:
        # Whoever refuses it names its class.
        kind = type(str(function.__name__), (StandIn,), {})
        return functools.partial(kind, layout=MODELLED[function], **settings)
    if function is ExpertsAndDense:
        children = {name: with_models(settings[name]) for name in ("experts", "dense") if name in settings}
        return functools.partial(ExpertsAndDense, **{**settings, **children})
    return factory


def label_of(optimizer: torch.optim.Optimizer) -> str:
    """What a plan calls an optimizer: its class, and ``(model)`` where it stands for another, with the library."""
    if isinstance(optimizer, ExpertsAndDense):
        names = [_name(child) for child in optimizer.children]
        model = " (model)" if any(isinstance(child, StandIn) for child in optimizer.children) else ""
        return f"{names[0]} for experts, {names[1]}{model}"
    return _name(optimizer) + (" (model)" if isinstance(optimizer, StandIn) else "")


def is_modelled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a stand-in is in it."""
    return label_of(optimizer).endswith("(model)")


def note_of(optimizer: torch.optim.Optimizer) -> str:
    """What a plan says of a modelled optimizer."""
    children = optimizer.children if isinstance(optimizer, ExpertsAndDense) else (optimizer,)
    modelled = [child for child in children if isinstance(child, StandIn)]
    real = [_name(child) for child in children if not isinstance(child, StandIn)]
    note = (
        f"optimizer {label_of(optimizer).removesuffix(' (model)')} is modelled by the states and temporaries that it "
        "allocates"
    )
    if real:
        note += f"; of {real[0]} in it the step is the real one"
    if any(child.layout.copied(child.settings) for child in modelled):
        note += (
            "; the copy of weights that a watched step makes is counted (watch_every=0 makes none), other steps take "
            "up to 4% less"
        )
    return note


def _name(optimizer: torch.optim.Optimizer) -> str:
    return optimizer.layout.name if isinstance(optimizer, StandIn) else type(optimizer).__name__


def _taken_apart(factory: Factory) -> tuple[Any, dict[str, Any]]:
    if isinstance(factory, functools.partial) and not factory.args:
        return factory.func, dict(factory.keywords)
    return factory, {}


__all__ = ["MODELLED", "StandIn", "is_modelled", "label_of", "note_of", "with_models"]
