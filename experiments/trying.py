"""Make what a configuration names; where it refuses, find the key that is to blame."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.checks import SettingsError
from experiments.typed import fits, one_line, show, source_of

_T = TypeVar("_T")


def cause_of(error: Exception) -> BaseException:
    """What a class said of its arguments, which Hydra wraps; an error of another kind has the better text itself."""
    return error.__cause__ or error if isinstance(error, InstantiationException) else error


def attempt(cfg: DictConfig, path: str, make: Callable[[DictConfig], _T]) -> _T:
    """Make something of the node at ``path``.

    Args:
        cfg: the whole configuration.
        path: of a node with a ``_target_``.
        make: makes it of the node, or of a copy with one key less.

    Raises:
        SettingsError: with what the class said, in one line, and the key without whose value it would not have.
    """
    node = OmegaConf.select(cfg, path)
    try:
        return make(node)
    except Exception as error:  # whatever a class that the user named may raise
        said = one_line(cause_of(error))
        key, works = _blamed(node, make)
        name = "" if key is None else f" {source_of(cfg, f'{path}.{key}')}={show(_plain(node, key))}:"
        known = works is not inspect.Parameter.empty and fits(works, _SIMPLE)
        instead = f" {source_of(cfg, f'{path}.{key}')}={show(works)} would do." if known else ""
        head = f"{path}={node.get('_target_')}:" if path in ("optimizer", "scheduler") or key is None else ""
        raise SettingsError(f"{head}{name} {said}{instead}".strip()) from error


_SIMPLE = bool | int | float | str | None


def _plain(node: DictConfig, key: str) -> Any:
    value = node[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _blamed(node: DictConfig, make: Callable[[DictConfig], Any]) -> tuple[str | None, Any]:
    """The key without which it can be made, and the value that takes its place then."""
    for key in [str(key) for key in node if not str(key).startswith("_")]:
        less = copy.deepcopy(node)
        with open_dict(less):
            del less[key]
        less._set_parent(node._get_parent())  # a copy has none, and its references would lead nowhere
        try:
            make(less)
        except Exception:
            continue
        return key, _default(node, key)
    return None, inspect.Parameter.empty


def _default(node: DictConfig, key: str) -> Any:
    try:
        return inspect.signature(get_object(node._target_)).parameters[key].default
    except (KeyError, ValueError, TypeError):
        return inspect.Parameter.empty


def try_data(cfg: DictConfig) -> None:
    """Make the data module, which reads nothing yet.

    Raises:
        SettingsError: with what it said.
    """
    attempt(cfg, "data", instantiate)


def try_strategy(cfg: DictConfig) -> None:
    """Make the strategy, so that what it refuses shows before data is read.

    Raises:
        SettingsError: with what it said.
    """
    try:
        instantiate(cfg.trainer.strategy)
    except Exception as error:  # whatever a class that the user named may raise
        raise SettingsError(f"trainer.strategy: {one_line(cause_of(error))}") from error


def make_trainer(cfg: DictConfig, first: Iterable[L.Callback] = ()) -> tuple[L.Trainer, list[L.Callback]]:
    """Make callbacks, loggers and the Trainer.

    Args:
        cfg: settled and resolved.
        first: callbacks that come before those of the configuration.

    Returns:
        The Trainer, and the callbacks that it was given.

    Raises:
        SettingsError: naming the key that is to blame.
    """

    def made(group: str) -> list[Any]:
        there = [name for name, node in cfg[group].items() if node is not None]  # null leaves one out
        return [attempt(cfg, f"{group}.{name}", instantiate) for name in there]

    callbacks: list[L.Callback] = [*first, *made("callbacks")]
    if not cfg.trainer.enable_progress_bar:  # Lightning refuses one then
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    loggers = made("logger")
    trainer = attempt(cfg, "trainer", lambda node: instantiate(node, callbacks=callbacks, logger=loggers or False))
    return trainer, callbacks
