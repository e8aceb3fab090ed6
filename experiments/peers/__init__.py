"""The ways to train that `bench_peers.py` compares, each as its own documentation says to use it."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable

from experiments.peers.adalomo import AdaLomo
from experiments.peers.base import Batch, Observer, PlainLoop, Plan, Recipe
from experiments.peers.in_hooks import OptimiRelease, TutorialHooks
from experiments.peers.ordinary import COMPILED, Lora, TorchAO
from experiments.peers.trainers import ON_FP32_COPIES, PlainLightning, Sonar, SonarLowBit

__all__ = ["BASELINE", "OURS", "PEERS", "Batch", "Observer", "PlainLoop", "Plan", "Recipe", "versions"]

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
    SonarLowBit("bnb_adamw8bit", "bitsandbytes", "sonar_bnb8bit", note=ON_FP32_COPIES),
    SonarLowBit("ao_adamw8bit", "torchao", "sonar_ao8bit", note=COMPILED),
)

PEERS: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Every row of the table, by name and in its order."""

OURS = tuple(name for name, recipe in PEERS.items() if isinstance(recipe, Sonar))


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of what the figures of these peers depend on, by package, and Python's."""
    packages = ["torch", "lightning", "transformers"]
    packages += [recipe.package for name in names if (recipe := PEERS[name]).package and not recipe.missing()]
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in dict.fromkeys(packages)
    }
