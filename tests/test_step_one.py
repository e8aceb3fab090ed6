from __future__ import annotations

import copy

import pytest
import torch

from lightning_sonar import FusedAdamW
from lightning_sonar.optim import is_element_wise, step_slice, step_tensor

OPTIMIZERS = {
    "FusedAdamW": lambda p: FusedAdamW(p, lr=1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


# 35 elements a slice end in a tail of the vectorised kernels; 64 do not.
SHAPES = [(4, 5, 7), (4, 8, 8)]


def parameters(shape=SHAPES[0]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(2)]


def gradients(step: int, shape=SHAPES[0]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for _ in range(2)]


def run(make, step_all, shape, steps: int = 4):
    params = parameters(shape)
    optimizer = make(params)
    for step in range(steps):
        for param, grad in zip(params, gradients(step, shape), strict=True):
            param.grad = grad.clone()
        step_all(optimizer, params)
        optimizer.zero_grad()
    return params, optimizer


def whole(optimizer, params):
    optimizer.step()


def one_by_one(optimizer, params):
    for param in params:
        step_tensor(optimizer, optimizer.param_groups[0], param)


def slice_by_slice(optimizer, params):
    for param in params:
        pending: dict = {}
        for index in (2, 0, 3, 1):
            step_slice(optimizer, optimizer.param_groups[0], param, index, pending)
        assert not pending


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step_all", [one_by_one, slice_by_slice])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stepping_parts_equals_stepping_all_bitwise(name, step_all, shape):
    expected, reference = run(OPTIMIZERS[name], whole, shape)
    got, optimizer = run(OPTIMIZERS[name], step_all, shape)
    for left, right in zip(expected, got, strict=True):
        assert torch.equal(left, right)
        want, have = reference.state[left], optimizer.state[right]
        assert want.keys() == have.keys()
        for key, value in want.items():
            same = torch.equal(value, have[key]) if isinstance(value, torch.Tensor) else value == have[key]
            assert same, key


def test_every_named_element_wise_optimizer_is_tested():
    assert {name.split()[0] for name in OPTIMIZERS} == {
        "FusedAdamW", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD"
    }  # fmt: skip


def test_live_learning_rate_and_loaded_state_are_read_at_each_call():
    params = parameters()
    optimizer = OPTIMIZERS["AdamW"](params)
    saved = copy.deepcopy(optimizer.state_dict())
    params[0].grad = gradients(0)[0]
    step_tensor(optimizer, optimizer.param_groups[0], params[0])
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    before = params[0].detach().clone()
    step_tensor(optimizer, optimizer.param_groups[0], params[0])
    assert torch.equal(before, params[0])
    assert optimizer.state[params[0]]["step"] == 1


def test_step_hooks_and_scheduler_counts_see_whole_steps_only():
    params = parameters()
    optimizer = OPTIMIZERS["AdamW"](params)
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    params[0].grad = gradients(0)[0]
    step_tensor(optimizer, optimizer.param_groups[0], params[0])
    assert seen == []
    assert not getattr(optimizer, "_opt_called", False)
    optimizer.step()
    assert seen == ["pre", "post"]


def test_attributes_reach_the_copy_only():
    params = parameters()
    optimizer = OPTIMIZERS["AdamW fused"](params)
    before = params[0].detach().clone()
    params[0].grad = gradients(0)[0]
    step_tensor(optimizer, optimizer.param_groups[0], params[0], found_inf=torch.ones(()))
    assert torch.equal(before, params[0])
    assert getattr(optimizer, "found_inf", None) is None


def test_element_wise_optimizers_are_known_and_others_are_not():
    class Mine(torch.optim.SGD):
        pass

    params = parameters()
    assert is_element_wise(FusedAdamW(params))
    assert is_element_wise(torch.optim.SGD(params, lr=0.1))
    assert not is_element_wise(torch.optim.Adafactor(params))
    assert not is_element_wise(torch.optim.LBFGS(params))
    assert not is_element_wise(Mine(params, lr=0.1))
    mine = Mine(params, lr=0.1)
    mine.element_wise = True  # type: ignore[attr-defined]
    assert is_element_wise(mine)
