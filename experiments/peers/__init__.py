"""The ways to train that `bench_peers.py` compares, each as its own documentation says to use it."""

from __future__ import annotations

from experiments.peers.adalomo import AdaLomo
from experiments.peers.base import Batch, Observer, PlainLoop, Plan, Recipe
from experiments.peers.in_hooks import OptimiRelease, TutorialHooks
from experiments.peers.ordinary import Lora, TorchAO
from experiments.peers.trainers import PlainLightning, Sonar, SonarLowBit

__all__ = ["BASELINE", "OURS", "PEERS", "Batch", "Observer", "PlainLoop", "Plan", "Recipe"]

BASELINE = "lightning"
"""What step times are compared with."""

_ALL: tuple[Recipe, ...] = (
    PlainLightning(),
    TutorialHooks(),
    OptimiRelease(),
    AdaLomo(),
    TorchAO(),
    Lora(),
    Sonar("standard"),
    Sonar("in_backward_all"),
    Sonar("sonar"),
    Sonar("sonar_exact_clip"),
    SonarLowBit("bnb_adamw8bit", "bitsandbytes", "sonar_bnb8bit"),
    SonarLowBit("ao_adamw8bit", "torchao", "sonar_ao8bit"),
)

PEERS: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Every row of the table, by name and in its order."""

OURS = tuple(name for name, recipe in PEERS.items() if isinstance(recipe, Sonar))
