"""Each guard beside what happens without it: the plain recipe, a hook that runs an optimizer, goes wrong silently."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from helpers import small_model
from test_in_backward import Toy, equal, inputs, toy, values

from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward

pytestmark = pytest.mark.usefixtures("deterministic")


def naive(model, make=lambda p: torch.optim.AdamW([p], lr=1e-2)):
    """The tutorial's recipe: an optimizer for each tensor, stepped in its hook."""
    optimizers = {p: make(p) for p in find_expert_tensors(model).tensors}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)
    return optimizers


# 1


def test_a_hook_that_returns_something_breaks_backward_and_ours_returns_none():
    model = Toy()
    model.first.register_post_accumulate_grad_hook(lambda p: 1)
    with pytest.raises((TypeError, RuntimeError), match="hook returned|should return None"):
        model(inputs()).backward()
    model, made, handle = toy()
    handle.train_step(model(inputs()))
    assert made.state


# 2


def test_a_fused_update_in_a_plain_hook_lets_a_second_backward_use_new_weights():
    gradients = []
    for in_hook in (False, True):
        model = Toy()
        loss = model(inputs())
        if in_hook:
            naive(model, lambda p: torch.optim.AdamW([p], lr=0.5, fused=True))
        loss.backward(retain_graph=True)
        model.dense.weight.grad = None
        loss.backward()  # of the same graph, without an error
        gradients.append(model.dense.weight.grad.clone())
    assert not torch.equal(*gradients)

    model, made, handle = toy()
    loss = model(inputs())
    handle.backward(loss, lambda: loss.backward(retain_graph=True))
    made.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        handle.backward(loss)


# 3


def test_a_plain_hook_steps_twice_for_two_backwards_of_one_step():
    model = Toy()
    optimizers = naive(model)
    for step in range(2):
        model(inputs(step)).backward()
    assert optimizers[model.first].state[model.first]["step"] == 2

    model, made, handle = toy()
    handle.backward(model(inputs(0)))
    with pytest.raises(RuntimeError, match="second got a second gradient"):
        handle.backward(model(inputs(1)))
    assert made.state[model.first]["step"] == 1


# 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_fused_kernel_on_a_cpu_pairs_weights_with_other_weights_gradients(dtype):
    def one_step(gradient, make):
        p = torch.nn.Parameter(torch.zeros(4, 6, dtype=dtype))
        p.grad = gradient
        make([p]).step()
        return p.detach().clone()

    gradient = torch.arange(24, dtype=dtype).reshape(4, 6)
    transposed = gradient.t().contiguous().t()  # equal values, other strides

    def update(kernel, grad):
        p, m, v = (torch.zeros(4, 6, dtype=dtype) for _ in range(3))
        kernel(p, grad, m, v)
        return m

    def raw(p, g, m, v):
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [torch.ones(())], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    assert not torch.equal(update(raw, gradient), update(raw, transposed))
    assert torch.equal(one_step(gradient, FusedAdamW), one_step(transposed, FusedAdamW))


# 5


def test_a_plain_hooks_own_optimizer_misses_a_change_of_the_learning_rate():
    model = Toy()
    naive(model, lambda p: torch.optim.SGD([p], lr=1.0))
    everything = torch.optim.SGD(model.parameters(), lr=1.0)
    everything.param_groups[0]["lr"] = 0.0
    before = model.first.detach().clone()
    model(inputs()).backward()
    assert not torch.equal(before, model.first)

    model, made, handle = toy(optimizer=torch.optim.SGD)
    made.param_groups[0]["lr"] = 0.0
    before = model.first.detach().clone()
    handle.train_step(model(inputs()))
    assert torch.equal(before, model.first)


# 6


def test_a_plain_hook_under_accumulation_trains_something_else():
    def train(mode):
        model, made, handle = toy(mode)
        assert made.param_groups  # the handle holds it weakly
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for micro in range(2):
                handle.train_step(model(inputs(micro)), last=micro == 1)
        return model.first.detach().clone()

    model = Toy()
    naive(model, lambda p: FusedAdamW([p], lr=1e-2))
    for micro in range(2):
        model(inputs(micro)).backward()
    wanted = train("standard_no_expert_clip")
    assert not torch.equal(model.first, wanted)
    assert torch.equal(train("sonar"), wanted)


# 7


def test_a_plain_hook_applies_a_scaled_gradient_and_float16_is_refused():
    moved = []
    for scale in (1.0, 2.0**10):
        model = Toy()
        naive(model, lambda p: torch.optim.SGD([p], lr=1.0))
        before = model.first.detach().clone()
        (model(inputs()) * scale).backward()
        moved.append((model.first - before).norm())
    assert moved[1] > 100 * moved[0], "nobody has undone the loss scale"

    model = Toy().half()
    with pytest.raises(ValueError, match="first is float16. Its gradients need loss scaling"):
        release_in_backward(FusedAdamW(model.parameters()), find_expert_tensors(model))


# 8


def test_a_plain_hook_lets_one_bad_loss_ruin_the_experts():
    model = Toy()
    naive(model)
    (model(inputs()) * float("nan")).backward()
    assert torch.isnan(model.first).all()

    model, made, handle = toy()
    handle.train_step(model(inputs()) * float("nan"))
    assert all(torch.isfinite(value).all() for value in values(model, made))
    assert handle.skipped_steps == 1


# 13


def test_a_state_saved_in_mid_step_resumes_to_something_else_and_the_handle_knows():
    def fresh():
        return toy()

    model, made, handle = fresh()
    for step in range(2):
        handle.train_step(model(inputs(step)))
    wanted = values(model, made)

    model, made, handle = fresh()
    handle.train_step(model(inputs(0)))
    assert not handle.mid_step
    handle.backward(model(inputs(1)))
    assert handle.mid_step
    saved = {k: v.clone() for k, v in model.state_dict().items()}, made.state_dict()

    resumed, optimizer, again = fresh()
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again.train_step(resumed(inputs(1)))  # the step that the interrupted run was in
    assert not equal(values(resumed, optimizer), wanted)


# 15


def test_a_scale_that_is_not_rounded_gives_other_moments_than_clipping():
    torch.manual_seed(0)
    gradient = torch.randn(4096, dtype=torch.bfloat16)
    scale = torch.tensor(0.3)
    clipped = gradient.clone().mul_(scale)

    def first_moment(grad, gradient_scale=None):
        p = torch.nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
        p.grad = grad.clone()
        optimizer = FusedAdamW([p])
        optimizer.gradient_scale = gradient_scale
        optimizer.step()
        return optimizer.state[p]["exp_avg"]

    unrounded = (gradient.float() * scale * 0.1).bfloat16()
    assert (unrounded != first_moment(clipped)).float().mean() > 0.1
    assert torch.equal(first_moment(gradient, scale), first_moment(clipped))


# 16


def test_a_plain_hook_that_holds_its_parameter_keeps_the_model_alive():
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def hook(_, held=(model.first, optimizer)):
        assert held

    model.first.register_post_accumulate_grad_hook(hook)
    leaked = weakref.ref(model.first.untyped_storage())
    del model, optimizer, hook
    gc.collect()
    assert leaked() is not None

    model = small_model()
    optimizer = FusedAdamW(model.parameters())
    release_in_backward(optimizer, find_expert_tensors(model))
    gone = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(ref() is not None for ref in gone)
