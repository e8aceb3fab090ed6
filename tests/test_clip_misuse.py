"""Clipping experts in ways that are easy to get wrong: each is right, or says what to do instead."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, fused, loader, make_trainer, small_model
from test_in_backward import Toy, equal, inputs, toy, values
from torch import nn

from lightning_sonar import FusedAdamW, SonarMoEStrategy, find_expert_tensors, messages, release_in_backward

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:Gradients are accumulated"),
]

EXACT = "sonar_exact_clip"
POLICIES = ["exact", "per_tensor", "per_expert", "lagged"]


class Overwriting(torch.autograd.Function):
    """A square whose backward writes into what it saved, as kernels that save memory do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            made = 2 * grad * x
            x.data.copy_(made)
        return made


def dense_only(model: Toy, step: int) -> torch.Tensor:
    return model.dense(inputs(step)).square().mean()


# exact.


def test_a_further_backward_after_updates_raises_and_accumulating_it_is_standard_training():
    model, _, handle = toy(EXACT)
    handle.max_norm = 0.05
    handle.backward(model(inputs(0)))
    with pytest.raises(RuntimeError, match=r"2 tensors were updated by an earlier backward.*handle\.accumulate\(\)"):
        handle.backward(dense_only(model, 1))
    results = []
    for mode in ("standard", EXACT):
        model, optimizer, handle = toy(mode)
        handle.max_norm = 0.05
        with handle.accumulate():
            handle.backward(model(inputs(0)))
        handle.backward(dense_only(model, 1))
        handle.clip_(0.05)
        optimizer.step()
        results.append(values(model, optimizer))
    assert equal(*results)


def test_a_backward_that_overwrites_what_it_saved_is_noticed_before_anything_is_updated():
    model = Toy()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    handle = release_in_backward(optimizer, find_expert_tensors(model), mode=EXACT)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    hidden = Overwriting.apply(model.all_experts(model.dense(inputs(0)), model.first).tanh())
    loss = model.all_experts(hidden, model.second).square().mean()
    with pytest.raises(RuntimeError, match="overwrites what it saved"):
        handle.train_step(loss, max_norm=0.05)
    # The tensor above the faulty function has the same gradient twice, and is updated; the one below is not.
    assert torch.equal(before["first"], model.first)
    assert not torch.equal(before["second"], model.second)


def test_the_repeated_gradient_is_compared_in_the_first_clipped_step_only(monkeypatch):
    model, _, handle = toy(EXACT)
    compared = []
    two = handle._two_pass
    original = two._compare
    monkeypatch.setattr(two, "_compare", lambda tensor: (compared.append(tensor), original(tensor))[1])
    for step in range(3):
        handle.train_step(model(inputs(step)), max_norm=0.05)
    assert len(compared) == 2


def test_backwards_that_reach_no_expert_are_standard_training():
    results = []
    for mode in ("standard", EXACT):
        model, optimizer, handle = toy(mode)
        handle.train_step(dense_only(model, 0), max_norm=0.05, last=False)
        handle.train_step(dense_only(model, 1), max_norm=0.05)
        handle.leaf_of = lambda tensor: tensor  # then dense gradients stay from the first pass
        handle.train_step(dense_only(model, 2), max_norm=0.05)
        results.append(values(model, optimizer))
    assert equal(*results)


def test_clipping_twice_scales_once():
    model, optimizer, handle = toy(EXACT)
    handle.max_norm = 0.05
    handle.backward(model(inputs(0)))
    first = handle.clip_(0.05)
    left = model.dense.weight.grad.clone()
    assert torch.equal(handle.clip_(0.05), first)
    assert torch.equal(model.dense.weight.grad, left)
    optimizer.step()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_someone_elses_sees_the_dense_gradient(when):
    results = []
    for mode in ("standard", EXACT):
        model = Toy()
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        seen: list[float] = []

        def look(tensor, seen=seen):
            seen.append(float(tensor.grad.norm()))

        if when == "before":
            model.dense.weight.register_post_accumulate_grad_hook(look)
        handle = release_in_backward(optimizer, find_expert_tensors(model), mode=mode)
        if when == "after":
            model.dense.weight.register_post_accumulate_grad_hook(look)
        for step in range(3):
            handle.train_step(model(inputs(step)), max_norm=0.05)
        results.append((values(model, optimizer), seen))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_compiled_model_is_told_what_to_switch_off():
    model, _, handle = toy(EXACT)
    compiled = torch.compile(model, backend="aot_eager")
    handle.train_step(compiled(inputs(0)))  # one pass: backward is compiled to reuse what forward saved
    with pytest.raises(RuntimeError, match=r"donated_buffer = False.*expert_clip='lagged'"):
        handle.train_step(compiled(inputs(0)), max_norm=0.05)


class KeepingNothing(AutomaticLM):
    """Takes what backward is given, and forgets it."""

    def backward(self, loss, *args, **kwargs):
        loss.backward()


def test_a_backward_of_ones_own_that_forgets_its_arguments_is_told_so():
    trainer = make_trainer(SonarMoEStrategy(mode=EXACT), 1)
    with pytest.raises(RuntimeError, match=r"first pass did not keep the graph.*loss\.backward\(\*\*kwargs\)"):
        trainer.fit(KeepingNothing(small_model(), fused()), loader(batches(1)))


def test_reentrant_checkpointing_is_told_the_other_kind():
    model = Toy()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    handle = release_in_backward(optimizer, find_expert_tensors(model), mode=EXACT)
    x = model.dense(inputs(0))
    loss = torch.utils.checkpoint.checkpoint(
        lambda x: model.all_experts(x, model.second).square().mean(), x, use_reentrant=True
    )
    before = values(model, optimizer)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        handle.train_step(loss, max_norm=0.05)
    assert equal(before, values(model, optimizer))


def test_tensors_hidden_by_reentrant_checkpointing_are_missed_in_the_second_pass():
    model, _, handle = toy(EXACT)
    below = torch.utils.checkpoint.checkpoint(
        lambda x: model.all_experts(model.dense(x), model.first), inputs(0).requires_grad_(), use_reentrant=True
    )
    with pytest.raises(RuntimeError, match=r"missing: first\. .*use_reentrant=False"):
        handle.train_step(model.all_experts(below.tanh(), model.second).square().mean(), max_norm=0.05)


# All policies.


@pytest.mark.parametrize("policy", POLICIES)
def test_an_expert_that_only_an_earlier_microbatch_has_reached_is_clipped(policy):
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = release_in_backward(optimizer, find_expert_tensors(model), expert_clip=policy)
    if policy == "lagged":  # whose first step is not clipped
        handle.train_step(model(inputs(5)), max_norm=0.05)
    before = [model.first.detach().clone(), model.second.detach().clone()]
    handle.train_step(model(inputs(0)), max_norm=0.05, last=False)
    handle.train_step(dense_only(model, 1), max_norm=0.05)
    most = 0.05 * (model.first.shape[0] ** 0.5 if policy == "per_expert" else 1)
    for was, now in zip(before, (model.first, model.second), strict=True):
        moved = float((now.detach() - was).norm())
        assert 0 < moved < 1.5 * most  # lagged: the norm of the step before is a little smaller than this step's


def test_lagged_without_a_clip_says_so_and_keeps_nothing():
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = release_in_backward(optimizer, find_expert_tensors(model), expert_clip="lagged")
    handle.max_norm = 1e-6
    for step in range(3):
        handle.backward(model(inputs(step)))
        if step:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="nothing is ever clipped"):
                optimizer.step()
        optimizer.zero_grad()
        assert handle._expert_clip._parts == []
    # The first norm that is taken is this step's alone.
    handle.train_step(model(inputs(3)), max_norm=1e-6)
    noted = handle.state_dict()["global_norm"]
    other = Toy()
    other.load_state_dict(model.state_dict())
    handle.train_step(model(inputs(4)), max_norm=1e-6)
    other(inputs(4)).backward()
    total = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
    assert handle.state_dict()["global_norm"] == pytest.approx(float(total), rel=1e-5)
    assert noted > 0


@pytest.mark.parametrize("where", ["dense", "expert"])
def test_lagged_keeps_its_norm_over_a_step_that_leaves_an_update_out(where):
    model = Toy()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    handle = release_in_backward(optimizer, find_expert_tensors(model), expert_clip="lagged", check="gradient")
    handle.train_step(model(inputs(0)), max_norm=0.05)
    noted = handle.state_dict()
    tensor = model.dense.weight if where == "dense" else model.second
    spoil = tensor.register_hook(lambda grad: torch.full_like(grad, float("nan")))
    handle.train_step(model(inputs(1)), max_norm=0.05)
    spoil.remove()
    assert handle.state_dict() == noted
    assert handle.skipped_tensors > 0
    handle.train_step(model(inputs(2)), max_norm=0.05)
    assert handle.state_dict() != noted


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_with_nothing_to_clip_to_warns(policy):
    trainer = make_trainer(SonarMoEStrategy(expert_clip=policy), 1, clip=None)
    with pytest.warns(UserWarning, match=rf"expert_clip='{policy}' has nothing to clip to"):
        trainer.fit(AutomaticLM(small_model(), fused()), loader(batches(1)))


def test_another_policy_for_the_exact_mode_is_refused_by_its_real_name():
    with pytest.raises(ValueError, match=r"Choose mode='sonar' with expert_clip='lagged'"):
        SonarMoEStrategy(mode=EXACT, expert_clip="lagged")


class Later(L.Callback):
    """Changes the Trainer's clip value in the middle of training."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.gradient_clip_val = 0.1 / (batch_idx + 1)


def test_a_clip_value_changed_during_training_reaches_the_hooks():
    results = []
    for mode in ("standard", EXACT):
        module = AutomaticLM(small_model(), fused())
        trainer = make_trainer(SonarMoEStrategy(mode=mode), 3, clip=0.5, callbacks=[Later()])
        trainer.fit(module, loader(batches(3)))
        results.append([p.detach().clone() for p in module.parameters()])
    assert equal(*results)


def test_norms_are_measured_every_so_many_steps():
    class Seen(L.Callback):
        found: list[dict[str, float]] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer, *_):
            self.found.append({k: float(v) for k, v in trainer.strategy.grad_norms.items()})

    seen = Seen()
    trainer = make_trainer(SonarMoEStrategy(log_grad_norm=2), 4, callbacks=[seen])
    trainer.fit(AutomaticLM(small_model(), fused()), loader(batches(4)))
    empty, second, third, fourth = seen.found
    assert empty == {}
    assert second["total"] > second["dense"] > 0
    assert third == second
    assert fourth != second


def test_every_message_names_a_remedy():
    assert messages.why_not_twice("something else") is None
    for error in ("donated buffers", "backward through the graph a second time", "When use_reentrant=True"):
        assert "expert_clip='lagged'" in str(messages.why_not_twice(error))


def test_a_module_without_experts_in_the_graph_still_trains():
    model = Toy()
    model.aux = nn.Linear(8, 1)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    handle = release_in_backward(optimizer, find_expert_tensors(model), mode=EXACT)
    before = model.aux.weight.detach().clone()
    handle.train_step(model.aux(inputs(0)).square().mean(), max_norm=0.05)
    assert not torch.equal(before, model.aux.weight)
