"""Look at the command line before Hydra does, so that a typo is answered with what is valid."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

FLAGS_WITH_VALUE = (
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun"),
    *("--package", "-p", "--cfg", "-c", "--info", "-i"),
)


# What Hydra and OmegaConf raise at an override that does not fit; not all of it is of their own kinds.
UNFIT = (HydraException, OmegaConfBaseException, AssertionError, AttributeError, TypeError, ValueError)


class OverrideError(ValueError):
    """An override that names a key or value that does not exist."""


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split a command line into Hydra's flags (with their values) and overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in FLAGS_WITH_VALUE:
            flags += [argument, next(remaining, "")]
        elif argument.startswith("-"):
            flags.append(argument)
        else:
            overrides.append(argument)
    return flags, overrides


def key_of(override: str) -> str:
    """The key that an override sets."""
    return override.split("=", 1)[0].lstrip("+~")


def check_overrides(overrides: list[str], directory: Path, config_name: str = "config") -> None:
    """Compose with each choice of each override, once.

    Raises:
        OverrideError: naming the override and what is valid in its place.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise OverrideError(f"The command line cannot be read: {error}") from error
    choices = [values_of(override, directory) for override in parsed]
    for combination in itertools.islice(_each_once(choices), 64):
        _compose(combination, directory, config_name)


def check_ranges(overrides: list[str]) -> None:
    """See that a range has a sweeper that can search in it.

    Raises:
        OverrideError: naming the range, and what would do.
    """
    if any(key_of(override) == "hydra/sweeper" for override in overrides):
        return
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_interval_sweep():
            raise OverrideError(
                f"{override.input_line}: a range needs a sweeper that searches in it: -m hydra/sweeper=optuna "
                "(pip install 'lightning-sonar[sweep]'). Without one, name the values: KEY=VALUE,VALUE."
            )


def values_of(override: Override, directory: Path) -> list[str]:
    """The overrides with one value each that a sweep stands for, each once; of any other override itself.

    Args:
        override: as parsed.
        directory: where the configuration groups are, from which ``glob(...)`` chooses.

    Raises:
        OverrideError: if a ``glob(...)`` matches nothing.
    """
    if not override.is_sweep_override():
        return [override.input_line or ""]
    key, pattern = override.get_key_element(), override.value()
    if isinstance(pattern, Glob):
        names = pattern.filter(sorted(path.stem for path in (directory / key).glob("*.yaml")))
        if not names:
            raise OverrideError(f"{override.input_line}: no configuration in {key}/ matches. Name the values instead.")
        return [f"{key}={name}" for name in names]
    if not override.is_discrete_sweep():
        return []
    return list(dict.fromkeys(f"{key}={value}" for value in override.sweep_string_iterator()))


def _each_once(choices: list[list[str]]) -> Iterator[list[str]]:
    """The first combination, and for every further choice one combination that holds it."""
    first = [options[0] for options in choices if options]
    yield first
    for index, options in enumerate(choices):
        for option in options[1:]:
            yield [option if o is options else o[0] for o in choices[: index + 1] + choices[index + 1 :] if o]


def _compose(overrides: list[str], directory: Path, config_name: str) -> DictConfig:
    with initialize_config_dir(config_dir=str(directory), version_base="1.3"):
        try:
            return _whole(overrides, config_name)
        except UNFIT as error:
            if isinstance(error, MissingConfigException) and (plugin := _of_a_plugin(error)):
                raise OverrideError(plugin) from error
            # The one without which the others compose; an override may be right only beside another one.
            rest = ((o, [other for other in overrides if other != o]) for o in overrides)
            bad = next((o for o, others in rest if _composes(others, config_name)), None)
            others = [other for other in overrides if other != bad]
            raise OverrideError(_explain(bad, others, error, config_name, directory)) from error


def _of_a_plugin(error: MissingConfigException) -> str | None:
    """What to say of a launcher or a sweeper that is not here; None if something else is missing."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if group not in ("hydra/launcher", "hydra/sweeper"):
        return None
    return (
        f"{group}={name}: there is no {group.removeprefix('hydra/')} of that name here. Those that plugins of Hydra's "
        "bring (joblib, submitit_local, submitit_slurm; optuna) come with pip install 'lightning-sonar[sweep]'. "
        f"Here are: {', '.join(error.options or ())}."
    )


def _whole(overrides: list[str], config_name: str) -> DictConfig:
    cfg = compose(config_name, overrides=overrides, return_hydra_config=True)
    # Hydra names the folder before the run could say what is missing.
    OmegaConf.select(cfg, "hydra.run.dir")
    return cfg


def _composes(overrides: list[str], config_name: str) -> bool:
    try:
        _whole(overrides, config_name)
    except UNFIT:
        return False
    return True


def _explain(override: str | None, others: list[str], error: Exception, config_name: str, directory: Path) -> str:
    if getattr(error, "full_key", None) == "hydra.run.dir":
        first = str(error).splitlines()[0]
        return f"{override or 'hydra.run.dir'}: {first}, and the run's folder (hydra.run.dir) is named after it."
    if override and override.lstrip("+").startswith("hydra.sweeper.params"):
        return f"{override}: only an experiment that is a sweep has these. Name the values: -m KEY=VALUE,VALUE."
    if override is None or "=" not in override:
        return str(error)
    if override.split("=", 1)[1].startswith("{"):
        first = str(error).splitlines()[0]
        return f"{override}: {first} Set new keys one by one with +{override.split('=')[0]}.KEY=VALUE."
    key = override.split("=", 1)[0].lstrip("+~")
    if key.startswith("hydra") or override.startswith(("+", "~")):
        return str(error) if key in str(error) else f"{override}: {error}"
    if (directory / key).is_dir():
        choices = ", ".join(sorted(path.stem for path in (directory / key).glob("*.yaml")))
        return f"{override}: there is no {key} of that name. Choose one of {choices}."
    node: Any = compose(config_name, overrides=others)
    parent = ""
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            break
        node = OmegaConf.to_container(node, resolve=False)[part]  # type: ignore[index]
        node = OmegaConf.create(node) if isinstance(node, dict) else node
        parent = f"{parent}.{part}".lstrip(".")
    else:
        return str(error)
    missing = key[len(parent) :].lstrip(".").split(".")[0]
    valid = sorted(map(str, node)) if isinstance(node, DictConfig) else []
    where = f"{parent!r}" if parent else "the configuration"
    close = difflib.get_close_matches(missing, valid, n=1)
    hint = f" Did you mean {parent + '.' if parent else ''}{close[0]}?" if close else ""
    if valid:
        listing = f" Valid keys there: {', '.join(valid)}; a new one is set with +{override}."
    elif isinstance(node, DictConfig):
        listing = f" It is empty: add a key with +{override}."
    else:
        listing = " It is a value and has no keys."
    return f"{override}: {where} has no key {missing!r}.{hint}{listing}"
