"""Values out of the environment are used, and stay references where a configuration is written down or passed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc


def environment_references(cfg: DictConfig) -> dict[tuple[Any, ...], str]:
    """Values that come from environment variables, by their place: the text by which the configuration refers to them.

    Args:
        cfg: not yet resolved.

    Returns:
        Place, as keys and indices from the root: ``${oc.env:...}``, or a reference to such a value.
    """
    with _watched() as asked:
        return dict(_references(cfg, (), asked))


def _references(node: Any, place: tuple[Any, ...], asked: list[str]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if node._is_none() or node._is_missing():
        return
    raw: Any = OmegaConf.to_container(node, resolve=False)
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        del asked[:]
        try:
            value = None if OmegaConf.is_missing(node, key) else node[key]
        except OmegaConfBaseException:  # what it refers to is not there, which others say better
            continue
        if asked:
            yield (*place, key), raw[key]
        elif OmegaConf.is_config(value):
            yield from _references(value, (*place, key), asked)


def with_references(cfg: DictConfig, references: Mapping[tuple[Any, ...], str]) -> dict[str, Any]:
    """The configuration as it may be written down: what came from the environment is a reference to it again.

    The key of a tracking service, given as ``${oc.env:KEY}``, would otherwise stand in the run's folder and in every
    checkpoint.

    Args:
        cfg: resolved.
        references: from `environment_references`, taken before.

    Returns:
        Plain containers and values.
    """
    found: Any = OmegaConf.to_container(cfg)
    for place, text in references.items():
        node = found
        for key in place[:-1]:
            node = node[key] if isinstance(node, list) or key in node else {}
        if isinstance(node, list) or place[-1] in node:
            node[place[-1]] = text
    return found


def as_given(overrides: ListConfig | list[str]) -> list[str]:
    """Overrides resolved, which refer to the job's number and the like; those that ask for the environment as text."""
    with _watched() as asked:
        references = dict(_references(overrides, (), asked))
    return [references.get((index,)) or str(overrides[index]) for index in range(len(overrides))]


@contextmanager
def _watched() -> Iterator[list[str]]:
    """The names of environment variables that a configuration asks for, as it does."""
    asked: list[str] = []

    def env(*arguments: Any) -> Any:
        asked.append(str(arguments[0]))
        return oc.env(*arguments)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield asked
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
