"""What `plan_memory` refuses before anything is simulated."""

from __future__ import annotations

from typing import Any

from torch import nn

_OF_A_MODULE = {"backend": "grouped_mm", "optimizer": None, "checkpointing": False, "loss": "full"}


def check_arguments(model: Any, batch: Any, numbers: dict[str, Any], named: dict[str, Any]) -> None:
    """Check the arguments of `plan_memory`.

    Args:
        model: the name, or the function that makes a module.
        batch: the batch for such a module.
        numbers: what has to be a whole number of at least 1, by argument.
        named: what only a named model takes, by argument.

    Raises:
        TypeError: if ``model`` is a module, not a function that makes one.
        ValueError: naming the argument.
    """
    if isinstance(model, nn.Module):
        name = type(model).__name__
        raise TypeError(
            f"plan_memory(a {name}): expected a function that makes the module, because the plan needs one on fake "
            f"tensors, not one that is there. Pass it like plan_memory(lambda: {name}(...), batch=batch), with its "
            "parameters in the dtype they train in."
        )
    for argument, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{argument}={value!r}: expected a whole number, at least 1.")
    if not callable(model):
        return
    if batch is None:
        raise ValueError("plan_memory(a function, ...): a module of your own needs batch=, a batch of the true shapes.")
    for argument, default in _OF_A_MODULE.items():
        if named[argument] != default:
            raise ValueError(
                f"plan_memory(a function, {argument}=...): your module decides that itself; set it in the module."
            )
