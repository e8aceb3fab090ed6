from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from helpers import batches, small_model
from torch import nn

from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward
from lightning_sonar.clipping import is_nonfinite
from lightning_sonar.losses import response_cross_entropy

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    # Many tests call loss.backward() bare, which a test of its own is about.
    pytest.mark.filterwarnings("ignore:loss.backward.. was called directly:UserWarning"),
]


class Toy(nn.Module):
    """Two layers of batched experts, every token to every expert, and a dense layer."""

    def __init__(self, num_experts: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(width, width)
        self.num_experts = num_experts
        self.first = nn.Parameter(torch.randn(num_experts, width, width) / 3)
        self.second = nn.Parameter(torch.randn(num_experts, width, width) / 3)

    def forward(self, x):
        x = self.all_experts(self.dense(x), self.first).tanh()
        return self.all_experts(x, self.second).square().mean()

    def all_experts(self, x, weight):
        return torch.bmm(x.expand(self.num_experts, *x.shape), weight).sum(0)


def toy(mode: str = "sonar", optimizer=FusedAdamW, **options):
    model = Toy()
    made = optimizer(model.parameters(), lr=1e-2)
    return model, made, release_in_backward(made, find_expert_tensors(model), mode=mode, **options)


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(step))


def values(model: nn.Module, optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()] + [
        torch.as_tensor(v).clone() for p in model.parameters() for v in optimizer.state[p].values()
    ]


def equal(left, right) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# The step.


def test_experts_step_inside_backward_and_dense_gradients_stay():
    model, _made, handle = toy()
    first, dense = model.first.detach().clone(), model.dense.weight.detach().clone()
    model(inputs()).backward()
    assert model.first.grad is None
    assert model.second.grad is None
    assert not torch.equal(first, model.first)
    assert model.dense.weight.grad is not None
    assert torch.equal(dense, model.dense.weight)
    assert handle.hooks_fired == 2
    assert handle.mid_step


@pytest.mark.parametrize("optimizer", [FusedAdamW, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert"])
def test_plain_loop_equals_standard_without_expert_clip_bitwise(mode, optimizer):
    results = []
    for name in ("standard_no_expert_clip", mode):
        model, made, handle = toy(name, optimizer)
        for step in range(6):
            handle.train_step(model(inputs(step)), max_norm=0.05)
        results.append(values(model, made))
    assert equal(*results)


def test_raw_backward_clip_and_step_equal_train_step():
    results = []
    for raw in (False, True):
        model, made, handle = toy()
        for step in range(4):
            loss = model(inputs(step))
            if raw:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                made.step()
                made.zero_grad()
            else:
                handle.train_step(loss, max_norm=0.05)
        results.append(values(model, made))
    assert equal(*results)


def test_standard_clips_experts_too():
    norms = {}
    for mode in ("standard", "standard_no_expert_clip"):
        model, _made, handle = toy(mode)
        norms[mode] = handle.train_step(model(inputs()), max_norm=0.01)
    assert norms["standard"] > norms["standard_no_expert_clip"]


def test_in_backward_all_leaves_nothing_to_step_and_equals_unclipped_standard():
    results = []
    for mode in ("standard", "in_backward_all"):
        model, made, handle = toy(mode)
        for step in range(4):
            handle.backward(model(inputs(step)))
            if mode == "in_backward_all":
                assert all(p.grad is None for p in model.parameters())
            made.step()
            made.zero_grad()
        results.append(values(model, made))
    assert equal(*results)


def test_clip_where_nothing_is_left_to_clip_is_refused_with_the_remedy():
    model, _made, handle = toy("in_backward_all")
    with pytest.raises(ValueError, match=r"'in_backward_all'.*Set gradient_clip_val=None.*mode='sonar'"):
        handle.train_step(model(inputs()), max_norm=1.0)


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "in_backward_all", "standard_no_expert_clip"])
def test_value_clipping_equals_clipping_everything_element_wise(mode):
    results = []
    for name in ("standard", mode):
        model, made, handle = toy(name)
        for step in range(4):
            handle.train_step(model(inputs(step)), max_norm=1e-3, algorithm="value")
        results.append(values(model, made))
    assert equal(*results)


def test_at_most_one_expert_gradient_is_alive_with_grouped_mm():
    for num_layers in (2, 5):
        model = small_model(num_layers=num_layers)
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        experts = find_expert_tensors(model)
        handle = release_in_backward(optimizer, experts)
        alive: list[int] = []

        class Count:
            def on_phase(self, phase): ...

            def on_gradient(self, tensor, experts=experts, alive=alive):
                alive.append(sum(t.grad is not None for t in experts.tensors))

        handle.observers.append(Count())
        batch = batches(1)[0]
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        handle.train_step(response_cross_entropy(logits, batch["labels"])[0])
        assert alive == [1] * len(experts)
        assert len(experts) == 2 * num_layers


def test_observers_see_the_phases_in_order():
    model, _made, handle = toy()
    seen: list[str] = []

    class Watch:
        def on_phase(self, phase):
            seen.append(phase)

        def on_gradient(self, tensor):
            seen.append("gradient")

    handle.observers.append(Watch())
    handle.train_step(model(inputs()), max_norm=1.0)
    assert seen == ["backward", "gradient", "gradient", "clip", "step", "done"]


# Guard 1: the hook returns None.


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert"])
def test_hooks_return_none(mode):
    model, _made, handle = toy(mode)
    model.first.grad = torch.ones_like(model.first)
    parts = range(4) if mode == "sonar_per_expert" else [None]
    assert [handle._on_gradient(part, model.first) for part in parts] == [None] * len(parts)
    assert model.first.grad is None


# Guard 2: version counters.


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert"])
@pytest.mark.parametrize(
    "optimizer", [FusedAdamW, torch.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr, fused=True)]
)
def test_second_backward_through_an_older_graph_raises_instead_of_using_new_weights(optimizer, mode):
    model, made, _ = toy(mode, optimizer)
    loss = model(inputs())
    loss.backward(retain_graph=True)
    made.step()
    made.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Guard 3: twice in one step.


def test_second_backward_before_the_step_raises_and_names_tensor_and_remedy():
    model, made, _ = toy()
    model(inputs(0)).backward()
    with pytest.raises(RuntimeError, match=r"^second got a second gradient .*accumulate.*per_microbatch.*step\(\)"):
        model(inputs(1)).backward()
    made.step()
    made.zero_grad()
    model(inputs(1)).backward()


def test_shared_experts_under_reentrant_checkpointing_raise():
    model, _optimizer, _ = toy()
    from torch.utils.checkpoint import checkpoint

    def layer(x):
        return model.all_experts(x, model.first).tanh()

    x = inputs().requires_grad_()
    x = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="first got a second gradient .*use_reentrant=False"):
        x.sum().backward()


def test_create_graph_is_refused():
    model, _made, _ = toy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=r"create_graph=True.*Use torch.autograd.grad"):
            model(inputs()).backward(create_graph=True)


# Guard 5: live hyperparameters and state.


def test_learning_rate_change_acts_on_the_next_step():
    model, made, handle = toy(optimizer=torch.optim.SGD)
    handle.train_step(model(inputs()))
    made.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    handle.train_step(model(inputs(1)))
    assert equal(before, [p.detach() for p in model.parameters()])


def test_loaded_state_is_used_by_the_hooks():
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        model, made, handle = toy(mode)
        handle.train_step(model(inputs(0)))
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        state = made.state_dict()
        model2, made2, handle2 = toy(mode)
        model2.load_state_dict(saved)
        made2.load_state_dict(state)
        handle2.train_step(model2(inputs(1)))
        results.append(values(model2, made2))
    assert equal(*results)
    assert results[0][-1].numel()


# Guard 6: accumulation.


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "in_backward_all"])
def test_exact_accumulation_equals_standard_and_says_that_the_saving_is_lost(mode):
    results = []
    for name in ("standard_no_expert_clip" if mode != "in_backward_all" else "standard", mode):
        model, made, handle = toy(name)
        for step in range(3):
            for micro in range(3):
                loss = model(inputs(10 * step + micro))
                if name == mode and not (step or micro):
                    with pytest.warns(UserWarning, match="saves is lost.*per_microbatch"):
                        handle.train_step(loss, last=False)
                else:
                    handle.train_step(loss, last=micro == 2)
        results.append(values(model, made))
    assert equal(*results)


def test_accumulate_context_works_in_a_raw_loop():
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        model, made, handle = toy(mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with handle.accumulate():
                model(inputs(0)).backward()
                model(inputs(1)).backward()
        assert model.first.grad is not None
        assert not handle.accumulating
        model(inputs(2)).backward()
        assert (model.first.grad is None) == (mode == "sonar")
        made.step()
        results.append(values(model, made))
    assert equal(*results)


def test_per_microbatch_updates_once_a_microbatch():
    model, made, handle = toy(accumulation="per_microbatch")
    handle.train_step(model(inputs(0)), last=False)
    assert model.first.grad is None
    handle.train_step(model(inputs(1)))
    assert made.state[model.first]["step"] == 2
    assert made.state[model.dense.weight]["step"] == 1


def test_per_microbatch_needs_to_be_told_where_a_backward_begins():
    model, _made, _ = toy(accumulation="per_microbatch")
    with pytest.raises(RuntimeError, match=r"call handle.backward\(loss\)"):
        model(inputs()).backward()


# Guard 7: float16.


def test_float16_is_refused_with_the_remedy():
    model = Toy().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="first is float16.*bfloat16"):
        release_in_backward(optimizer, find_expert_tensors(model))


# Guard 8: not finite.


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("optimizer", [FusedAdamW, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(
    "mode", ["standard", "standard_no_expert_clip", "sonar", "sonar_per_expert", "in_backward_all"]
)
def test_a_loss_that_is_not_finite_updates_nothing_and_training_goes_on(mode, optimizer, bad):
    model, made, handle = toy(mode, optimizer)
    max_norm = 0.0 if mode == "in_backward_all" else 1.0
    handle.train_step(model(inputs(0)), max_norm=max_norm)
    before = values(model, made)
    handle.train_step(model(inputs(1)) * bad, max_norm=max_norm)
    assert equal(before, values(model, made))
    assert handle.skipped_steps == 1
    handle.train_step(model(inputs(2)), max_norm=max_norm)
    assert not equal(before, values(model, made))
    assert all(torch.isfinite(value).all() for value in values(model, made))
    assert handle.skipped_steps == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 3, -1])
def test_any_number_that_is_not_finite_is_seen_wherever_it_stands(bad, place):
    tensor = torch.linspace(-2.0, 2.0, 7)
    assert is_nonfinite(tensor) == 0
    tensor[place] = bad
    assert is_nonfinite(tensor) == 1


@pytest.mark.parametrize("on_device", [False, True])
def test_a_bad_microbatch_skips_the_whole_step(monkeypatch, on_device):
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: on_device)
    model, made, handle = toy()
    handle.train_step(model(inputs(0)))
    before = values(model, made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle.train_step(model(inputs(1)) * float("nan"), last=False)
    handle.train_step(model(inputs(2)))
    assert equal(before, values(model, made))
    assert all(p.grad is None for p in model.parameters())


def test_raise_stops_before_anything_is_updated():
    model, made, handle = toy(on_nonfinite="raise")
    handle.train_step(model(inputs(0)))
    before = values(model, made)
    with pytest.raises(FloatingPointError, match="The loss is nan; nothing was updated"):
        handle.train_step(model(inputs(1)) * float("nan"))
    assert equal(before, values(model, made))


def test_ignore_does_as_plain_training_does():
    model, _made, handle = toy(on_nonfinite="ignore")
    handle.train_step(model(inputs(0)) * float("nan"))
    assert torch.isnan(model.first).all()
    assert handle.skipped_steps == 0


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert"])
def test_one_bad_gradient_leaves_that_tensor_out_when_gradients_are_checked(monkeypatch, mode, on_device):
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: on_device)
    model, made, handle = toy(mode, check="gradient")
    model.first.register_hook(lambda grad: grad * float("nan"))
    before = model.first.detach().clone()
    second = model.second.detach().clone()
    handle.train_step(model(inputs(0)))
    assert torch.equal(before, model.first)
    assert not torch.equal(second, model.second)
    assert handle.skipped_tensors == 1
    assert model.first.grad is None
    assert model.first not in made.state or made.state[model.first].get("step", 0) == 0


@pytest.mark.parametrize("check", ["loss", "gradient"])
def test_device_flag_path_skips_without_reading_the_loss(monkeypatch, check):
    """The path of a GPU, driven on a CPU: the flag is a tensor, nothing reads it until the count is asked for."""
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: True)
    model, made, handle = toy(check=check)
    handle.train_step(model(inputs(0)), max_norm=1.0)
    before = values(model, made)
    handle.train_step(model(inputs(1)) * float("nan"), max_norm=1.0)
    assert equal(before, values(model, made))
    assert isinstance(handle._guard._skipped_steps, torch.Tensor)
    assert handle.skipped_steps == 1
    assert made.found_inf is None
    handle.train_step(model(inputs(2)), max_norm=1.0)
    assert not equal(before, values(model, made))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_bad_dense_gradient_leaves_the_dense_step_out_when_gradients_are_checked(monkeypatch, on_device):
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: on_device)
    model, _made, handle = toy(check="gradient")
    model.dense.bias.register_hook(lambda grad: grad * float("inf"))
    dense, first = model.dense.weight.detach().clone(), model.first.detach().clone()
    handle.train_step(model(inputs(0)), max_norm=1.0)
    assert torch.equal(dense, model.dense.weight)
    assert not torch.equal(first, model.first)
    assert handle.skipped_tensors == 2


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "standard"])
def test_a_checked_gradient_that_is_not_finite_raises_if_that_is_asked_for(mode):
    model, made, handle = toy(mode, check="gradient", on_nonfinite="raise")
    (model.dense.bias if mode == "standard" else model.first).register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(FloatingPointError, match="gradient .* is not finite, though the loss is; it was not applied"):
        handle.train_step(model(inputs(0)))
    assert all(torch.isfinite(value).all() for value in values(model, made))


def test_looking_for_what_is_to_be_ignored_is_refused():
    with pytest.raises(ValueError, match="check='gradient' looks for what on_nonfinite='ignore' ignores"):
        toy(check="gradient", on_nonfinite="ignore")


def test_a_bare_backward_warns_once_that_nobody_looks_at_the_loss():
    model, made, _ = toy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model(inputs(step)).backward()
            made.step()
    assert [str(warning.message).split(",")[0] for warning in caught] == ["loss.backward() was called directly"]
    assert "Call handle.backward(loss)" in str(caught[0].message)


def test_value_clipping_asked_for_too_late_is_refused():
    model, made, handle = toy()
    handle.backward(model(inputs(0)))
    with pytest.raises(RuntimeError, match="tensors were updated in it with unclipped gradients. Say it before"):
        handle.clip_(0.01, "value")
    assert made.param_groups


def test_a_step_that_an_exception_broke_off_can_be_abandoned():
    model, made, handle = toy()
    handle.backward(model(inputs(0)))
    with pytest.raises(RuntimeError, match=r"call handle.abandon_step\(\)"):
        handle.backward(model(inputs(1)))
    handle.abandon_step()
    assert not handle.mid_step
    assert all(p.grad is None for p in model.parameters())
    handle.train_step(model(inputs(1)))
    assert made.state[model.dense.weight]["step"] == 1


def test_modes_without_hooks_take_an_optimizer_without_the_experts():
    model = Toy()
    optimizer = FusedAdamW(model.dense.parameters(), lr=1e-2)
    handle = release_in_backward(optimizer, find_expert_tensors(model), mode="standard")
    handle.train_step(model(inputs(0)), max_norm=1.0)


# Guard 16 and the end.


def test_model_memory_comes_back_while_hooks_are_on():
    model, made, handle = toy()
    handle.train_step(model(inputs()))
    gone = [weakref.ref(model.first), weakref.ref(model.first.untyped_storage()), weakref.ref(made)]
    del model, made
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert handle.experts == {}


def test_removed_hooks_act_no_more():
    model, made, handle = toy()
    handle.remove()
    handle.remove()
    model(inputs()).backward()
    assert model.first.grad is not None
    assert not model.first._post_accumulate_grad_hooks
    release_in_backward(made, find_expert_tensors(model))  # not refused: nobody owns them any more


def test_hooks_of_a_dead_optimizer_say_so():
    model, made, _ = toy()
    del made
    gc.collect()
    with pytest.raises(RuntimeError, match=r"optimizer .* is gone.*handle.remove\(\)"):
        model(inputs()).backward()


@pytest.mark.parametrize("key", ["accumulation", "on_nonfinite", "check"])
def test_unknown_options_list_the_choices(key):
    with pytest.raises(ValueError, match=f"{key}='nonsense': expected one of '"):
        toy(**{key: "nonsense"})


def test_releasing_twice_is_refused():
    model, made, handle = toy()
    with pytest.raises(ValueError, match=r"first is already updated inside backward.*remove\(\)"):
        release_in_backward(made, find_expert_tensors(model))
    handle.remove()
    release_in_backward(made, find_expert_tensors(model))


def test_tensor_outside_the_optimizer_is_refused():
    model = Toy()
    with pytest.raises(ValueError, match="first is to be updated inside backward, but the optimizer does not hold it"):
        release_in_backward(torch.optim.SGD(model.dense.parameters(), lr=0.1), find_expert_tensors(model))


def test_per_expert_refuses_optimizers_that_are_not_element_wise():
    with pytest.raises(ValueError, match="Adafactor is not known to be one. Use mode='sonar'"):
        toy("sonar_per_expert", torch.optim.Adafactor)


def test_parameter_groups_keep_their_own_hyperparameters():
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        model = Toy()
        optimizer = FusedAdamW(
            [
                {"params": [model.first], "weight_decay": 0.5},
                {"params": [model.second, *model.dense.parameters()], "lr": 1e-3, "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
        handle = release_in_backward(optimizer, find_expert_tensors(model), mode=mode)
        for step in range(3):
            handle.train_step(model(inputs(step)))
        results.append(values(model, optimizer))
    assert equal(*results)


def test_a_group_put_before_others_while_hooks_are_on_moves_no_settings():
    results = []
    for moved in (False, True):
        model, made, handle = toy("in_backward_all")
        names = [name for name, _ in model.named_parameters()]
        for group in made.param_groups:
            group["lr"] = 1e-2
        handle.train_step(model(inputs(0)))
        late = nn.Parameter(torch.zeros(2))
        made.add_param_group({"params": [late], "lr": 0.5, "weight_decay": 0.9})
        if moved:
            made.param_groups.insert(0, made.param_groups.pop())
        for step in range(1, 3):
            handle.train_step(model(inputs(step)))
        results.append(values(model, made))
        assert names == ["first", "second", "dense.weight", "dense.bias"]
    assert equal(*results)


def test_the_verdict_of_another_rank_on_its_loss_holds_here_too():
    model, made, handle = toy()
    handle.agree_by(torch.ones_like)
    before = values(model, made)
    handle.train_step(model(inputs(0)))
    assert equal(before, values(model, made))
    assert handle.skipped_steps == 1


def test_the_verdict_of_another_rank_on_its_gradients_holds_here_too():
    asked = []

    def agree(flag):
        asked.append(flag)
        return flag if len(asked) == 1 else torch.ones_like(flag)  # the first one is of the loss

    model, made, handle = toy("standard", check="gradient")
    handle.agree_by(agree)
    before = values(model, made)
    handle.train_step(model(inputs(0)))
    assert equal(before, values(model, made))
    assert (handle.skipped_steps, handle.skipped_tensors) == (0, 4)
