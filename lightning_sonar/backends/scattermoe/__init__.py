"""ScatterMoE: grouped products that gather and scatter token rows as they multiply; own Triton kernels."""

from lightning_sonar.backends.scattermoe.experts import NAME, missing, register, scattermoe_experts_forward

__all__ = ["NAME", "missing", "register", "scattermoe_experts_forward"]
