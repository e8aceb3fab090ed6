"""What is refused only once the run begins: by the model, by Lightning or by this package's own step."""

from __future__ import annotations

import traceback
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from experiments.checks import SettingsError
from experiments.typed import one_line, show
from lightning_sonar.memory.out_of_memory import is_out_of_memory


def refusal(error: Exception, cfg: DictConfig, resume: str | None, trained: bool) -> SettingsError | None:
    """What to tell the user of an error that ended the fit; None if it is not the settings that are wrong.

    Args:
        error: what ended the fit.
        cfg: settled.
        resume: the checkpoint that the run was resumed from.
        trained: whether a step had been taken. What fails later is no refusal, but for what Lightning calls one.
    """
    if resume and "Error(s) in loading state_dict" in str(error):
        return SettingsError(
            f"ckpt_path={resume} holds another model: {str(error).splitlines()[1].strip()} Resume with the "
            "settings of the run that wrote it; its folder has them in config.yaml."
        )
    if is_out_of_memory(error):
        return None
    if isinstance(error, MisconfigurationException):
        return SettingsError(f"The Trainer refused these settings: {one_line(error)}")
    if trained:
        return None
    # ValueError is how this package, Lightning and torch refuse an argument.
    if isinstance(error, ValueError) or (isinstance(error, TypeError) and _is_lightnings(error)):
        return SettingsError(f"The run could not begin with these settings: {one_line(error)}")
    if cfg.model.overrides and isinstance(error, (RuntimeError, IndexError, TypeError, ArithmeticError)):
        values = OmegaConf.to_container(cfg.model.overrides)
        return SettingsError(
            f"model.overrides={show(values)}: the model fails in its first step ({type(error).__name__}: "
            f"{one_line(error)}). Change the values, or leave them out; the run folder's error.txt has the traceback."
        )
    return None


def _is_lightnings(error: Exception) -> bool:
    """Whether Lightning itself raised an error, and no model that it runs."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "lightning" in Path(frames[-1].filename).parts
