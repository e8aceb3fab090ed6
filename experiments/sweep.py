"""The jobs of a sweep: each in a process of its own, finished ones skipped, failed ones on record."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.folder import is_taken
from experiments.status import STATUS, read_json, read_status, write_status

_OF_ONE_RUN = ("error.txt", STATUS)

GRACE = 60.0
"""Seconds that a job has to end by itself when its sweep is stopped."""


def settings_sha256(cfg: DictConfig, folder: Path) -> str:
    """A hash of everything that decides a run, wherever its folder lies and whatever it resumes from.

    Args:
        cfg: the composed configuration, before ``settle`` changes it.
        folder: the run's folder, absolute.
    """
    try:
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:  # the job itself will say what refers to nothing
        settings = OmegaConf.to_container(cfg, resolve=False)
    settings.pop("ckpt_path", None)
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.replace(json.dumps(str(folder))[1:-1], "RUN").encode()).hexdigest()


def run_in_sweep(cfg: DictConfig, script: Path, arguments: list[str], folder: Path) -> float:
    """Run one job of a sweep unless it is done, and put on record how it ended.

    Args:
        cfg: the job's composed configuration.
        script: the command.
        arguments: its flags and overrides.
        folder: the job's folder, absolute.

    Returns:
        The figure that ``objective`` names, for sweepers that minimise one; infinity if the job failed. A failed job
        does not raise: a launcher would stop at it.
    """
    sha256 = settings_sha256(cfg, folder)
    result = read_json(folder / "result.json")
    if result is None and is_taken(folder):
        print(f"error: {folder}: another process trains there; the job is left to it.", file=sys.stderr)
        return math.inf
    if result is None:
        for name in _OF_ONE_RUN:
            (folder / name).unlink(missing_ok=True)
        started = time.monotonic()
        code = _spawn(script, arguments, folder)
        write_status(folder, code, time.monotonic() - started)
    elif result.get("settings_sha256") == sha256:
        print(f"{folder}: skipped, its result.json is complete and of the same settings.")
        if read_status(folder).get("exit_code"):
            write_status(folder, 0, 0.0)
    else:
        error = (
            "The folder holds the result of a run with other settings, which is kept. Start this sweep in another "
            f"folder (hydra.sweep.dir=...), or delete {folder} to run the job anew."
        )
        print(f"error: {folder}: {error}", file=sys.stderr)
        write_status(folder, 2, 0.0, error)
        return math.inf
    return _objective(cfg, folder)


def _objective(cfg: DictConfig, folder: Path) -> float:
    result = read_json(folder / "result.json")
    if result is None:
        return math.inf
    value: Any = result
    for part in str(cfg.objective).split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    numbers = sorted(key for key, found in result.items() if isinstance(found, (int, float)))
    print(
        f"objective={cfg.objective}: {folder / 'result.json'} has no such number. It has {', '.join(numbers)}, "
        "step_time_ms.median.",
        file=sys.stderr,
    )
    return math.inf


def _spawn(script: Path, arguments: list[str], folder: Path) -> int:
    """One job, in a process of its own so that its memory starts clean."""
    command = [sys.executable, str(script), *arguments, f"hydra.run.dir={_quoted(folder)}", "hydra.mode=RUN"]
    with subprocess.Popen(command) as child:
        try:
            return child.wait()
        except BaseException:
            child.terminate()  # after which it may write a checkpoint
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
            child.kill()
            raise


def _quoted(folder: Path) -> str:
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
