"""Optimizers: the fused AdamW, the same arithmetic in plain torch, low-bit states, and stepping one tensor of any."""

from lightning_sonar.optim.adamw import FusedAdamW
from lightning_sonar.optim.low_bit import ao_adamw4bit, ao_adamw8bit, ao_adamw_fp8, bnb_adamw8bit, flash_adamw
from lightning_sonar.optim.parted import ExpertsAndDense
from lightning_sonar.optim.states import largest_update, make_states
from lightning_sonar.optim.step_one import is_element_wise, step_slice, step_tensor
from lightning_sonar.optim.stochastic import StochasticRounding
from lightning_sonar.optim.update import adamw_

__all__ = [
    "ExpertsAndDense",
    "FusedAdamW",
    "StochasticRounding",
    "adamw_",
    "ao_adamw4bit",
    "ao_adamw8bit",
    "ao_adamw_fp8",
    "bnb_adamw8bit",
    "flash_adamw",
    "is_element_wise",
    "largest_update",
    "make_states",
    "step_slice",
    "step_tensor",
]
