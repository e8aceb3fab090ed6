"""Trains a small OLMoE whose router never chooses some experts; run with TRITON_INTERPRET=1 it does so by ScatterMoE.

What becomes of those experts is known beforehand: AdamW with gradients of zero only decays their weights.
"""

from __future__ import annotations

import functools
import json

import torch
from helpers import batches, small_model
from torch import Tensor

from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward

STEPS = 4
USED = (0, 3)
SETTINGS = {"lr": 0.01, "weight_decay": 0.1}


def _model(dtype: torch.dtype, backend: str) -> torch.nn.Module:
    model = small_model(dtype=dtype, backend=backend, num_layers=1)

    def choose(router: torch.nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, index = output
        return logits, weights, torch.tensor(USED).expand_as(index).contiguous()

    model.model.layers[0].mlp.gate.register_forward_hook(choose)  # type: ignore[union-attr, operator]
    return model


def _digest(values: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: value.double().flatten().tolist() for name, value in values.items()}


def train_with_idle_experts(mode: str, backend: str, dtype: torch.dtype) -> dict[str, list[float]]:
    """Weights and states of the experts that are never chosen, and the sum of the others' first moments' signs."""
    model = _model(dtype, backend)
    experts = find_expert_tensors(model)
    made = FusedAdamW(model.parameters(), **SETTINGS)
    handle = release_in_backward(made, experts, mode=mode)
    for batch in batches(STEPS):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["input_ids"].flatten())
        handle.train_step(loss, max_norm=0.0 if mode == "in_backward_all" else 0.5)
    found: dict[str, Tensor] = {}
    for name, tensor in experts.items():
        idle = [index for index in range(tensor.shape[0]) if index not in USED]
        state = made.state[tensor]
        if not state["exp_avg"][list(USED)].any():
            raise RuntimeError(f"{name}: the chosen experts got no gradient either")
        found |= {name: tensor.detach()[idle], f"{name}.step": state["step"]}
        found |= {f"{name}.{key}": state[key][idle] for key in ("exp_avg", "exp_avg_sq")}
    return _digest(found)


@functools.cache
def idle_rows(dtype: torch.dtype) -> dict[str, list[float]]:
    """The same from torch's own AdamW, on these experts alone, with gradients of zero."""
    found: dict[str, Tensor] = {}
    for name, tensor in find_expert_tensors(_model(dtype, "eager")).items():
        idle = [index for index in range(tensor.shape[0]) if index not in USED]
        rows = torch.nn.Parameter(tensor.detach()[idle].clone())
        made = torch.optim.AdamW([rows], fused=True, **SETTINGS)
        for _ in range(STEPS):
            rows.grad = torch.zeros_like(rows)
            made.step()
        state = made.state[rows]
        found |= {name: rows.detach(), f"{name}.step": state["step"]}
        found |= {f"{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    return _digest(found)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    modes = ("sonar", "sonar_per_expert", "standard")
    print(json.dumps({mode: train_with_idle_experts(mode, "scattermoe", torch.float32) for mode in modes}))
