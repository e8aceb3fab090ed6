"""Compose with Hydra and run one job here, or each job of a sweep in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from experiments.choices import explain
from experiments.environment import as_given
from experiments.folder import FolderError, check_writable, take
from experiments.overrides import OverrideError, check_overrides, check_ranges, key_of, split_arguments
from experiments.status import INTERRUPTED, TERMINATED
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


class Terminated(KeyboardInterrupt):
    """SIGTERM to a sweep, which ends as Ctrl-C ends it: its job is told, and its report is written."""


class RunFolder(Callback):
    """Takes a run's folder before Hydra writes into it, so that no other run's files are overwritten."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        from lightning.pytorch.utilities.rank_zero import rank_zero_only

        if getattr(rank_zero_only, "rank", None):
            return
        _or_exit(take, Path(str(config.hydra.run.dir)).absolute())
        swept = OmegaConf.select(config, "hydra.sweeper.params")
        # A job of a sweep is told its mode.
        if swept and not any(override.startswith("hydra.mode=") for override in config.hydra.overrides.hydra):
            print(f"note: this experiment is a sweep over {', '.join(swept)}, of which this is one run; -m runs all.")


def _or_exit(act: Callable[[Path], object], folder: Path) -> None:
    try:
        act(folder)
    except FolderError as error:
        print(f"error: {error}", file=sys.stderr)
        # Any Exception of a callback's Hydra would turn into a warning.
        raise SystemExit(2) from error


class SweepFolder(Callback):
    """Remembers the folder of the sweep that runs here; a launcher may run its jobs in other processes.

    Also lets the command line choose anew what an experiment sweeps over, where Hydra would run each combination once
    for every value that the experiment has.

    Attributes:
        path: the folder, absolute; None outside of a sweep.
    """

    path: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepFolder.path = Path(str(config.hydra.sweep.dir)).absolute()
        _or_exit(check_writable, SweepFolder.path)
        swept = OmegaConf.select(config, "hydra.sweeper.params")
        if swept:
            with read_write(config.hydra), open_dict(config.hydra):
                for key in {key_of(override) for override in config.hydra.overrides.task}.intersection(swept):
                    del swept[key]
        print(f"Sweep in {SweepFolder.path}. Stopped or failed, it goes on with hydra.sweep.dir={SweepFolder.path}")


def launch(script: Path, arguments: list[str]) -> int:
    """Run the command line and return the exit code.

    A sweep ends with a report on its folder. Its code is 0 if every job in the folder has a result, else that of the
    first job without one.
    """
    flags, overrides = split_arguments(arguments)
    directory = config_dir()
    given = {flag.split("=", 1)[0] for flag in flags}
    multirun = bool(given & {"-m", "--multirun"})
    sweeps = multirun or any(override.upper() == "HYDRA.MODE=MULTIRUN" for override in overrides)
    shows = given & {"--cfg", "-c", "--info", "-i"}
    asks = shows | (given & {"--help", "-h", "--hydra-help", "--version"})
    elsewhere = given & {"--config-path", "-cp", "--config-dir", "-cd", "--config-name", "-cn"}
    if shows and multirun:
        print(f"{script.name}: {min(shows)} shows the configuration of one run: leave out -m.", file=sys.stderr)
        return 2
    if not asks and not elsewhere:
        try:
            check_overrides(overrides, directory)
            check_ranges(overrides)
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

            swept = OmegaConf.select(cast(DictConfig, settings), "sweeper.params") or {}
            if left := sorted(set(swept).difference(map(key_of, settings.overrides.task))):
                print(f"note: this job's experiment is a sweep over {', '.join(left)}, which it runs if given alone.")
            kept = [flag for flag in flags if flag not in ("-m", "--multirun")]
            hydras = [o for o in settings.overrides.hydra if not o.lstrip("+~").startswith(OF_THE_SWEEP)]
            # A process's arguments are there for all to see.
            job = [*kept, *as_given(settings.overrides.task), *hydras]
            return run_in_sweep(cfg, script, job, Path(settings.runtime.output_dir))
        from experiments.job import run_job

        codes.append(run_job(cfg, Path(settings.runtime.output_dir)))
        return codes[-1]

    before = signal.signal(signal.SIGTERM, _terminate) if sweeps else None
    try:
        hydra.main(version_base="1.3", config_path=str(directory), config_name="config")(task)()
    except KeyboardInterrupt as error:
        if SweepFolder.path is not None:
            _report(SweepFolder.path)
        print("stopped", file=sys.stderr)
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    finally:
        if sweeps:
            signal.signal(signal.SIGTERM, before)
        if given & {"--help", "-h"} and not elsewhere:
            print(explain(directory))
    if SweepFolder.path is not None:
        return _report(SweepFolder.path)
    return max(codes, default=0)


def _terminate(*_: Any) -> None:
    raise Terminated


def _report(folder: Path) -> int:
    """Report on a sweep; the exit code that its jobs add up to."""
    from experiments.report import report
    from experiments.reporting.runs import read_runs

    report([folder], folder)
    runs, failures = read_runs([folder])
    codes = [failure.exit_code or 1 for failure in failures] or [0 if runs else 1]
    # A job that a signal ended has a negative code, which a shell would not see as one.
    return codes[0] if codes[0] >= 0 else 1
