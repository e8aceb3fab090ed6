"""Compare the values of a configuration with the types that the classes it names declare for their arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

PLAIN = (bool, int, float, str, type(None))


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(show, value)) + "]"
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _is_switch(value) else str(value)


def _is_switch(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def fits(value: Any, declared: Any) -> bool:
    """Whether a plain value, or a list or mapping of them, can be what an annotation declares.

    Of what YAML cannot write (modules, functions) nothing is known, and everything fits.

    Args:
        value: from YAML.
        declared: an annotation, resolved.
    """
    if declared is Any or declared is inspect.Parameter.empty:
        return True
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        known = [choice for choice in arguments if _is_known(choice)]
        if all(choice is type(None) for choice in known) and len(known) < len(arguments) and value is not None:
            return True
        return any(fits(value, choice) for choice in known)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if declared in PLAIN or declared is None:
        return _is_plain(value, declared)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is tuple and arguments and arguments[-1] is not ...:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list) and all(fits(item, arguments[0]) for item in value)
    return True


def _is_plain(value: Any, declared: Any) -> bool:
    if declared is None or declared is type(None):
        return value is None
    if isinstance(value, bool):
        return declared is bool
    if declared is float:
        return isinstance(value, (int, float)) and not math.isnan(value)
    return isinstance(value, declared)


def _is_known(declared: Any) -> bool:
    origin = get_origin(declared)
    if declared in PLAIN or origin in (Literal, Union, types.UnionType):
        return True
    return isinstance(origin, type) and issubclass(origin, (Sequence, Mapping))


def words(declared: Any) -> str:
    """What an annotation asks for, for a person who writes YAML; empty if that cannot be said."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin in (Union, types.UnionType):
        found = [words(choice) for choice in arguments if choice is not type(None) and _is_known(choice)]
        found = [word for word in found if word]
        if "a number" in found:
            found = [word for word in found if word != "a whole number"]
        return " or ".join([*dict.fromkeys(found), *(["null"] if type(None) in arguments else [])])
    if origin is Literal:
        return f"one of {', '.join(map(show, arguments))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "keys with values"
    if origin is tuple and arguments and arguments[-1] is not ...:
        return "[" + ", ".join(words(item) for item in arguments) + "]"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "a list"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
    return names.get(declared, "") if declared in PLAIN else ""


def mismatch(key: str, value: Any, declared: Any) -> str | None:
    """What to say of a value that its declaration does not allow; None if it does."""
    if fits(value, declared):
        return None
    return f"{key}={show(value)}: expected {words(declared)}."


@functools.cache
def declarations(target: Any) -> dict[str, Any]:
    """The annotations of everything that may be passed to a class or function by name, base classes' arguments too."""
    makers = [base.__init__ for base in inspect.getmro(target)] if inspect.isclass(target) else [target]
    found: dict[str, Any] = {}
    for maker in makers:
        try:
            parameters, hints = inspect.signature(maker).parameters, get_type_hints(maker)
        except Exception:  # a class may declare what cannot be resolved here, and is not wrong for it
            break
        for name in parameters:
            found.setdefault(name, hints.get(name, Any))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return found


def source_of(cfg: DictConfig, key: str) -> str:
    """The key that a user sets to change the value at ``key``: another one, where that refers to it."""
    for _ in range(10):
        parent, _, name = key.rpartition(".")
        node: Any = OmegaConf.select(cfg, parent) if parent else cfg
        raw = OmegaConf.to_container(node, resolve=False)[name] if OmegaConf.is_dict(node) else None  # type: ignore[index,call-overload]
        found = re.fullmatch(r"\$\{([\w.]+)\}", raw) if isinstance(raw, str) else None
        if found is None:
            return key
        key = found[1]
    return key


def type_faults(cfg: DictConfig, path: str, node: Any) -> Iterator[tuple[str, str]]:
    """Every value below ``path`` that the class it is passed to does not declare: its key, and what to say.

    Args:
        cfg: the whole configuration, composed.
        path: of ``node`` in it.
        node: what stands there; what names no class is looked through for what does.
    """
    if not OmegaConf.is_dict(node):
        return
    declared: dict[str, Any] = {}
    if "_target_" in node:
        key = f"{path}._target_"
        if not isinstance(node._target_, str):
            yield key, f"{key}={show(node._target_)}: expected the name of a class, such as torch.optim.AdamW."
            return
        try:
            target = get_object(node._target_)
            if not callable(target):
                raise TypeError(f"it is a {type(target).__name__}, and a class or function is expected")
            declared = declarations(target)
        except Exception as error:  # importing runs whatever stands there
            yield key, f"{key}={node._target_}: it cannot be made: {one_line(error)}"
            return
    for name in node:
        key = f"{path}.{name}"
        value = node[name]
        if OmegaConf.is_dict(value) and ("_target_" in value or name not in declared):
            yield from type_faults(cfg, key, value)
        elif name in declared:
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            if not fits(plain, declared[name]):
                shown = source_of(cfg, key)
                yield shown, f"{shown}={show(plain)}: expected {words(declared[name])}."


def one_line(error: BaseException) -> str:
    """An exception's text in one line, without the lines that Hydra adds about itself."""
    text = str(error).split("\nfull_key:")[0]
    return " ".join(text.split()) or type(error).__name__


def close_to(word: str, valid: Sequence[str]) -> str:
    """A hint at the nearest of ``valid``, or nothing."""
    near = difflib.get_close_matches(word, valid, n=1)
    return f" Did you mean {near[0]}?" if near else ""
