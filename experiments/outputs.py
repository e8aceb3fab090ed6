"""Where a run writes: inside its folder, unless it is told otherwise by an absolute path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from experiments.checks import SettingsError

_FOLDERS = ("dirpath", "save_dir", "default_root_dir", "root_dir", "log_dir", "output_dir")
"""Arguments of callbacks, loggers and the Trainer that say where files go."""

_NAMES = ("filename", "name", "version", "sub_dir")
"""Arguments of theirs that become part of a path below that."""

_WRITERS = ("trainer", "callbacks", "logger")


def keep_inside(cfg: DictConfig, folder: Path) -> None:
    """Let relative paths under which a run writes begin in its folder, in place.

    Absolute paths, paths under ``~`` and addresses such as ``s3://...`` stay as they are: they are meant.

    Args:
        cfg: settled and resolved.
        folder: the run's.

    Raises:
        SettingsError: if a relative path or a name leads out of the folder.
    """
    folder = Path(os.path.abspath(folder))
    with open_dict(cfg):
        if cfg.trainer.get("default_root_dir") is None:  # Lightning would take the working directory
            cfg.trainer.default_root_dir = str(folder)
        for group in _WRITERS:
            _keep_inside(cfg[group], group, folder)


def _keep_inside(node: Any, path: str, folder: Path) -> None:
    for name in list(node) if isinstance(node, DictConfig) else ():
        value, key = node[name], f"{path}.{name}"
        if isinstance(value, DictConfig):
            _keep_inside(value, key, folder)
        elif not isinstance(value, str) or "://" in value or "_target_" not in node:
            continue
        elif name in _FOLDERS and not Path(os.path.expanduser(value)).is_absolute():
            place = Path(os.path.abspath(folder / value))
            if folder != place and folder not in place.parents:
                raise SettingsError(
                    f"{key}={value}: this leads out of the run's folder {folder}, in which relative paths begin. Use a "
                    "path without '..', or an absolute one."
                )
            node[name] = str(place)
        elif name in _NAMES and (".." in Path(value).parts or Path(value).is_absolute()):
            raise SettingsError(f"{key}={value}: expected a name, and this leads out of the folder that it is put in.")
