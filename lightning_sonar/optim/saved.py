"""Checks of a saved optimizer before it is loaded: resumed with another one, a run should say so, not break later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay")

_REMEDY = "Resume with the optimizer that wrote it, or begin a new run from the weights alone."


def check_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Check that saved groups are an AdamW's and fit the optimizer's.

    Raises:
        ValueError: if they hold other numbers of parameters, or lack a setting.
    """
    name = type(optimizer).__name__
    found, expected = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if found != expected:
        raise ValueError(
            f"The saved optimizer has groups of {found} parameters; {name} has {expected}. It belongs to another "
            f"model, or it was divided in another way (ExpertsAndDense has a group for experts, which is the first). "
            f"{_REMEDY}"
        )
    for index, group in enumerate(groups):
        missing = [key for key in SETTINGS if key not in group]
        if missing:
            raise ValueError(
                f"Group {index} of the saved optimizer has no {', '.join(missing)}, which {name} expects. {_REMEDY}"
            )


def check_moments(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any], packed: bool = False) -> None:
    """Check that the saved state of each parameter has the two moments of AdamW.

    Args:
        optimizer: which is about to load it.
        state: of each parameter, by number; one that is empty is left out.
        packed: whether a moment may be taken apart into codes and scales.

    Raises:
        ValueError: naming what it has instead.
    """
    for number, entry in state.items():
        if not isinstance(entry, Mapping) or not entry:
            continue
        wrong = [name for name in MOMENTS if not _is_moment(entry.get(name), packed)]
        if wrong:
            raise ValueError(
                f"The saved state of parameter {number} is {kind_of(entry)}; {type(optimizer).__name__} expects the "
                f"moments {' and '.join(MOMENTS)} {'' if packed else 'as float tensors '}of an AdamW. {_REMEDY}"
            )


def kind_of(entry: Mapping[str, Any]) -> str:
    """What the saved state of a parameter is, for a message."""
    names = list(_names(entry))
    if "state1" in names:
        return "of bitsandbytes (state1, state2)"
    if any(isinstance(entry.get(name), Mapping) for name in MOMENTS):
        return "of torchao (codes and scales)"
    if any("::" in name for name in names):
        return "of FlashOptim (quantized values and scales)"
    return f"of another kind of optimizer ({', '.join(names)})"


def _is_moment(value: Any, packed: bool) -> bool:
    if isinstance(value, Mapping):
        return packed and {"codes", "scale"} <= value.keys()
    return isinstance(value, Tensor) and value.is_floating_point()


def _names(entry: Mapping[str, Any]) -> Iterable[str]:
    """Names in a state; bitsandbytes hides most of its own one level below."""
    for name, value in entry.items():
        yield name
        if isinstance(value, Mapping) and name not in MOMENTS:
            yield from value
