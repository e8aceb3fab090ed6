"""``expert_clip="exact"``: standard training bit for bit."""

from __future__ import annotations

import itertools

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from test_in_backward import Toy, equal, inputs, toy, values

from lightning_sonar import FusedAdamW, Mode, SonarMoEStrategy, find_expert_tensors, release_in_backward
from lightning_sonar.clipping import tensor_norm, total_norm

pytestmark = pytest.mark.usefixtures("deterministic")

EXACT = "sonar_exact_clip"
OPTIMIZERS = {
    "FusedAdamW": FusedAdamW,
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "SGD": torch.optim.SGD,
}


class Norms(L.Callback):
    """Keeps the norm that each step was clipped by."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, *_) -> None:
        norm = trainer.strategy.last_norm
        if norm is not None:
            self.seen.append(float(norm))


def bitwise(*, family="olmoe", dtype=torch.float32, backend="grouped_mm", checkpointing=False, clip=0.5, **options):
    """Train in standard mode and with exact clipping; returns the norms that were clipped by."""
    results, norms = [], []
    for mode in ("standard", EXACT):
        watch = Norms()
        model = small_model(family, dtype, backend, checkpointing=checkpointing)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer, module = fit(model, mode, clip=clip, callbacks=[watch], **options)
        moved = [name for name, p in model.named_parameters() if not torch.equal(start[name], p)]
        assert len(moved) == len(start), "a comparison of weights that never moved proves nothing"
        results.append(snapshot(trainer, module))
        norms.append(watch.seen)
    assert differing(*results) == []
    assert norms[0] == norms[1]
    return norms[0]


# exact: bit for bit standard training.

CASES = [
    # The rest of the matrix takes longer than it tells.
    case if case[0] == "olmoe" or case[2:] == ("grouped_mm", False) else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(
        ("olmoe", "granite"), (torch.float32, torch.bfloat16), ("eager", "grouped_mm"), (False, True)
    )
]


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize(("family", "dtype", "backend", "checkpointing"), CASES)
def test_exact_clipping_is_standard_training_bitwise(family, dtype, backend, checkpointing, automatic):
    options = {"family": family, "dtype": dtype, "backend": backend, "checkpointing": checkpointing}
    norms = bitwise(**options, automatic=automatic, steps=3, clip=0.1)
    assert len(norms) == 3
    assert min(norms) > 0.1, "nothing was clipped"


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_exact_clipping_is_standard_training_bitwise_in_mixed_precision(automatic):
    assert max(bitwise(precision="bf16-mixed", automatic=automatic, steps=4)) > 0.5


def test_exact_clipping_is_standard_training_bitwise_where_only_some_steps_need_it():
    norms = bitwise(steps=8, clip=4.0, optimizer=fused(3e-2))
    assert min(norms) < 4.0 < max(norms)


def test_exact_clipping_is_standard_training_bitwise_where_nothing_needs_it():
    assert max(bitwise(steps=4, clip=1e4)) < 1e4


@pytest.mark.filterwarnings("ignore:expert_clip='exact' has nothing to clip to")
@pytest.mark.parametrize("clip", [None, 0.0])
def test_without_a_clip_value_one_pass_is_enough_and_equals_standard(clip):
    passes = []

    class Count(AutomaticLM):
        def backward(self, loss, *args, **kwargs):
            passes.append(sorted(kwargs))
            super().backward(loss, *args, **kwargs)

    results = []
    for mode in ("standard", EXACT):
        module = Count(small_model(), fused())
        trainer = make_trainer(SonarMoEStrategy(mode=mode), 3, clip=clip)
        trainer.fit(module, loader(batches(3)))
        results.append(snapshot(trainer, module))
    assert differing(*results) == []
    assert passes == [[]] * 6


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_under_exact_accumulation_one_pass_a_microbatch_is_standard_training_bitwise(automatic):
    with pytest.warns(UserWarning, match="saves is lost.*Larger microbatches"):
        norms = bitwise(automatic=automatic, steps=3, data=batches(6), accumulate_grad_batches=2)
    assert max(norms) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", [EXACT, Mode("experts", "all", "expert", "exact")], ids=["tensor", "expert"])
def test_a_plain_loop_clips_exactly_with_any_optimizer(mode, optimizer, dtype):
    results = []
    for each in ("standard", mode):
        model = Toy().to(dtype)
        made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2)
        handle = release_in_backward(made, find_expert_tensors(model), mode=each)
        for step in range(4):
            norm = handle.train_step(model(inputs(step).to(dtype)), max_norm=0.05)
            assert norm > 0.05
        results.append(values(model, made))
    assert equal(*results)


def test_tensors_of_two_dtypes_are_clipped_as_torch_does():
    results = []
    for mode in ("standard", EXACT):
        model = Toy()
        model.first.data = model.first.data.bfloat16()
        made = torch.optim.SGD(model.parameters(), lr=1e-2)
        handle = release_in_backward(made, find_expert_tensors(model), mode=mode)
        for step in range(4):
            x = model.dense(inputs(step))
            x = model.all_experts(x.bfloat16(), model.first).tanh().float()
            handle.train_step(model.all_experts(x, model.second).square().mean(), max_norm=0.05)
        results.append(values(model, made))
    assert equal(*results)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["FusedAdamW", "AdamW", "AdamW fused"])
def test_on_a_gpu_exact_clipping_is_standard_training_bitwise(monkeypatch, optimizer, dtype):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results = []
    for mode in ("standard", EXACT):
        # Wide enough that torch's foreach norm takes a tensor in several chunks.
        model = Toy(num_experts=8, width=128).to("cuda", dtype)
        made = OPTIMIZERS[optimizer](model.parameters(), lr=1e-2)
        handle = release_in_backward(made, find_expert_tensors(model), mode=mode)
        for step in range(4):
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
            assert handle.train_step(model(x), max_norm=0.05) > 0.05
        results.append(values(model, made))
    assert equal(*results)


def test_norms_of_tensors_make_the_norm_that_torch_takes():
    for dtypes in ([torch.float32] * 5, [torch.bfloat16] * 5, [torch.float32, torch.bfloat16, torch.float32]):
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(37, 11, generator=generator).to(dtype) for dtype in dtypes]
        expected = torch.nn.utils.get_total_norm(grads)
        assert torch.equal(total_norm([tensor_norm(grad) for grad in grads]), expected)


@pytest.mark.parametrize("frees_dense", [False, True])
def test_dense_gradients_freed_or_kept_between_the_passes_give_the_same_bits(frees_dense):
    results = []
    for mode in ("standard", EXACT):
        model, made, handle = toy(mode)
        if handle._two_pass is not None:
            handle._two_pass.frees_dense = frees_dense
        for step in range(4):
            handle.train_step(model(inputs(step)), max_norm=0.05)
        results.append(values(model, made))
    assert equal(*results)


def test_a_dense_gradient_that_was_there_before_is_kept_and_counted():
    results = []
    for mode in ("standard", EXACT):
        model, made, handle = toy(mode)
        model.dense.bias.grad = torch.ones_like(model.dense.bias)
        handle.train_step(model(inputs()), max_norm=0.05)
        results.append(values(model, made))
    assert equal(*results)


def test_hooks_of_the_module_run_once_and_see_what_they_see_in_sonar():
    seen = []

    class Watch(L.Callback):
        def on_before_backward(self, *_):
            seen.append("before")

        def on_after_backward(self, trainer, module):
            seen.append({name for name, p in module.named_parameters() if p.grad is not None})

    _, module = fit(small_model(), EXACT, automatic=True, steps=2, callbacks=[Watch()])
    dense = {name for name, _ in module.named_parameters() if "experts" not in name}
    assert seen == ["before", dense] * 2


def test_one_expert_gradient_is_alive_at_a_time_in_both_passes():
    model = small_model(num_layers=3)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    experts = find_expert_tensors(model)
    handle = release_in_backward(optimizer, experts, mode=EXACT)
    alive: list[int] = []

    class Count:
        def on_phase(self, phase): ...

        def on_gradient(self, tensor):
            alive.append(sum(t.grad is not None for t in experts.tensors))

    handle.observers.append(Count())
    batch = batches(1)[0]
    handle.train_step(model(input_ids=batch["input_ids"], use_cache=False).logits.square().mean(), max_norm=1e-3)
    assert alive == [1] * 2 * len(experts)
    assert handle.hooks_fired == len(experts)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_updates_nothing(monkeypatch, bad, on_device):
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: on_device)
    results = []
    for mode in ("standard", EXACT):
        model, made, handle = toy(mode)
        handle.train_step(model(inputs(0)), max_norm=0.05)
        before = values(model, made)
        handle.train_step(model(inputs(1)) * bad, max_norm=0.05)
        assert equal(before, values(model, made))
        assert handle.skipped_steps == 1
        handle.train_step(model(inputs(2)), max_norm=0.05)
        results.append(values(model, made))
    assert equal(*results)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("where", ["dense", "expert"])
def test_a_bad_gradient_is_seen_before_anything_is_updated_when_gradients_are_checked(monkeypatch, where, on_device):
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: on_device)
    model, made, handle = toy(EXACT, check="gradient")
    handle.train_step(model(inputs(0)), max_norm=0.05)
    before = values(model, made)
    hook = (model.dense.bias if where == "dense" else model.first).register_hook(lambda grad: grad * float("nan"))
    handle.train_step(model(inputs(1)), max_norm=0.05)
    assert equal(before, values(model, made))
    assert handle.skipped_tensors == 4
    hook.remove()
    handle.train_step(model(inputs(2)), max_norm=0.05)
    assert not equal(before, values(model, made))
    assert handle.skipped_tensors == 4


def test_a_bad_gradient_leaves_out_a_dense_tensor_whose_gradient_is_kept():
    model, made, handle = toy(EXACT, check="gradient")
    handle.train_step(model(inputs(0)), max_norm=0.05)
    before = values(model, made)
    model.dense.weight.register_post_accumulate_grad_hook(lambda tensor: None)  # who might look at it
    model.first.register_hook(lambda grad: grad * float("nan"))
    handle.train_step(model(inputs(1)), max_norm=0.05)
    assert equal(before, values(model, made))


def test_a_bad_gradient_raises_before_anything_is_updated_if_that_is_asked_for():
    model, made, handle = toy(EXACT, check="gradient", on_nonfinite="raise")
    model.first.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(FloatingPointError, match="Nothing was updated in this step"):
        handle.train_step(model(inputs(0)), max_norm=0.05)
    assert not any(made.state.values())


def test_an_exception_between_the_passes_leaves_nothing_updated():
    model, made, handle = toy(EXACT)
    handle.max_norm = 1.0
    loss = model(inputs())

    def run(**options):
        if "inputs" in options:
            raise KeyError("on purpose")
        loss.backward(**options)

    with pytest.raises(KeyError, match="on purpose"):
        handle.backward(loss, run)
    assert not handle.mid_step
    assert not any(made.state.values())
    handle.abandon_step()
    handle.train_step(model(inputs()), max_norm=1.0)
    assert made.state[model.first]["step"] == 1


def test_a_tensor_that_the_second_pass_misses_raises_and_is_named():
    model, _made, handle = toy(EXACT)
    handle.leaf_of = lambda tensor: model.second if tensor is model.first else tensor
    with pytest.raises(RuntimeError, match="reached 2 expert tensors, the second one 1; missing: first.*leaf_of"):
        handle.train_step(model(inputs()), max_norm=0.05)


def test_a_bare_backward_cannot_be_two_passes_and_says_so():
    model, _made, _handle = toy(EXACT)
    with pytest.raises(RuntimeError, match=r"runs backward twice: call handle.backward\(loss\)"):
        model(inputs()).backward()


def test_dense_parameters_left_unclipped_are_reported():
    model, made, handle = toy(EXACT)
    handle.max_norm = 0.05
    handle.backward(model(inputs()))
    with pytest.warns(UserWarning, match="nobody called handle.clip_ after backward"):
        made.step()


def test_a_module_whose_backward_takes_no_options_is_refused_before_training():
    class Own(AutomaticLM):
        def backward(self, loss):
            loss.backward()

    with pytest.raises(ValueError, match="Own.backward takes loss; expert_clip='exact' runs it twice"):
        make_trainer(SonarMoEStrategy(mode=EXACT), 1).fit(Own(small_model(), fused()), loader(batches(1)))


def test_the_norm_that_is_logged_is_the_true_one():
    logged = {}
    for mode in ("standard", EXACT):
        trainer, _ = fit(
            small_model(), mode, automatic=True, steps=1, strategy_options={"log_grad_norm": True}, clip=0.01
        )
        logged[mode] = {name: float(value) for name, value in trainer.logged_metrics.items() if "grad_norm" in name}
        assert logged[mode]["grad_norm/total"] == pytest.approx(float(trainer.strategy.last_norm))
    assert logged["standard"] == pytest.approx(logged[EXACT])
    assert logged["standard"]["grad_norm/experts"] > 0.01


def test_exact_clipping_of_a_model_with_dropout_repeats_the_forward_it_had():
    results = []
    for mode in ("standard", EXACT):
        torch.manual_seed(0)
        model, made, handle = toy(mode)
        drop = torch.nn.Dropout(0.5)
        for step in range(4):
            torch.manual_seed(step)
            handle.train_step(model(drop(inputs(step))), max_norm=0.05)
        results.append(values(model, made))
    assert equal(*results)


@pytest.mark.slow
def test_exact_clipping_is_standard_training_bitwise_with_scattermoe():
    pytest.importorskip("triton")
    from test_scattermoe import run_script

    found = run_script("expert_clip_scattermoe.py", TRITON_INTERPRET="1")
    assert len(found) == 4
    for case in found.values():
        assert case["different"] == 0
        assert case["same_norms"]
        assert case["least_norm"] > 0.1
