"""Expert backends: which kernel multiplies tokens by experts."""

from lightning_sonar.backends.registry import BACKENDS, Backend, resolve_backend

__all__ = ["BACKENDS", "Backend", "resolve_backend"]
