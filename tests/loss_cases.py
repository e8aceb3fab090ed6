"""Inputs for the chunked loss, the whole loss beside it, and how they are compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sonar.losses import IGNORED, response_cross_entropy

B, T, V, H = 2, 13, 96, 16


def case(dtype=torch.float32, seed: int = 0, weight_dtype=None, bias: bool = False, shape=(B, T, V, H)) -> dict:
    b, t, v, h = shape
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, v, (b, t), generator=generator)
    labels[:, : t // 4] = IGNORED
    made = {
        "hidden": torch.randn(b, t, h, generator=generator).to(dtype),
        "weight": torch.randn(v, h, generator=generator).to(weight_dtype or dtype),
        "labels": labels,
    }
    if bias:
        made["bias"] = torch.randn(v, generator=generator).to(weight_dtype or dtype)
    return made


def plain(hidden, weight, labels, *, bias=None, scale=1.0, softcap=None):
    logits = F.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    return response_cross_entropy(logits, labels)


def in_double(hidden, weight, labels):
    logits = F.linear(hidden, weight)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED), None


def run(compute, inputs: dict, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of all floating inputs."""
    leaves = {
        name: value.clone().requires_grad_() if value.is_floating_point() else value for name, value in inputs.items()
    }
    loss, _ = compute(**leaves, **options)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest element."""
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


def assert_within(found, wanted, tolerance: float) -> None:
    (loss, gradients), (plain_loss, plain_gradients) = found, wanted
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(plain_loss.item(), rel=tolerance)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == plain_gradients[name].dtype
        assert largest_error(gradient, plain_gradients[name]) < tolerance, name
