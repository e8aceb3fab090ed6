"""Names for ``Trainer(strategy="...")``."""

from __future__ import annotations

import sys

from lightning.pytorch.strategies import StrategyRegistry

from lightning_sonar.strategies.ddp import SonarMoEDDPStrategy
from lightning_sonar.strategies.fsdp import SonarMoEFSDPStrategy
from lightning_sonar.strategies.mixin import SonarMoEStrategyMixin
from lightning_sonar.strategies.single_device import SonarMoEStrategy, TrainersDevice


def register_strategies() -> None:
    """Register the strategies with ``lightning``, and with ``pytorch_lightning`` if that is imported.

    Importing `lightning_sonar` does this. Call it again if ``pytorch_lightning`` is imported later: that is another
    package with classes of its own, so the name there stands for a strategy on its own base class. There, only the
    strategy for one device has a name.
    """
    for strategy in (SonarMoEStrategy, SonarMoEDDPStrategy, SonarMoEFSDPStrategy):
        _register(StrategyRegistry, strategy)
    if "pytorch_lightning" in sys.modules:
        from pytorch_lightning.strategies import SingleDeviceStrategy
        from pytorch_lightning.strategies import StrategyRegistry as OtherRegistry

        bases = (SonarMoEStrategyMixin, TrainersDevice, SingleDeviceStrategy)
        body = {"strategy_name": SonarMoEStrategy.strategy_name, "__doc__": SonarMoEStrategy.__doc__}
        _register(OtherRegistry, type("SonarMoEStrategy", bases, body))


def _register(registry: object, strategy: type) -> None:
    registry.register(  # type: ignore[attr-defined]
        strategy.strategy_name, strategy, description="Expert tensors are updated inside backward.", override=True
    )
