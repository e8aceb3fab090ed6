"""liger-kernel's route, against a stand-in with the real function's signature and habits."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from loss_cases import assert_within, case, largest_error, plain, run
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sonar import chunked_loss, liger
from lightning_sonar.chunked_loss import chunked_cross_entropy


class StandInFunction(torch.autograd.Function):
    """Makes all gradients in the forward and scales them in place in the backward, as liger-kernel does."""

    @staticmethod
    def forward(ctx, _input, weight, target, bias, softcap, accum_dtype):
        ctx.set_materialize_grads(False)
        needs = _input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad
        with torch.enable_grad():
            leaves = [None if t is None else t.detach().requires_grad_() for t in (_input, weight, bias)]
            logits = F.linear(*leaves).float()
            if softcap is not None:
                logits = (logits / softcap).tanh() * softcap
            loss = F.cross_entropy(logits, target, reduction="sum") / (target != -100).sum()
        made = [None, None, None]
        if needs[0]:  # nothing at all is made otherwise
            made = iter(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None]))
            made = [next(made) if leaf is not None else None for leaf in leaves]
        ctx.save_for_backward(*made)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        made = ctx.saved_tensors
        if not torch.equal(grad, torch.ones_like(grad)):
            for tensor in made:
                if tensor is not None:
                    tensor.data.mul_(grad)
        return made[0], made[1], None, made[2], None, None


@pytest.fixture
def stand_in(monkeypatch):
    calls = []

    def liger_fused_linear_cross_entropy(
        input,
        weight,
        target,
        bias=None,
        ce_weight=None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype=None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
    ):
        assert (ce_weight, ignore_index, reduction) == (None, -100, "mean")
        assert input.ndim == 2
        assert target.shape == input.shape[:1]
        assert accum_dtype is torch.float32
        assert input.dtype == weight.dtype
        assert not torch.is_autocast_enabled("cpu")
        calls.append({"gradients": input.requires_grad and torch.is_grad_enabled(), "dtype": input.dtype})
        return StandInFunction.apply(input, weight, target, bias, softcap, accum_dtype)

    package = types.ModuleType("liger_kernel")
    package.transformers = types.ModuleType("liger_kernel.transformers")
    package.transformers.functional = types.ModuleType("liger_kernel.transformers.functional")
    package.transformers.functional.liger_fused_linear_cross_entropy = liger_fused_linear_cross_entropy
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package.transformers)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", package.transformers.functional)
    liger._fused.cache_clear()
    yield calls
    liger._fused.cache_clear()


@pytest.fixture
def liger_on_cpu(stand_in, monkeypatch):
    monkeypatch.setattr(chunked_loss, "liger_takes", lambda hidden: True)
    return stand_in


def test_liger_is_not_used_on_a_cpu(stand_in):
    run(chunked_cross_entropy, case())
    assert liger._fused() is not None
    assert stand_in == []


def test_a_liger_without_a_float32_accumulator_is_not_used(stand_in, monkeypatch):
    def old(input, weight, target, bias=None, ignore_index=-100, reduction="mean", softcap=None): ...

    monkeypatch.setattr(sys.modules["liger_kernel.transformers.functional"], "liger_fused_linear_cross_entropy", old)
    liger._fused.cache_clear()
    assert liger._fused() is None


@pytest.mark.parametrize("options", [{}, {"scale": 1 / 6}, {"scale": 2.0, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_ligers_route_equals_the_whole_loss(liger_on_cpu, options, bias):
    inputs = case(bias=bias)
    assert_within(run(chunked_cross_entropy, inputs, **options), run(plain, inputs, **options), 1e-6)
    assert [call["gradients"] for call in liger_on_cpu] == [False, True], "gradients are made in the backward only"


def test_ligers_gradients_are_scaled_once_in_each_backward(liger_on_cpu):
    inputs = case()
    hidden, weight = (inputs[name].requires_grad_() for name in ("hidden", "weight"))
    loss, _ = chunked_cross_entropy(hidden, weight, inputs["labels"])
    wanted = run(plain, case())[1]
    for _ in range(2):
        found = torch.autograd.grad(loss / 4, [hidden, weight], retain_graph=True)
        assert largest_error(found[0] * 4, wanted["hidden"]) < 1e-6
        assert largest_error(found[1] * 4, wanted["weight"]) < 1e-6


def test_ligers_route_trains_the_weight_under_frozen_hidden_states(liger_on_cpu):
    inputs = case()
    weight = inputs["weight"].clone().requires_grad_()
    chunked_cross_entropy(inputs["hidden"], weight, inputs["labels"])[0].backward()
    assert largest_error(weight.grad, run(plain, inputs)[1]["weight"]) < 1e-6


def test_ligers_route_follows_autocast(liger_on_cpu):
    inputs = case(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = run(chunked_cross_entropy, inputs), run(plain, inputs)
    assert {call["dtype"] for call in liger_on_cpu} == {torch.bfloat16}
    assert_within(found, wanted, 2 * torch.finfo(torch.bfloat16).eps)


def test_fake_tensors_never_reach_liger(liger_on_cpu):
    with FakeTensorMode():
        hidden, weight = torch.empty(1, 4, 8, requires_grad=True), torch.empty(16, 8)
        chunked_cross_entropy(hidden, weight, torch.zeros(1, 4, dtype=torch.long))[0].backward()
    assert liger_on_cpu == []
