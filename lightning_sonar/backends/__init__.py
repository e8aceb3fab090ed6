"""Expert backends: which kernel multiplies tokens by experts. Importing it makes our own known to transformers."""

from lightning_sonar.backends import scattermoe, sonicmoe
from lightning_sonar.backends.registry import BACKENDS, Backend, resolve_backend

__all__ = ["BACKENDS", "Backend", "resolve_backend"]

scattermoe.register()
sonicmoe.register()
