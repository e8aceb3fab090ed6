"""Compose with Hydra and run one job here, or each job of a sweep in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
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

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class SweepFolder(Callback):
    """Remembers the folder of the sweep that runs here; a launcher may run its jobs in other processes.

    Attributes:
        path: the folder, absolute; None outside of a sweep.
    """

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepFolder.path = Path(str(config.hydra.sweep.dir)).absolute()
        print(f"Sweep in {SweepFolder.path}. Stopped or failed, it goes on with hydra.sweep.dir={SweepFolder.path}")


def launch(script: Path, arguments: list[str]) -> int:
    """Run the command line and return the exit code.

    A sweep ends with a report on its folder. Its code is 0 if every job in the folder has a result, else that of the
    first job without one.
    """
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
    codes: list[int] = []
    SweepFolder.path = None
    # A launcher's processes unpickle the task, for which they have to find this package.
    root = str(script.parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))

    def task(cfg: DictConfig) -> float:
        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            from experiments.sweep import run_in_sweep

            kept = [flag for flag in flags if flag not in ("-m", "--multirun")]
            hydras = [o for o in settings.overrides.hydra if not o.startswith(OF_THE_SWEEP)]
            job = [*kept, *settings.overrides.task, *hydras]
            return run_in_sweep(cfg, script, job, Path(settings.runtime.output_dir))
        from experiments.job import run_job

        codes.append(run_job(cfg, Path(settings.runtime.output_dir)))
        return codes[-1]

    try:
        hydra.main(version_base="1.3", config_path=str(directory), config_name="config")(task)()
    except KeyboardInterrupt:
        if SweepFolder.path is None:
            raise
        _report(SweepFolder.path)
        return INTERRUPTED
    if SweepFolder.path is not None:
        return _report(SweepFolder.path)
    return max(codes, default=0)


def _report(folder: Path) -> int:
    """Report on a sweep; the exit code that its jobs add up to."""
    from experiments.report import report
    from experiments.reporting.runs import read_runs

    report([folder], folder)
    runs, failures = read_runs([folder])
    codes = [failure.exit_code or 1 for failure in failures] or [0 if runs else 1]
    # A job that a signal ended has a negative code, which a shell would not see as one.
    return codes[0] if codes[0] >= 0 else 1
