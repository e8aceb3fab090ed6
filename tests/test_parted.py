"""One optimizer made of two: experts and dense parameters updated by their own."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot

from lightning_sonar import FusedAdamW, SonarMoEStrategy, find_expert_tensors, release_in_backward
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.expert_clip import scales_itself
from lightning_sonar.experts import NoExpertsError
from lightning_sonar.optim import ExpertsAndDense, is_element_wise, step_tensor
from lightning_sonar.optim.step_one import owner_of

pytestmark = pytest.mark.usefixtures("deterministic")

SGD = functools.partial(torch.optim.SGD, momentum=0.9)


def twice_fused(parameters, **options):
    """Two optimizers of one kind: must do what one over all does."""
    return ExpertsAndDense(parameters, experts=FusedAdamW, dense=FusedAdamW, lr=1e-2, **options)


def mixed(parameters):
    return ExpertsAndDense(
        parameters, experts=functools.partial(SGD, lr=0.1), dense=functools.partial(FusedAdamW, lr=1e-2)
    )


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def pair(**options):
    torch.manual_seed(0)
    tensors = [torch.nn.Parameter(torch.randn(4, 8, 8)), torch.nn.Parameter(torch.randn(8, 8))]
    return tensors, ExpertsAndDense(tensors, experts=SGD, dense=FusedAdamW, lr=0.1, **options)


def give_gradients(tensors, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("mode", ["standard_no_expert_clip", "sonar", "sonar_per_expert", "in_backward_all"])
def test_two_of_a_kind_do_what_one_optimizer_does(mode, automatic):
    options = {"automatic": automatic, "scheduler": halving, "steps": 5}
    one = snapshot(*fit(small_model(), mode, **options))
    two = snapshot(*fit(small_model(), mode, optimizer=twice_fused, **options))
    assert differing(one, two) == []


def test_two_kinds_step_in_backward_as_they_do_after_it():
    after = snapshot(*fit(small_model(), "standard_no_expert_clip", optimizer=mixed, scheduler=halving))
    trainer, module = fit(small_model(), "sonar", optimizer=mixed, scheduler=halving)
    inside = snapshot(trainer, module)
    assert differing(after, inside) == []
    kinds = {name.rpartition(".")[2] for name in inside if "experts" in name}
    assert {"momentum_buffer"} <= kinds
    assert "exp_avg" not in kinds
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.1 / 32, 1e-2 / 32]


@pytest.mark.parametrize("expert_clip", ["lagged", "per_tensor", "per_expert", "exact"])
def test_expert_clips_know_which_child_scales_for_itself(expert_clip):
    one = snapshot(*fit(small_model(), "sonar", strategy_options={"expert_clip": expert_clip}, steps=4))
    two = snapshot(
        *fit(small_model(), "sonar", strategy_options={"expert_clip": expert_clip}, steps=4, optimizer=twice_fused)
    )
    loose = lambda d: {name: value for name, value in d.items() if value.dtype.is_floating_point}  # noqa: E731
    left, right = loose(one), loose(two)
    if expert_clip in ("per_tensor", "per_expert"):
        assert differing(left, right) == []
    else:  # a global norm is summed in the order of the groups
        torch.testing.assert_close(left, right)


def test_the_child_that_owns_a_tensor_is_asked_for_what_it_can():
    tensors, optimizer = pair()
    assert owner_of(optimizer, tensors[0]) is optimizer.experts
    assert owner_of(optimizer, tensors[1]) is optimizer.dense
    assert not scales_itself(owner_of(optimizer, tensors[0]))
    assert scales_itself(owner_of(optimizer, tensors[1]))
    with pytest.raises(ValueError, match="No optimizer here holds"):
        optimizer.child_of(torch.zeros(3))


def test_one_tensor_is_stepped_and_no_other():
    tensors, optimizer = pair()
    before = [tensor.detach().clone() for tensor in tensors]
    give_gradients(tensors)
    step_tensor(optimizer, optimizer.param_groups[0], tensors[0])
    assert not torch.equal(tensors[0], before[0])
    assert torch.equal(tensors[1], before[1])
    assert set(optimizer.state[tensors[0]]) == {"momentum_buffer"}
    assert optimizer.experts.state is optimizer.dense.state is optimizer.state


def test_schedulers_that_cycle_momentum_find_it():
    tensors = [torch.nn.Parameter(torch.zeros(2, 2, 2)), torch.nn.Parameter(torch.zeros(2))]
    optimizer = ExpertsAndDense(tensors, experts=FusedAdamW, dense=torch.optim.AdamW, lr=1e-3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=4)
    assert {group["betas"][0] for group in optimizer.param_groups} == {0.95}


def test_a_step_hook_fires_once_a_step():
    tensors, optimizer = pair()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    give_gradients(tensors)
    step_tensor(optimizer, optimizer.param_groups[0], tensors[0])
    optimizer.step()
    assert calls == [1]


def test_a_module_tells_which_tensors_are_experts():
    model = small_model()
    optimizer = ExpertsAndDense(model, experts=SGD, dense=FusedAdamW, lr=1e-3)
    held = [id(tensor) for group in optimizer.experts.param_groups for tensor in group["params"]]
    assert held == [id(tensor) for tensor in find_expert_tensors(model).tensors]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    with pytest.raises(NoExpertsError):
        ExpertsAndDense(torch.nn.Linear(2, 2), experts=SGD, dense=FusedAdamW)


def test_named_parameters_and_groups_are_divided_with_their_settings():
    expert, dense = torch.nn.Parameter(torch.zeros(2, 2, 2)), torch.nn.Parameter(torch.zeros(2))
    named = ExpertsAndDense([("e", expert), ("d", dense)], experts=SGD, dense=FusedAdamW, lr=1e-3)
    assert [group["param_names"] for group in named.param_groups] == [["e"], ["d"]]
    grouped = ExpertsAndDense([{"params": [expert, dense], "lr": 0.5}], experts=SGD, dense=FusedAdamW, lr=1e-3)
    assert [group["lr"] for group in grouped.param_groups] == [0.5, 0.5]


def test_parameters_of_one_kind_only_are_refused():
    flat = [torch.nn.Parameter(torch.zeros(2, 3))]
    with pytest.raises(ValueError, match=r"no expert tensor \[E, ...\], only \[\[2, 3\]\]"):
        ExpertsAndDense(flat, experts=SGD, dense=FusedAdamW)
    with pytest.raises(ValueError, match="no dense parameter"):
        ExpertsAndDense([torch.nn.Parameter(torch.zeros(2, 3, 4))], experts=SGD, dense=FusedAdamW)


def test_a_group_added_later_goes_to_its_child():
    _, optimizer = pair()
    more = [torch.nn.Parameter(torch.zeros(2, 2, 2)), torch.nn.Parameter(torch.zeros(5))]
    optimizer.add_param_group({"params": more[0], "lr": 0.3})
    optimizer.add_param_group({"params": [more[1]], "lr": 0.4})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3, 0.1, 0.4]
    assert owner_of(optimizer, more[0]) is optimizer.experts
    with pytest.raises(ValueError, match="Add them as two groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(s)) for s in ((1, 1, 1), (1,))]})


def test_a_state_dict_is_an_ordinary_one_and_goes_to_the_children():
    tensors, optimizer = pair()
    give_gradients(tensors)
    optimizer.step()
    saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
    assert sorted(saved["state"]) == [0, 1]
    assert [group["params"] for group in saved["param_groups"]] == [[0], [1]]
    others, fresh = pair()
    fresh.load_state_dict(saved)
    assert fresh.experts.state is fresh.dense.state is fresh.state
    assert all(a is b for a, b in zip(fresh.param_groups[:1], fresh.experts.param_groups, strict=True))
    for mine, its in zip(tensors, others, strict=True):
        its.data.copy_(mine.data)
    for opt, held in ((optimizer, tensors), (fresh, others)):
        give_gradients(held, seed=3)
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters; expected \[1, 1\]"):
        fresh.load_state_dict(torch.optim.SGD([torch.zeros(1), torch.zeros(2)]).state_dict())


def test_copies_keep_groups_and_state_shared():
    tensors, optimizer = pair()
    give_gradients(tensors)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert twin.experts.state is twin.state
    assert twin.param_groups[1] is twin.dense.param_groups[0]
    assert twin.param_groups[0]["params"][0] is not tensors[0]


def test_pickles_keep_groups_and_state_shared():
    tensors, optimizer = pair()
    give_gradients(tensors)
    optimizer.step()
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.experts.state is twin.dense.state is twin.state
    held = [group["params"][0] for group in twin.param_groups]
    for which, owned in ((optimizer, tensors), (twin, held)):
        give_gradients(owned, seed=3)
        which.step()
    assert all(torch.equal(a, b) for a, b in zip(tensors, held, strict=True))
    assert len(optimizer.state) == len(twin.state) == 2


def test_frozen_experts_leave_everything_else_to_the_dense_optimizer():
    model = small_model()
    for tensor in find_expert_tensors(model).tensors:
        tensor.requires_grad_(False)
    optimizer = ExpertsAndDense(model, experts=SGD, dense=FusedAdamW, lr=1e-3)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, len(trained)]
    for tensor in trained:
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    assert len(optimizer.state) == len(trained)
    again = ExpertsAndDense(model, experts=SGD, dense=FusedAdamW, lr=1e-3)
    again.load_state_dict(optimizer.state_dict())
    assert len(again.state) == len(trained)
    # Given as parameters, the same.
    listed = ExpertsAndDense(model.parameters(), experts=SGD, dense=FusedAdamW, lr=1e-3)
    assert [len(group["params"]) for group in listed.param_groups] == [0, len(trained)]


def test_a_model_of_which_nothing_trains_is_refused():
    model = small_model().requires_grad_(False)
    with pytest.raises(ValueError, match="no expert tensor"):
        ExpertsAndDense(model, experts=SGD, dense=FusedAdamW)


@pytest.mark.parametrize("make", [FusedAdamW, functools.partial(FusedAdamW, stochastic_rounding=True)])
def test_a_state_divided_in_two_is_refused_by_one_optimizer(make):
    tensors = [torch.nn.Parameter(torch.zeros(2, 2, 2)), torch.nn.Parameter(torch.zeros(2))]
    saved = ExpertsAndDense(tensors, experts=FusedAdamW, dense=FusedAdamW, lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"groups of \[1, 1\] parameters; FusedAdamW has \[2\].*ExpertsAndDense"):
        make(tensors).load_state_dict(saved)


def test_a_state_of_another_optimizer_is_refused_by_the_child_that_cannot_take_it():
    tensors, optimizer = pair()
    give_gradients(tensors)
    optimizer.step()
    fused = ExpertsAndDense(tensors, experts=FusedAdamW, dense=FusedAdamW, lr=0.1)
    with pytest.raises(ValueError, match=r"has no betas, eps, which FusedAdamW expects.*Resume with the optimizer"):
        fused.load_state_dict(optimizer.state_dict())


def test_the_flag_of_a_loss_that_is_not_finite_reaches_both_children():
    tensors = [torch.nn.Parameter(torch.ones(2, 2, 2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = ExpertsAndDense(tensors, experts=FusedAdamW, dense=FusedAdamW, lr=0.1)
    give_gradients(tensors)
    optimizer.found_inf = torch.ones(())
    step_tensor(optimizer, optimizer.param_groups[0], tensors[0], found_inf=optimizer.found_inf)
    optimizer.step()
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    optimizer.found_inf = None
    optimizer.step()
    assert not any(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.parametrize("check", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_updates_neither(check):
    tensors, optimizer = pair()
    before = [tensor.detach().clone() for tensor in tensors]
    handle = release_in_backward(optimizer, tensors[:1], check=check)
    handle.train_step((tensors[0].sum() + tensors[1].sum()) * torch.nan, max_norm=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert handle.skipped_steps == 1
    handle.train_step(tensors[0].sum() + tensors[1].sum(), max_norm=1.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_slices_are_stepped_where_the_experts_optimizer_is_element_wise():
    assert is_element_wise(pair()[1])
    adafactor = ExpertsAndDense(pair()[0], experts=torch.optim.Adafactor, dense=FusedAdamW, lr=0.1)
    assert not is_element_wise(adafactor)


def test_a_run_resumes_bitwise(tmp_path):
    data = batches(6)

    def train(steps, ckpt=None):
        module = AutomaticLM(small_model(seed=0 if ckpt is None else 5), mixed, halving)
        trainer = make_trainer(SonarMoEStrategy(), steps, max_epochs=-1)
        given = ResumableLoader(data, ShuffledBatches(len(data), 1, seed=0), collate_fn=lambda examples: examples[0])
        trainer.fit(module, given, ckpt_path=ckpt, weights_only=True if ckpt else None)
        return trainer, module

    path = str(tmp_path / "half.ckpt")
    train(3)[0].save_checkpoint(path)
    assert differing(snapshot(*train(6)), snapshot(*train(6, path))) == []


def test_states_of_fused_children_exist_from_the_start():
    module = AutomaticLM(small_model(), twice_fused)
    trainer = make_trainer(SonarMoEStrategy(), 1)
    seen = []
    module.on_train_start = lambda: seen.append(len(trainer.optimizers[0].state))
    trainer.fit(module, loader(batches(1)))
    assert seen == [len(list(module.parameters()))]
    assert fused()(module.parameters()).state == {}
