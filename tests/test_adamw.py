"""FusedAdamW is torch.optim.AdamW to every user of it, and what it adds does what it says."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sonar.optim.adamw import FusedAdamW
from lightning_sonar.optim.reference import adamw_reference_
from lightning_sonar.optim.step_one import step_slice
from lightning_sonar.optim.update import adamw_

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(3, 7, 5), (17,), (64, 32), (1,)]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def make_params(dtype: torch.dtype = FP32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_grads(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Parameters and state are equal in every bit and lie at the same places."""
    left = [p for group in a.param_groups for p in group["params"]]
    right = [p for group in b.param_groups for p in group["params"]]
    for i, (p, q) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(p, q), i
        assert list(a.state[p]) == list(b.state[q]), i
        for name, value in a.state[p].items():
            other = b.state[q][name]
            assert value.dtype == other.dtype, (i, name)
            assert torch.equal(value, other), (i, name)


def tensors(dtype: torch.dtype = FP32, shape: tuple[int, ...] = (6, 40)) -> tuple[list[Tensor], Tensor]:
    """Parameter, moments, step in mid-training; and a gradient."""
    generator = torch.Generator().manual_seed(0)
    p, m, v, g = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    return [p, m * 0.1, v.square() * 0.01, torch.tensor(3.0)], g


def clones(values: list[Tensor]) -> list[Tensor]:
    return [value.clone() for value in values]


def apply(update: Callable[..., None], values: list[Tensor], grad: Tensor, **settings: Any) -> list[Tensor]:
    update(values[0], grad, *values[1:], **{**SETTINGS, **settings})
    return values


# The same optimizer as torch's


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_equals_torch_fused_adamw_bitwise(dtype: torch.dtype, maximize: bool) -> None:
    ours, theirs = make_params(dtype), make_params(dtype)
    a = FusedAdamW(ours, lr=1e-2, maximize=maximize)
    b = torch.optim.AdamW(theirs, lr=1e-2, maximize=maximize, fused=True)
    train(a, ours, range(8))
    train(b, theirs, range(8))
    assert_same(a, b)


def test_groups_and_defaults_are_those_of_torch() -> None:
    ours, theirs = FusedAdamW(make_params()), torch.optim.AdamW(make_params(), fused=True)
    assert ours.defaults == theirs.defaults
    assert [{**g, "params": None} for g in ours.param_groups] == [{**g, "params": None} for g in theirs.param_groups]


def test_arguments_of_adamw_that_ask_for_nothing_else_may_stay() -> None:
    harmless: dict[str, Any] = {"foreach": False, "capturable": False, "differentiable": False, "fused": True}
    ours = FusedAdamW(make_params(), 1e-3, (0.9, 0.999), 1e-8, 1e-2, False, **harmless)
    assert ours.defaults == FusedAdamW(make_params()).defaults
    FusedAdamW(make_params(), amsgrad=False, foreach=None, fused=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("amsgrad", True), ("foreach", True), ("capturable", True), ("differentiable", True), ("fused", False)],
)
def test_other_ways_of_running_are_refused_with_the_remedy(name: str, value: bool) -> None:
    with pytest.raises(
        ValueError, match=rf"FusedAdamW\({name}={value}\): .*Leave {name} out, or use torch.optim.AdamW"
    ):
        FusedAdamW(make_params(), **{name: value})


def test_groups_keep_their_own_weight_decay_and_betas() -> None:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "weight_decay": 0.0, "betas": (0.8, 0.95)},
            {"params": params[2:], "weight_decay": 0.5, "lr": 0.1},
        ]

    ours, theirs = make_params(), make_params()
    a, b = FusedAdamW(groups(ours)), torch.optim.AdamW(groups(theirs), fused=True)
    train(a, ours, range(3))
    train(b, theirs, range(3))
    assert_same(a, b)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("fused", [False, None, True])
def test_state_dicts_go_both_ways_bitwise(dtype: torch.dtype, fused: bool | None) -> None:
    ours, theirs = make_params(dtype), make_params(dtype)
    b = torch.optim.AdamW(theirs, lr=1e-2, fused=fused)
    train(b, theirs, range(3))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    a = FusedAdamW(ours, lr=5.0)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    assert_same(a, b)
    assert a.param_groups[0]["lr"] == 1e-2
    group = a.param_groups[0]
    assert (group["fused"], group["foreach"], group["capturable"]) == (True, None, False)
    for p in ours:
        assert a.state[p]["exp_avg"].dtype == dtype
        assert a.state[p]["step"].dtype == FP32
        assert a.state[p]["step"].device == p.device

    # And back, through a file; torch's fused kernel then goes on exactly as ours does.
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    c_params = [nn.Parameter(p.detach().clone()) for p in ours]
    c = torch.optim.AdamW(c_params, fused=True)
    c.load_state_dict(torch.load(file))
    train(a, ours, range(3, 6))
    train(c, c_params, range(3, 6))
    assert_same(a, c)


def test_amsgrad_is_refused_when_loaded_and_leaves_the_optimizer_as_it_was() -> None:
    params, theirs = make_params(), make_params()
    other = torch.optim.AdamW(theirs, amsgrad=True, lr=7.0)
    train(other, theirs, range(1))
    optimizer = FusedAdamW(params)
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.param_groups[0]["amsgrad"] = True
    set_grads(params, 0)
    with pytest.raises(ValueError, match="group 0 has amsgrad=True"):
        optimizer.step()


def test_a_state_whose_groups_have_other_parameters_is_refused_with_both_counts() -> None:
    params = make_params()
    optimizer = FusedAdamW(params)
    saved = torch.optim.AdamW(params[:-1]).state_dict()
    count = len(params)
    with pytest.raises(ValueError, match=rf"groups of \[{count - 1}\] parameters; FusedAdamW has \[{count}\]"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_like_the_original(how: str) -> None:
    params = make_params()
    optimizer = FusedAdamW(params, lr=1e-2)
    train(optimizer, params, range(2))
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.gradient_scale = torch.tensor(0.5)
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert twin.gradient_scale is not None
    assert twin.gradient_scale.item() == 0.5
    assert twin.found_inf.item() == 0.0
    assert twin._step_supports_amp_scaling is False
    train(optimizer, params, range(2, 4))
    train(twin, twin.param_groups[0]["params"], range(2, 4))
    assert_same(optimizer, twin)


# Reading live settings


def test_a_scheduler_and_a_changed_lr_are_seen_at_the_next_step() -> None:
    ours, theirs = make_params(), make_params()
    a, b = FusedAdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, fused=True)
    for optimizer, params in ((a, ours), (b, theirs)):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(3):
            train(optimizer, params, range(step, step + 1))
            scheduler.step()
        optimizer.param_groups[0]["lr"] = 1.0
        train(optimizer, params, range(3, 4))
    assert_same(a, b)


def test_a_tensor_learning_rate_equals_a_number() -> None:
    ours, theirs = make_params(), make_params()
    a, b = FusedAdamW(ours, lr=torch.tensor(0.25)), FusedAdamW(theirs, lr=0.25)
    train(a, ours, range(2))
    train(b, theirs, range(2))
    assert_same(a, b)


def test_the_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 3
    assert (weight < 1).all()


def test_step_hooks_run_once_a_step() -> None:
    params = make_params()
    optimizer = FusedAdamW(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, params, range(1))
    assert seen == ["before", "after"]


def test_state_can_exist_before_the_first_step() -> None:
    ours, theirs = make_params(), make_params()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    a, b = FusedAdamW([*ours, frozen]), FusedAdamW([*theirs, nn.Parameter(torch.ones(2))])
    a.init_state()
    assert [len(a.state[p]) for p in ours] == [3] * len(ours)
    assert frozen not in a.state
    assert [int(a.state[p]["step"]) for p in ours] == [0] * len(ours)
    fresh = torch.optim.AdamW([*make_params(), nn.Parameter(torch.ones(2))])
    fresh.load_state_dict(a.state_dict())
    train(a, ours, range(2))
    a.init_state()  # changes nothing that is there
    train(b, theirs, range(2))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(a.state[p]["exp_avg"], b.state[q]["exp_avg"])


def test_a_shallow_copy_steps_one_tensor_or_a_slice_of_one() -> None:
    def narrowed(optimizer: FusedAdamW, tensor: Tensor) -> Any:
        clone: Any = object.__new__(type(optimizer))
        clone.__dict__ = {**optimizer.__dict__}
        clone.__dict__.pop("step", None)
        clone.param_groups = [{**optimizer.param_groups[0], "params": [tensor]}]
        return clone

    whole, parts, sliced = (make_params(BF16)[2] for _ in range(3))
    a, b, c = (FusedAdamW([p], lr=1e-2) for p in (whole, parts, sliced))
    torch.optim.lr_scheduler.ConstantLR(b, factor=1.0)  # patches the instance's step
    for p, optimizer in ((whole, a), (parts, b), (sliced, c)):
        set_grads([p], 0)
        optimizer.init_state()
    a.step()
    narrowed(b, parts).step()
    assert_same(a, b)

    assert sliced.grad is not None
    for e in range(len(sliced)):
        part = sliced.detach()[e]
        part.grad = sliced.grad[e]
        clone = narrowed(c, part)
        state = c.state[sliced]
        clone.state = {part: {**{k: state[k][e] for k in ("exp_avg", "exp_avg_sq")}, "step": torch.zeros(())}}
        clone.step()
    assert torch.equal(sliced, whole)
    assert torch.equal(c.state[sliced]["exp_avg_sq"], a.state[whole]["exp_avg_sq"])


# The flag and the scale


@pytest.mark.parametrize("flag", [1.0, 2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("update", [adamw_, adamw_reference_])
def test_nothing_moves_while_the_flag_is_up(update: Callable[..., None], flag: float) -> None:
    start, grad = tensors()
    end = apply(update, clones(start), grad, found_inf=torch.tensor(flag))
    for before, after in zip(start, end, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("update", [adamw_, adamw_reference_])
def test_a_lowered_flag_changes_nothing(update: Callable[..., None]) -> None:
    start, grad = tensors()
    flagged = apply(update, clones(start), grad, found_inf=torch.zeros(1))
    plain = apply(update, clones(start), grad)
    for a, b in zip(flagged, plain, strict=True):
        assert torch.equal(a, b)
    assert plain[3].item() == 4


def test_the_optimizer_skips_by_its_flag_and_goes_on_after() -> None:
    ours, theirs = make_params(), make_params()
    a, b = FusedAdamW(ours), FusedAdamW(theirs)
    train(a, ours, range(1))
    a.found_inf = torch.tensor(1.0)
    train(a, ours, range(5, 7))
    a.found_inf = None
    train(a, ours, range(1, 3))
    train(b, theirs, range(3))
    assert_same(a, b)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_gradient_scale_equals_clipping_then_stepping_bitwise(dtype: torch.dtype) -> None:
    ours, theirs = make_params(dtype), make_params(dtype)
    a, b = FusedAdamW(ours), torch.optim.AdamW(theirs, fused=True)
    for step in range(3):
        set_grads(ours, step)
        set_grads(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs, 0.5)
        # What clip_grad_norm_ multiplies by, in the dtype of the norm.
        a.gradient_scale = torch.clamp(0.5 / (norm + 1e-6), max=1.0)
        a.step()
        b.step()
    assert_same(a, b)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_scaled_gradient_is_rounded_to_its_own_dtype_first(dtype: torch.dtype) -> None:
    start, grad = tensors(dtype, (2000,))
    scale = torch.tensor(0.3)
    rounded = (grad.float() * scale).to(dtype)
    for update in (adamw_, adamw_reference_):
        scaled = apply(update, clones(start), grad.clone(), grad_scale=scale)
        plain = apply(update, clones(start), rounded)
        for a, b in zip(scaled, plain, strict=True):
            assert torch.equal(a, b)


def test_the_grad_scaler_unscales_itself() -> None:
    ours, theirs = make_params(), make_params()
    a, b = FusedAdamW(ours), FusedAdamW(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for optimizer, params in ((a, ours), (b, theirs)):
        loss = torch.stack([p.square().sum() for p in params]).sum()
        (scaler.scale(loss) if optimizer is a else loss).backward()
    scaler.step(a)
    b.step()
    assert_same(a, b)


# The sum of squares


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
@pytest.mark.parametrize("update", [adamw_, adamw_reference_])
def test_the_sum_of_squares_of_the_unscaled_gradient_is_added(update: Callable[..., None], dtype: torch.dtype) -> None:
    start, grad = tensors(dtype, (2000,))
    total = torch.tensor(10.0)
    apply(update, clones(start), grad.clone(), grad_sq_sum=total, grad_scale=torch.tensor(0.5))
    exact = grad.double().square().sum()
    assert total.dtype == FP32
    assert (total - 10).item() == pytest.approx(exact.item(), rel=1e-5)
    with_sum = apply(update, clones(start), grad.clone(), grad_sq_sum=total)
    for a, b in zip(with_sum, apply(update, clones(start), grad.clone()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("flag", [1.0, float("nan")])
@pytest.mark.parametrize("update", [adamw_, adamw_reference_])
def test_nothing_is_added_while_the_flag_is_up(update: Callable[..., None], flag: float) -> None:
    start, grad = tensors()
    grad[0, 0] = float("nan")
    total = torch.tensor(10.0)
    apply(update, clones(start), grad, grad_sq_sum=total, found_inf=torch.tensor(flag))
    assert total.item() == 10.0
    apply(update, clones(start), grad, grad_sq_sum=total, found_inf=torch.tensor(0.0))
    assert total.isnan()


# 35 elements a slice are stepped at once with the whole by the last call; 64 are not.
@pytest.mark.parametrize("shape", [(4, 5, 7), (4, 8, 8)])
def test_the_optimizer_adds_up_its_gradients_and_slices_add_up_to_the_whole(shape: tuple[int, ...]) -> None:
    params = [nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(3))]
    optimizer = FusedAdamW(params)
    set_grads(params, 0)
    exact = [float(p.grad.double().square().sum()) for p in params if p.grad is not None]
    total, of_slices = torch.zeros(()), torch.zeros(())
    optimizer.grad_sq_sum = total
    optimizer.step()
    assert total.item() == pytest.approx(sum(exact), rel=1e-5)
    pending: dict[str, Any] = {}
    for index in range(4):
        step_slice(optimizer, optimizer.param_groups[0], params[0], index, pending, grad_sq_sum=of_slices)
    assert of_slices.item() == pytest.approx(exact[0], rel=1e-5)


@pytest.mark.parametrize("total", [torch.zeros((), dtype=BF16), torch.zeros(1)])
def test_a_sum_of_the_wrong_kind_is_refused(total: Tensor) -> None:
    start, grad = tensors()
    with pytest.raises(ValueError, match="grad_sq_sum is .*; expected float32 of no dimensions"):
        apply(adamw_, start, grad, grad_sq_sum=total)


# What must never go silently wrong


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("scale", [None, torch.tensor(0.5)])
def test_a_gradient_in_another_memory_order_is_paired_rightly(dtype: torch.dtype, scale: Tensor | None) -> None:
    start, grad = tensors(dtype)
    turned = grad.t().contiguous().t()
    right = apply(adamw_, clones(start), grad.clone(), grad_scale=scale)
    ours = apply(adamw_, clones(start), turned.clone(memory_format=torch.preserve_format), grad_scale=scale)
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a, b)

    # torch's kernel pairs by memory order, which is what this guards against.
    p, m, v, step = clones(start)
    step += 1
    settings = {**SETTINGS, "amsgrad": False, "maximize": False}
    torch._fused_adamw_([p], [turned], [m], [v], [], [step], **settings)
    assert scale is not None or not torch.equal(p, right[0])


def test_moments_in_another_memory_order_are_paired_rightly() -> None:
    start, grad = tensors()
    right = apply(adamw_reference_, clones(start), grad)
    moved = [start[0].clone(), *(t.t().contiguous().t() for t in start[1:3]), start[3].clone()]
    for a, b in zip(apply(adamw_, moved, grad), right, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_with_gaps_in_memory_leaves_the_gaps_alone() -> None:
    start, grad = tensors()
    right = apply(adamw_reference_, clones(start), grad)
    wide = torch.zeros(6, 80)
    wide[:, ::2] = start[0]
    ours = apply(adamw_, [wide[:, ::2], *clones(start[1:])], grad)
    assert torch.equal(ours[0], right[0])
    assert not wide[:, 1::2].any()


def test_dense_tensors_in_any_one_order_equal_contiguous_ones() -> None:
    start, grad = tensors(FP32, (2, 16, 4, 4))
    right = apply(adamw_, clones(start), grad.clone())
    last = [t.to(memory_format=torch.channels_last) for t in start[:3]]
    ours = apply(adamw_, [*last, start[3]], grad.to(memory_format=torch.channels_last))
    for a, b in zip(ours, right, strict=True):
        assert torch.equal(a, b)


def second_backward(step: Callable[[nn.Parameter], None]) -> Tensor | None:
    """d(sum(w**2 * x))/dw, taken again after `step` has changed w under the graph."""
    weight = nn.Parameter(torch.ones(4))
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    step(weight)
    weight.grad = None
    loss.backward()
    return weight.grad


def test_a_second_backward_through_an_older_graph_raises() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second_backward(lambda weight: FusedAdamW([weight], lr=0.5).step())


def test_without_the_version_bump_the_second_backward_is_silently_wrong() -> None:
    def bare(weight: nn.Parameter) -> None:
        state = [torch.zeros(4), torch.zeros(4), torch.tensor(1.0)]
        args = [[t] for t in (weight, weight.grad, *state[:2])]
        settings = {**SETTINGS, "lr": 0.5, "amsgrad": False, "maximize": False}
        with torch.no_grad():
            torch._fused_adamw_(*args, [], [state[2]], **settings)  # pyright: ignore

    grad = second_backward(bare)
    assert grad is not None
    assert not torch.equal(grad, torch.full((4,), 2.0))


def test_a_detached_slice_raises_the_version_of_the_whole() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    before = weight._version
    start, _ = tensors(FP32, (4,))
    adamw_(weight.detach()[1], torch.ones(4), *start[1:], **SETTINGS)
    assert weight._version > before
    with torch.inference_mode():
        inference = torch.ones(4)
    adamw_(inference, torch.ones(4), *clones(start[1:]), **SETTINGS)  # has no version to raise
    assert (inference != 1).all()


def test_an_empty_shard_still_counts_its_steps() -> None:
    start, grad = tensors(BF16, (0, 4))
    assert apply(adamw_, start, grad)[3].item() == 4


@pytest.mark.parametrize(
    ("dtype", "grad", "error", "words"),
    [
        (torch.float16, None, TypeError, "parameter .* is torch.float16; expected bfloat16 or float32"),
        (torch.complex64, None, TypeError, "complex64.*view_as_real"),
        (FP32, torch.ones(6, 40).to_sparse(), TypeError, "the gradient .* is sparse"),
        (FP32, torch.ones(40, 6), ValueError, r"the gradient is \(40, 6\) on cpu, its parameter \(6, 40\)"),
        (FP32, torch.ones(6, 40, device="meta"), ValueError, "the gradient is .* on meta"),
    ],
)
def test_what_it_cannot_update_is_refused_by_name(
    dtype: torch.dtype, grad: Tensor | None, error: type[Exception], words: str
) -> None:
    values = [torch.ones(6, 40, dtype=dtype) for _ in range(3)]
    with pytest.raises(error, match=words):
        apply(adamw_, [*values, torch.zeros(())], values[0].clone() if grad is None else grad)
    assert (values[0] == 1).all()


def test_a_step_count_of_the_wrong_kind_is_refused() -> None:
    start, grad = tensors()
    with pytest.raises(ValueError, match=r"step count is a torch.int64 .* expected an fp32 scalar on cpu"):
        apply(adamw_, [*start[:3], torch.tensor(3)], grad)


# The reference, and the other paths


@pytest.mark.parametrize(("dtype", "bound"), [(FP32, 4 * 2**-23), (BF16, 2 * 2**-8)])
def test_the_reference_is_within_ulps_of_torch(dtype: torch.dtype, bound: float) -> None:
    """Within 4 fp32 ulps (2 bf16 ulps) of the terms each result sums; torch is as far from fp64 as we are."""
    start, grad = tensors(dtype, (20_000,))
    for count in (0.0, 1.0, 9.0, 1000.0):
        values = [*start[:3], torch.tensor(count)]
        ours = apply(adamw_reference_, clones(values), grad)
        theirs = apply(adamw_, clones(values), grad)
        # The result itself may be near zero where its terms cancel.
        terms = {
            "param": start[0].double().abs() + theirs[0].double().abs(),
            "exp_avg": 0.9 * start[1].double().abs() + 0.1 * grad.double().abs(),
            "exp_avg_sq": theirs[2].double(),
            "step": torch.tensor(1.0),
        }
        for (name, term), a, b in zip(terms.items(), ours, theirs, strict=True):
            assert ((a.double() - b.double()).abs() <= bound * term).all(), (name, count)


def test_mixed_dtypes_take_the_reference_path() -> None:
    start, grad = tensors(BF16)
    values = [start[0], start[1].float(), start[2].float(), start[3]]
    for a, b in zip(apply(adamw_, clones(values), grad), apply(adamw_reference_, clones(values), grad), strict=True):
        assert torch.equal(a, b)


def test_float64_is_left_to_torch() -> None:
    params = [nn.Parameter(p.detach().double()) for p in make_params()]
    other = [nn.Parameter(p.detach().clone()) for p in params]
    a, b = FusedAdamW(params), torch.optim.AdamW(other, fused=True)
    train(a, params, range(2))
    train(b, other, range(2))
    assert_same(a, b)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_can_be_stepped_to_plan_memory(device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(8, 4, device=device, dtype=BF16))
        optimizer = FusedAdamW([weight])
        optimizer.found_inf = torch.empty((), device=device)
        weight.grad = torch.empty_like(weight)
        optimizer.step()
        assert optimizer.state[weight]["exp_avg"].shape == (8, 4)


def test_it_trains_where_triton_is_not_installed() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from lightning_sonar.optim.adamw import FusedAdamW
from lightning_sonar.optim.update import _triton_launch
weight = torch.nn.Parameter(torch.ones(4))
weight.grad = torch.ones(4)
FusedAdamW([weight], lr=0.5).step()
print(_triton_launch(), bool((weight < 1).all()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None", "True"]
