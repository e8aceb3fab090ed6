"""Compose with Hydra and run one job here, or each job of a sweep in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from experiments.overrides import OverrideError, check_overrides, split_arguments
from lightning_sonar.config_dir import config_dir

# What belongs to the sweep as a whole and not to its jobs.
OF_THE_SWEEP = (
    "hydra.sweep",
    "hydra.run",
    "hydra.mode",
    "hydra.sweeper",
    "hydra.launcher",
    "hydra/sweeper",
    "hydra/launcher",
)


def launch(script: Path, arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    flags, overrides = split_arguments(arguments)
    directory = config_dir()
    given = {flag.split("=", 1)[0] for flag in flags}
    asks = given & {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
    elsewhere = given & {"--config-path", "-cp", "--config-dir", "-cd", "--config-name", "-cn"}
    if not asks and not elsewhere:
        try:
            check_overrides(overrides, directory)
        except OverrideError as error:
            print(f"{script.name}: {error}", file=sys.stderr)
            return 2
    codes: dict[str, int] = {}
    sweep: list[Path] = []

    def task(cfg: DictConfig) -> int:
        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            folder = Path(settings.runtime.output_dir)
            sweep[:] = [Path(settings.sweep.dir).absolute()]
            hydras = [o for o in settings.overrides.hydra if not o.startswith(OF_THE_SWEEP)]
            codes[str(folder)] = _spawn(script, flags, [*settings.overrides.task, *hydras], folder)
            return codes[str(folder)]
        from experiments.job import run_job

        codes["run"] = run_job(cfg, Path(settings.runtime.output_dir))
        return codes["run"]

    hydra.main(version_base="1.3", config_path=str(directory), config_name="config")(task)()
    if sweep:
        from experiments.report import report

        report([sweep[0]], sweep[0], failed={name: code for name, code in codes.items() if code})
    failed = [code for code in codes.values() if code]
    # A job that a signal ended has a negative code, which a shell would not see as one.
    return (failed[0] if failed[0] > 0 else 1) if failed else 0


def _spawn(script: Path, flags: list[str], overrides: list[str], folder: Path) -> int:
    """One job of a sweep, in a process of its own so that its memory starts clean."""
    kept: list[Any] = [flag for flag in flags if flag not in ("-m", "--multirun")]
    command = [sys.executable, str(script), *kept, *overrides, f"hydra.run.dir={_quoted(folder)}", "hydra.mode=RUN"]
    return subprocess.run(command, check=False).returncode


def _quoted(folder: Path) -> str:
    text = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
