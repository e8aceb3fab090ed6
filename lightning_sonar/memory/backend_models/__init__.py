"""Expert kernels that cannot run here, modelled by what their forward and backward allocate; for the planner only."""

from __future__ import annotations

from lightning_sonar.memory.backend_models.sonicmoe import sonicmoe_model_forward

MODELLED = {"sonicmoe": sonicmoe_model_forward}
"""Expert forwards in the signature of transformers' dispatch, by the backend they stand for."""


def use_model_of(backend: str) -> str:
    """Register the model of a backend in transformers' dispatch and return its name there."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = f"{backend} (model)"
    ALL_EXPERTS_FUNCTIONS.register(name, MODELLED[backend])
    return name


__all__ = ["MODELLED", "use_model_of"]
