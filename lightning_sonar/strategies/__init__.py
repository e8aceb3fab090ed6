"""Lightning strategies with in-backward updates."""

from lightning_sonar.strategies.mixin import SonarMoEStrategyMixin
from lightning_sonar.strategies.registration import register_strategies
from lightning_sonar.strategies.single_device import SonarMoEStrategy

__all__ = ["SonarMoEStrategy", "SonarMoEStrategyMixin", "register_strategies"]
