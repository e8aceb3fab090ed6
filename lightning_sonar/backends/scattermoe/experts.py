"""ScatterMoE in transformers' experts dispatch, under the name ``"scattermoe"``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

__all__ = ["NAME", "missing", "register", "scattermoe_experts_forward"]

NAME = "scattermoe"
_DTYPES = (torch.bfloat16, torch.float32)


def missing(device: torch.device) -> str | None:
    """What keeps the kernels from running on ``device``, or ``None``."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "Triton (pip install triton)"
    if device.type == "cpu":
        # Triton reads the variable when a kernel is decorated, which is at the first use.
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "a GPU, or, for tests, Triton's interpreter (set TRITON_INTERPRET=1 before the start)"
    if device.type != "cuda" or not torch.cuda.is_available():
        return "an NVIDIA or AMD GPU"
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"a GPU of compute capability 8.0 or higher (this one has {major}.{minor})"
    return None


def register() -> None:
    """Make the name known to transformers; a model asks for it when it is built. Again is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, scattermoe_experts_forward)


def _refuse(module: nn.Module, found: str, remedy: str = "backend='grouped_mm'") -> ValueError:
    return ValueError(f"backend='{NAME}' cannot run {type(module).__name__}: {found}. Use {remedy} instead.")


def _check(module: nn.Module, weights: dict[str, Tensor]) -> None:
    # getattr: has_post_expert_norm is younger than the oldest transformers supported.
    if getattr(module, "has_post_expert_norm", False):
        raise _refuse(module, "its experts have a norm of their own after down_proj (has_post_expert_norm)")
    for part, value in getattr(module, "_modules", {}).items():
        if value is not None and any(parameter.requires_grad for parameter in value.parameters()):
            raise _refuse(module, f"{part} ({type(value).__name__}) has parameters, which it would not train")
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            raise _refuse(module, f"{name} is a DTensor with placements {weight.placements}, not a whole local tensor")
        if weight.dtype not in _DTYPES:
            raise _refuse(
                module,
                f"{name} is {weight.dtype}, expected torch.bfloat16 or torch.float32 (quantised weights have kernels "
                "of their own)",
                "the backend that came with the quantisation, or load the model in bfloat16",
            )


@torch.compiler.disable(reason="the kernels are launched from Python")
def scattermoe_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' forward for `ALL_EXPERTS_FUNCTIONS`, for every layout the dispatch describes.

    Args:
        self: an experts module of transformers: its parameters, its gate and the dispatch's attributes are read.
        hidden_states: ``[T, H]``.
        top_k_index: experts of each token, ``[T, k]``. Ids equal to the number of experts, which expert parallelism
            writes for experts of other ranks, contribute nothing; nor do negative ids.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: for what is not supported, named: a norm after the experts, an activation with parameters, sharded
            or quantised weights, another dtype, or a number of experts that differs from the weights'.
        RuntimeError: on a device where the kernels do not run, under a transform of `torch.func`, and in a backward
            with ``create_graph=True``.
    """
    # A memory plan runs the model on fake tensors, of a device that need not be there.
    reason = None if isinstance(hidden_states, FakeTensor) else missing(hidden_states.device)
    if reason is not None:
        raise RuntimeError(f"backend='{NAME}' cannot run on {hidden_states.device}: it needs {reason}.")
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"backend='{NAME}' does not run under torch.func. Use loss.backward(), or backend='grouped_mm'."
        )
    from lightning_sonar.backends.scattermoe import functional

    first = "gate_up_proj" if self.has_gate else "up_proj"
    names = [first, "down_proj", *((f"{first}_bias", "down_proj_bias") if self.has_bias else ())]
    weights: dict[str, Tensor] = {name: getattr(self, name) for name in names}
    _check(self, weights)
    w_up, w_down, b_up, b_down = (weights.get(name) for name in (first, "down_proj", f"{first}_bias", "down_proj_bias"))
    if w_up is None or w_down is None or not w_up.shape[0] == w_down.shape[0] == self.num_experts:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        raise _refuse(self, f"num_experts is {self.num_experts}, and its weights are {shapes}")

    kind = hidden_states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else w_up.dtype
    if dtype not in _DTYPES:
        raise _refuse(self, f"autocast asks for {dtype}, expected torch.bfloat16", "precision='bf16-mixed'")
    routing = functional.route(top_k_index, w_up.shape[0])
    pre = functional.up(hidden_states.to(dtype), w_up, b_up, routing, transposed=self.is_transposed)
    return functional.down(
        pre,
        top_k_weights,
        w_down,
        b_down,
        top_k_index,
        routing,
        # Custom gates, and interleaved columns with them, are the module's own business.
        self._apply_gate if self.has_gate else self.act_fn,
        transposed=self.is_transposed,
        dtype=hidden_states.dtype,
    )
