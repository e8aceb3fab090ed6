"""``expert_state_device="cpu"``: optimizer states of experts live in host memory and visit the device."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import lightning as L
import pytest
import torch
from distributed_cases import thorough
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from test_in_backward import Toy, equal, inputs, toy, values

from lightning_sonar import (
    FusedAdamW,
    MemoryProfiler,
    SonarMoEStrategy,
    find_expert_tensors,
    plan_memory,
    release_in_backward,
)
from lightning_sonar.host import is_host

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.filterwarnings("ignore:Gradients are accumulated")]

OPTIMIZERS = {
    "FusedAdamW": FusedAdamW,
    "FusedAdamW stochastic": partial(FusedAdamW, stochastic_rounding=True, seed=3),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "Adamax": torch.optim.Adamax,
    "SGD momentum": partial(torch.optim.SGD, momentum=0.9),
    "SGD": torch.optim.SGD,
}


def on_host(optimizer, tensor) -> list[str]:
    return [
        key
        for key, value in optimizer.state[tensor].items()
        if isinstance(value, torch.Tensor) and is_host(value.untyped_storage())
    ]


def train(device: str | None, *, mode="sonar", steps=3, dtype=torch.float32, micro=1, optimizer=FusedAdamW, **options):
    model = Toy().to(dtype)
    made = optimizer(model.parameters(), lr=1e-2)
    handle = release_in_backward(made, find_expert_tensors(model), mode=mode, expert_state_device=device, **options)
    for step in range(steps):
        for index in range(micro):
            handle.train_step(model(inputs(10 * step + index).to(dtype)), max_norm=0.5, last=index == micro - 1)
    return values(model, made)


# Equality.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_streamed_states_give_the_same_bits(optimizer, dtype):
    assert equal(*(train(device, optimizer=OPTIMIZERS[optimizer], dtype=dtype) for device in (None, "cpu")))


@pytest.mark.parametrize("accumulation", ["exact", "host", "per_microbatch"])
@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "sonar_exact_clip"])
def test_streamed_states_give_the_same_bits_in_every_mode_and_accumulation(mode, accumulation):
    if (mode, accumulation) == ("sonar_exact_clip", "per_microbatch"):
        pytest.skip("refused: there is no global norm")
    options = {"mode": mode, "accumulation": accumulation, "micro": 2}
    assert equal(*(train(device, **options) for device in (None, "cpu")))


@pytest.mark.parametrize("expert_clip", ["lagged", "per_tensor", "per_expert"])
def test_streamed_states_give_the_same_bits_under_an_expert_clip(expert_clip):
    assert equal(*(train(device, expert_clip=expert_clip) for device in (None, "cpu")))


def test_in_backward_all_streams_the_experts_states_only():
    model, made, handle = toy("in_backward_all", expert_state_device="cpu")
    handle.train_step(model(inputs()))
    assert on_host(made, model.first) == ["exp_avg", "exp_avg_sq"]
    assert on_host(made, model.dense.weight) == []


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("family", ["olmoe", "granite"])
def test_streamed_states_give_the_same_bits_under_the_trainer(family, automatic):
    results = []
    for device in (None, "cpu"):
        trainer, module = fit(
            small_model(family, torch.bfloat16),
            "sonar",
            automatic=automatic,
            steps=3,
            strategy_options={"expert_state_device": device},
        )
        results.append(snapshot(trainer, module))
    assert differing(*results) == []


def test_a_skipped_step_and_a_tensor_that_is_not_used_change_nothing():
    results = []
    for device in (None, "cpu"):
        model, made, handle = toy(expert_state_device=device)
        for step in range(4):
            loss = model(inputs(step))
            if step == 1:
                loss = loss * float("nan")
            if step == 2:
                loss = model.all_experts(model.dense(inputs(step)), model.first).square().mean()
            handle.train_step(loss, max_norm=0.5)
        results.append(values(model, made))
    assert equal(*results)


# Where states are.


def test_states_are_on_the_host_between_steps_under_their_own_keys():
    model, made, handle = toy(expert_state_device="cpu")
    assert on_host(made, model.first) == ["exp_avg", "exp_avg_sq"], "from the start"
    before = made.state[model.first]["exp_avg"]
    handle.train_step(model(inputs()))
    assert made.state[model.first]["exp_avg"] is before
    assert on_host(made, model.first) == ["exp_avg", "exp_avg_sq"]
    assert list(made.state[model.first]) == ["step", "exp_avg", "exp_avg_sq"]
    assert on_host(made, model.dense.weight) == []


def test_at_most_two_tensors_states_are_on_the_device_and_none_between_steps():
    model, made, handle = toy(expert_state_device="cpu")
    refs: list[weakref.ref] = []
    most: list[int] = []

    def watch(copies):
        refs.extend(weakref.ref(copy.untyped_storage()) for copy in copies)
        most.append(sum(ref() is not None for ref in refs))

    handle.host_states.watchers.append(watch)
    for step in range(3):
        handle.train_step(model(inputs(step)))
        assert sum(ref() is not None for ref in refs) == 0
    # Two moments a tensor. In the first step nobody knows what comes next.
    assert most == [2, 2, 2, 4, 2, 4]
    assert made.state[model.first]["step"] == 3
    # What was fetched ahead in vain is gone when the step is, too.
    handle.train_step(model.all_experts(model.dense(inputs(3)), model.second).square().mean())
    assert most[6:] == [2, 4]
    assert sum(ref() is not None for ref in refs) == 0


def test_another_order_than_the_last_backwards_is_fetched_right():
    results = []
    for device in (None, "cpu"):
        model, made, handle = toy(expert_state_device=device)
        for step in range(4):
            first, second = (model.first, model.second) if step % 2 else (model.second, model.first)
            x = model.all_experts(model.dense(inputs(step)), first).tanh()
            handle.train_step(model.all_experts(x, second).square().mean())
        results.append(values(model, made))
    assert equal(*results)


def test_states_that_were_fetched_for_another_tensor_are_not_used():
    results = []
    for device in (None, "cpu"):
        model = Toy()
        model.third = torch.nn.Parameter(torch.randn(4, 8, 8) / 3)
        made = FusedAdamW(model.parameters(), lr=1e-2)
        handle = release_in_backward(made, find_expert_tensors(model), expert_state_device=device)
        # Backward meets the last one first: after it comes another one than in the step before.
        for step, order in enumerate(("first second third", "first second third", "second first third")):
            x = model.dense(inputs(step))
            for name in order.split():
                x = model.all_experts(x, getattr(model, name)).tanh()
            handle.train_step(x.square().mean())
        results.append(values(model, made))
    assert equal(*results)


def test_a_step_that_breaks_off_in_an_update_leaves_states_on_the_host(monkeypatch):
    model, made, handle = toy(expert_state_device="cpu")
    handle.train_step(model(inputs()))
    monkeypatch.setattr("lightning_sonar.hooks.step_tensor", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        handle.train_step(model(inputs(1)))
    monkeypatch.undo()
    handle.abandon_step()
    assert on_host(made, model.first) == on_host(made, model.second) == ["exp_avg", "exp_avg_sq"]
    handle.train_step(model(inputs(2)))


def test_removal_leaves_states_and_lets_go_of_model_and_optimizer():
    model, made, handle = toy(expert_state_device="cpu")
    handle.train_step(model(inputs()))
    handle.remove()
    assert made.state[model.first]["exp_avg"].abs().sum() > 0
    model(inputs(1)).backward()
    made.step()
    refs = [weakref.ref(model.first), weakref.ref(made)]
    del model, made, handle
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_hooks_keep_neither_the_parameters_nor_the_optimizer_alive():
    model, made, handle = toy(expert_state_device="cpu")
    handle.train_step(model(inputs()))
    refs = [weakref.ref(model.first), weakref.ref(made)]
    del model, made, handle
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# Checkpoints.


@pytest.mark.parametrize("there", [None, "cpu"])
@pytest.mark.parametrize("here", [None, "cpu"])
def test_a_state_dict_loads_into_either_place_and_training_goes_on_in_the_same_bits(here, there):
    model, made, handle = toy(expert_state_device=here)
    handle.train_step(model(inputs()), max_norm=0.5)
    saved = copy.deepcopy((model.state_dict(), made.state_dict()))
    handle.train_step(model(inputs(1)), max_norm=0.5)
    other, loaded, resumed = toy(expert_state_device=there)
    other.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    assert bool(on_host(loaded, other.first)) == (there == "cpu")
    assert list(loaded.state[other.first]) == list(made.state[model.first])
    resumed.train_step(other(inputs(1)), max_norm=0.5)
    assert equal(values(model, made), values(other, loaded))


def test_loading_uses_the_host_memory_there_is():
    model, made, handle = toy(expert_state_device="cpu")
    handle.train_step(model(inputs()))
    saved = copy.deepcopy(made.state_dict())
    before = made.state[model.first]["exp_avg"].data_ptr()
    handle.train_step(model(inputs(1)))
    made.load_state_dict(saved)
    assert made.state[model.first]["exp_avg"].data_ptr() == before
    assert equal(list(made.state_dict()["state"][2].values()), list(saved["state"][2].values()))


@pytest.mark.parametrize(("first", "second"), [("cpu", None), (None, "cpu"), ("cpu", "cpu")])
def test_a_lightning_checkpoint_resumes_in_the_same_bits_wherever_states_are(tmp_path, first, second):
    def run(device, steps, ckpt_path=None):
        module = AutomaticLM(small_model(), fused())
        seen = []

        class Look(L.Callback):
            def on_train_start(self, trainer, pl_module):
                tensors = trainer.strategy.in_backward.experts.values()
                seen.extend(bool(on_host(trainer.optimizers[0], tensor)) for tensor in tensors)

        trainer = make_trainer(SonarMoEStrategy(expert_state_device=device), steps, max_epochs=-1, callbacks=[Look()])
        trainer.fit(module, loader(batches(4)), ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
        assert set(seen) == {device == "cpu"}
        return trainer, module

    path = tmp_path / "half.ckpt"
    run(first, 2)[0].save_checkpoint(path)
    results = [snapshot(*run(None, 4, path)), snapshot(*run(second, 4, path))]
    assert differing(*results) == []


@pytest.mark.slow
def test_states_of_resumed_ranks_are_in_host_memory_whole_or_sharded():
    for rank in thorough():
        assert rank["host_where"] == {"ddp": [[True, True]] * 4, "fsdp": [[True, True]] * 4}


# Memory.


def test_the_profiler_counts_host_states_apart_from_the_devices():
    reports = {}
    for device in (None, "cpu"):
        profiler = MemoryProfiler(warmup=1, steps=1, figure=False)
        model = small_model(dtype=torch.bfloat16, num_layers=4)
        fit(model, "sonar", steps=3, callbacks=[profiler], strategy_options={"expert_state_device": device})
        reports[device] = profiler.report
    sizes = [tensor.nbytes for tensor in find_expert_tensors(model).values()]
    plain, away = reports[None], reports["cpu"]
    assert plain.host_bytes == 0
    assert away.host_bytes == 2 * sum(sizes)
    # Two neighbours' states visit at once.
    visiting = 2 * (sizes[0] + sizes[1])
    assert plain.peak_bytes - away.peak_bytes >= 2 * sum(sizes) - visiting
    assert plain.split["optimizer_state"] - away.split["optimizer_state"] >= 2 * sum(sizes) - visiting
    assert away.peak_expert_gradients == 1


def test_the_plan_is_what_a_run_takes():
    options = {"expert_state_device": "cpu", "accumulation": "host"}
    profiler = MemoryProfiler(warmup=1, steps=1, figure=False)
    fit(
        small_model(dtype=torch.bfloat16),
        "sonar",
        steps=3,
        automatic=True,
        data=batches(6),
        accumulate_grad_batches=2,
        callbacks=[profiler],
        strategy_options=options,
    )

    def module():
        return AutomaticLM(small_model(dtype=torch.bfloat16), fused())

    plan = plan_memory(
        module,
        batch=batches(1)[0],
        strategy=partial(SonarMoEStrategy, **options),
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        rounding=1,
    )
    assert plan.host_bytes == profiler.report.host_bytes > 0
    assert plan.peak_bytes == pytest.approx(profiler.report.peak_bytes, rel=0.01)
    assert (plan.accumulation, plan.expert_state_device) == ("host", "cpu")


def test_the_planned_peak_of_olmoe_is_its_standard_one_less_gradients_and_states():
    peaks = {
        device: plan_memory("olmoe", num_layers=2, strategy=partial(SonarMoEStrategy, expert_state_device=device))
        for device in (None, "cpu")
    }
    experts = 2 * peaks[None].params_expert
    # Of two layers' experts all but one layer's states are away at the peak.
    assert peaks["cpu"].host_bytes == 2 * experts
    assert peaks[None].peak_bytes - peaks["cpu"].peak_bytes >= 0.95 * experts


# What makes no sense.


@pytest.mark.parametrize("mode", ["standard", "standard_no_expert_clip"])
def test_a_mode_that_steps_nothing_in_backward_is_refused(mode):
    with pytest.raises(ValueError, match=r"expert_state_device='cpu' with mode .*mode='sonar'"):
        toy(mode, expert_state_device="cpu")
    with pytest.raises(ValueError, match="expert_state_device"):
        SonarMoEStrategy(mode=mode, expert_state_device="cpu")


def test_another_place_is_refused():
    with pytest.raises(ValueError, match=r"expert_state_device='disk': expected 'cpu'"):
        SonarMoEStrategy(expert_state_device="disk")  # type: ignore[arg-type]


def test_an_optimizer_that_is_not_element_wise_is_refused_by_name():
    with pytest.raises(ValueError, match="Adafactor is not known to be one"):
        toy(optimizer=torch.optim.Adafactor, expert_state_device="cpu")


def test_an_optimizer_made_of_several_is_refused_by_name():
    class Pair(torch.optim.SGD):
        element_wise = True

        def __init__(self, params, lr):
            params = list(params)
            super().__init__(params, lr)
            self.first = torch.optim.SGD(params, lr)

    with pytest.raises(ValueError, match="Pair is made of several optimizers"):
        toy(optimizer=Pair, expert_state_device="cpu")


def test_a_state_that_is_more_than_its_elements_is_refused_by_name():
    class Quantized(torch.Tensor):
        pass

    class Odd(torch.optim.SGD):
        element_wise = True

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p]["codes"] = torch.zeros_like(p).as_subclass(Quantized)

    model, _made, handle = toy(optimizer=Odd, expert_state_device="cpu")
    with pytest.raises(TypeError, match="Odd keeps codes as a Quantized"):
        handle.train_step(model(inputs()))


def test_frozen_experts_have_no_states_to_stream():
    model = small_model()
    experts = find_expert_tensors(model)
    frozen = next(iter(experts.values()))
    frozen.requires_grad_(False)
    made = FusedAdamW(model.parameters(), lr=1e-2)
    release_in_backward(made, experts, expert_state_device="cpu")
    assert frozen not in made.state
