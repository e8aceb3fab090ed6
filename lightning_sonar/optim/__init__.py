"""Optimizers: the fused AdamW, the same arithmetic in plain torch, and stepping one tensor of any optimizer."""

from lightning_sonar.optim.adamw import FusedAdamW, adamw_
from lightning_sonar.optim.step_one import is_element_wise, step_slice, step_tensor

__all__ = ["FusedAdamW", "adamw_", "is_element_wise", "step_slice", "step_tensor"]
