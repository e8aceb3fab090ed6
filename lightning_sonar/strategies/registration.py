"""Names for ``Trainer(strategy="...")``."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_sonar.strategies.single_device import SonarMoEStrategy


def register_strategies() -> None:
    """Register the strategies with Lightning. Importing `lightning_sonar` does this; it may be repeated."""
    for strategy in (SonarMoEStrategy,):
        StrategyRegistry.register(
            strategy.strategy_name, strategy, description=f"In-backward updates: {strategy.__name__}", override=True
        )
