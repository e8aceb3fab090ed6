"""Lightning strategies with in-backward updates."""

from lightning_sonar.strategies.ddp import SonarMoEDDPStrategy
from lightning_sonar.strategies.fsdp import SonarMoEFSDPStrategy
from lightning_sonar.strategies.mixin import SonarMoEStrategyMixin
from lightning_sonar.strategies.registration import register_strategies
from lightning_sonar.strategies.sharding import shard_moe_
from lightning_sonar.strategies.single_device import SonarMoEStrategy

__all__ = [
    "SonarMoEDDPStrategy",
    "SonarMoEFSDPStrategy",
    "SonarMoEStrategy",
    "SonarMoEStrategyMixin",
    "register_strategies",
    "shard_moe_",
]
