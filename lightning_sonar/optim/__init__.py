"""Optimizers: the fused AdamW, the same arithmetic in plain torch, and stepping one tensor of any optimizer."""

from lightning_sonar.optim.adamw import FusedAdamW
from lightning_sonar.optim.step_one import is_element_wise, step_slice, step_tensor
from lightning_sonar.optim.stochastic import StochasticRounding
from lightning_sonar.optim.update import adamw_

__all__ = ["FusedAdamW", "StochasticRounding", "adamw_", "is_element_wise", "step_slice", "step_tensor"]
