"""What the tests of low-bit optimizers share."""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_sonar import FusedAdamW
from lightning_sonar.optim import ExpertsAndDense, ao_adamw4bit, ao_adamw8bit, ao_adamw_fp8, bnb_adamw8bit, step_tensor
from lightning_sonar.optim.quantised import packed

TORCHAO = {"8bit": ao_adamw8bit, "4bit": ao_adamw4bit, "fp8": ao_adamw_fp8}
all_torchao = pytest.mark.parametrize("make", TORCHAO.values(), ids=TORCHAO)
# Small enough that the experts and most matrices of the small model are quantised.
bnb = functools.partial(bnb_adamw8bit, lr=1e-2, min_8bit_size=256)


def bnb_experts(parameters):
    return ExpertsAndDense(parameters, experts=bnb, dense=functools.partial(FusedAdamW, lr=1e-2))


BOTH = pytest.mark.parametrize("optimizer", [bnb, bnb_experts], ids=["all", "experts"])


@pytest.fixture
def needs_bitsandbytes():
    return pytest.importorskip("bitsandbytes")


@pytest.fixture
def eager():
    """torchao's update as plain operations."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


def tensors(dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = ((8, 64, 32), (96, 64), (40,))
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def train(make, steps=4, chunk=None, inside=False, starved=False):
    """Random gradients; returns every value of parameters and states by name."""
    parameters = tensors()
    optimizer = make(parameters, lr=1e-2)
    if chunk is not None:
        optimizer.chunk = chunk
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if inside:
            step_tensor(optimizer, optimizer.param_groups[0], parameters[0])
            parameters[0].grad = None
        optimizer.step()
    return values(optimizer, parameters), optimizer


def values(optimizer, parameters):
    found = {}
    for index, parameter in enumerate(parameters):
        found[f"{index}"] = parameter.detach().clone()
        for name, value in optimizer.state[parameter].items():
            parts = packed(value)
            for part, tensor in (parts if isinstance(parts, dict) else {"": parts}).items():
                found[f"{index}.{name}.{part}"] = torch.as_tensor(tensor).clone().float()
    return found
