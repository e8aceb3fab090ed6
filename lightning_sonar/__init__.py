"""Sonar-MoE for PyTorch Lightning: update each expert tensor inside backward and free its gradient at once."""

from lightning_sonar.experts import ExpertTensors, find_expert_tensors
from lightning_sonar.in_backward import InBackward
from lightning_sonar.memory import MemoryProfiler
from lightning_sonar.memory.planner import MemoryPlan, plan_memory
from lightning_sonar.mixin import SonarMoEMixin
from lightning_sonar.modes import MODES, Mode
from lightning_sonar.optim import FusedAdamW
from lightning_sonar.release import release_in_backward
from lightning_sonar.strategies import (
    SonarMoEDDPStrategy,
    SonarMoEFSDPStrategy,
    SonarMoEStrategy,
    register_strategies,
    shard_moe_,
)

__version__ = "0.1.0"

__all__ = [
    "MODES",
    "ExpertTensors",
    "FusedAdamW",
    "InBackward",
    "MemoryPlan",
    "MemoryProfiler",
    "Mode",
    "SonarMoEDDPStrategy",
    "SonarMoEFSDPStrategy",
    "SonarMoEMixin",
    "SonarMoEStrategy",
    "find_expert_tensors",
    "plan_memory",
    "register_strategies",
    "release_in_backward",
    "shard_moe_",
]

register_strategies()
