"""Clipping the experts after all: ``exact`` against standard training bit for bit, the others against formulas."""

from __future__ import annotations

import itertools
import json

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from omegaconf import OmegaConf
from test_checkpoints import resumable
from test_in_backward import Toy, equal, inputs, toy, values

from lightning_sonar import MODES, FusedAdamW, Mode, SonarMoEStrategy, find_expert_tensors, release_in_backward
from lightning_sonar.clipping import tensor_norm, total_norm
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.modes import mode_name, resolve_mode

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


# per_tensor, per_expert.


def reference(policy, max_norm, steps=4, optimizer=FusedAdamW, dtype=torch.float32):
    """Ordinary training with the formula of a policy written out."""
    model = Toy().to(dtype)
    made = optimizer(model.parameters(), lr=1e-2)
    experts = [model.first, model.second]
    last = None
    for step in range(steps):
        model(inputs(step).to(dtype)).backward()
        grads = [p.grad.float() for p in model.parameters()]
        total = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim < 3], max_norm)
        for p in experts:
            if policy == "per_tensor":
                torch.nn.utils.clip_grad_norm_([p], max_norm)
            elif policy == "per_expert":
                for index in range(p.shape[0]):
                    norm = torch.linalg.vector_norm(p.grad[index])
                    p.grad[index] *= torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            elif last is not None:
                p.grad.copy_(p.grad.float() * torch.clamp(max_norm / (last + 1e-6), max=1.0))
        last = total
        made.step()
        made.zero_grad()
    return values(model, made)


def trained(policy, max_norm, steps=4, optimizer=FusedAdamW, dtype=torch.float32, mode="sonar"):
    model = Toy().to(dtype)
    made = optimizer(model.parameters(), lr=1e-2)
    handle = release_in_backward(made, find_expert_tensors(model), mode=mode, expert_clip=policy)
    for step in range(steps):
        handle.train_step(model(inputs(step).to(dtype)), max_norm=max_norm)
    return values(model, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert"])
def test_per_tensor_clips_each_tensor_as_torch_clips_it_alone(mode, optimizer, dtype):
    make = OPTIMIZERS[optimizer]
    found = trained("per_tensor", 0.05, optimizer=make, dtype=dtype, mode=mode)
    assert equal(found, reference("per_tensor", 0.05, optimizer=make, dtype=dtype))
    assert not equal(found, trained("none", 0.05, optimizer=make, dtype=dtype))


@pytest.mark.parametrize("optimizer", ["FusedAdamW", "SGD"])
@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert"])
def test_per_expert_clips_each_slice_by_its_own_norm(mode, optimizer):
    make = OPTIMIZERS[optimizer]
    found = trained("per_expert", 0.02, optimizer=make, mode=mode)
    for left, right in zip(found, reference("per_expert", 0.02, optimizer=make), strict=True):
        torch.testing.assert_close(left, right, rtol=2e-6, atol=2e-7)
    assert not equal(found, trained("per_tensor", 0.02, optimizer=make))


def test_per_expert_norms_are_at_most_the_limit_after_the_clip():
    model, _made, handle = toy(expert_clip="per_expert", optimizer=torch.optim.SGD)
    start = model.first.detach().clone()
    handle.train_step(model(inputs()), max_norm=0.02)
    moved = torch.linalg.vector_norm(model.first.detach() - start, dim=(1, 2)) / 1e-2
    torch.testing.assert_close(moved, torch.full((4,), 0.02), rtol=1e-3, atol=0)


# lagged.


@pytest.mark.parametrize("optimizer", ["FusedAdamW", "AdamW", "SGD"])
@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lagged_clips_experts_by_the_global_norm_of_the_step_before(dtype, mode, optimizer):
    make = OPTIMIZERS[optimizer]
    found = trained("lagged", 0.05, optimizer=make, dtype=dtype, mode=mode)
    rtol, atol = (2e-5, 1e-6) if dtype == torch.float32 else (1e-2, 1e-5)
    for left, right in zip(found, reference("lagged", 0.05, optimizer=make, dtype=dtype), strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=atol)
    assert not equal(found, trained("none", 0.05, optimizer=make, dtype=dtype))


def test_lagged_does_not_clip_experts_in_the_first_step():
    assert equal(trained("lagged", 0.05, steps=1), trained("none", 0.05, steps=1))


@pytest.mark.parametrize("on_device", [False, True])
def test_lagged_keeps_its_norm_over_a_step_that_is_skipped(monkeypatch, on_device):
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: on_device)
    model, _made, handle = toy(expert_clip="lagged")
    handle.train_step(model(inputs(0)), max_norm=0.05)
    before = handle.state_dict()
    handle.train_step(model(inputs(1)) * float("inf"), max_norm=0.05)
    assert handle.state_dict() == before
    assert before["global_norm"] > 0.05
    handle.train_step(model(inputs(2)), max_norm=0.05)
    assert handle.state_dict() != before


def test_lagged_norm_equals_the_norms_gathered_in_the_hooks():
    model, _made, handle = toy(expert_clip="lagged", measure_norms=True)
    for step in range(3):
        handle.train_step(model(inputs(step)), max_norm=0.05)
        assert handle.state_dict()["global_norm"] == pytest.approx(float(handle.grad_norms()["total"]), rel=1e-6)


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_a_resumed_lagged_run_goes_on_bitwise(tmp_path, automatic):
    path = tmp_path / "half.ckpt"
    norms = []

    class Save(L.Callback):
        def on_train_start(self, trainer, module):
            norms.append(trainer.strategy.in_backward.state_dict())

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3 and not path.exists():
                trainer.save_checkpoint(path)

    def run(seed, ckpt=None):
        module = (AutomaticLM if automatic else LanguageModel)(small_model(seed=seed), fused())
        trainer = make_trainer(SonarMoEStrategy(expert_clip="lagged"), 6, clip=0.05, callbacks=[Save()], max_epochs=-1)
        trainer.fit(module, resumable(), ckpt_path=ckpt, weights_only=True if ckpt else None)
        return snapshot(trainer, module)

    whole = run(seed=0)
    assert differing(whole, run(seed=9, ckpt=path)) == []
    saved = torch.load(path, weights_only=True)["lightning_sonar"]
    assert saved["global_norm"] > 0.05
    assert norms == [{}, saved]


def test_checkpoints_of_other_modes_hold_nothing_more(tmp_path):
    for mode in ("sonar", EXACT):
        trainer, _ = fit(small_model(), mode, steps=1)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        assert "lightning_sonar" not in torch.load(tmp_path / "one.ckpt", weights_only=True)


# What is asked for, and what makes no sense.


def test_the_argument_overrides_the_modes_own():
    assert resolve_mode("sonar", "exact") == MODES[EXACT]
    assert resolve_mode(EXACT, "none") == MODES["sonar"]
    assert SonarMoEStrategy(expert_clip="exact").mode == MODES[EXACT]
    assert SonarMoEStrategy(mode=EXACT).mode == MODES[EXACT]
    lagged = SonarMoEStrategy(expert_clip="lagged").mode
    assert (lagged.clip, lagged.expert_clip) == ("dense", "lagged")
    assert mode_name(lagged) == "sonar, expert_clip=lagged"


@pytest.mark.parametrize("policy", ["exact", "lagged", "per_tensor", "per_expert"])
@pytest.mark.parametrize("mode", ["standard", "standard_no_expert_clip", "in_backward_all"])
def test_modes_whose_experts_do_not_step_alone_inside_backward_are_refused(mode, policy):
    with pytest.raises(ValueError, match=rf"expert_clip='{policy}'\): .*Leave expert_clip='none'"):
        SonarMoEStrategy(mode=mode, expert_clip=policy)


def test_exact_clipping_measures_everything():
    with pytest.raises(ValueError, match="Set clip='all'"):
        Mode(expert_clip="exact")


@pytest.mark.parametrize("policy", ["exact", "lagged"])
def test_a_norm_of_the_whole_step_is_refused_where_each_microbatch_steps(policy):
    with pytest.raises(ValueError, match="there is no global norm of the whole step.*per_tensor"):
        SonarMoEStrategy(expert_clip=policy, accumulation="per_microbatch")
    with pytest.raises(ValueError, match="there is no global norm of the whole step"):
        toy(expert_clip=policy, accumulation="per_microbatch")


def test_per_microbatch_clips_each_microbatch_by_its_own_norm():
    model, made, handle = toy(expert_clip="per_tensor", accumulation="per_microbatch", optimizer=torch.optim.SGD)
    handle.max_norm = 0.02
    for last in (False, True):
        start = model.second.detach().clone()
        handle.backward(model(inputs()), last=last)
        assert torch.linalg.vector_norm(model.second.detach() - start) / 1e-2 == pytest.approx(0.02, rel=1e-3)
    assert made.param_groups


@pytest.mark.parametrize("policy", ["exact", "lagged", "per_tensor", "per_expert"])
def test_clipping_by_value_and_by_norm_at_once_is_refused(policy):
    model, _made, handle = toy(expert_clip=policy)
    with pytest.raises(ValueError, match="clipping by value is element-wise.*expert_clip='none'"):
        handle.train_step(model(inputs()), max_norm=0.1, algorithm="value")
    trainer = make_trainer(SonarMoEStrategy(expert_clip=policy), 1, gradient_clip_algorithm="value")
    with pytest.raises(ValueError, match="clipping by value is element-wise"):
        trainer.fit(AutomaticLM(small_model(), fused()), loader(batches(1)))


@pytest.mark.parametrize("policy", ["exact", "lagged", "per_tensor", "per_expert"])
def test_the_limit_has_to_be_said_before_backward(policy):
    model, _made, handle = toy(expert_clip=policy)
    with pytest.raises(RuntimeError, match="has to know the largest norm before: .*handle.max_norm"):
        handle.backward(model(inputs()))
    model, _made, handle = toy(expert_clip=policy)
    handle.max_norm = 0.1
    handle.backward(model(inputs()))
    with pytest.raises(RuntimeError, match="by norm 0.2 was asked for after backward, but 2 tensors .* the norm 0.1"):
        handle.clip_(0.2)


def test_slices_are_refused_where_there_are_none():
    vector = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"per_expert' clips each expert's slice of a tensor \[E, ...\]"):
        release_in_backward(torch.optim.SGD([vector], lr=0.1), [vector], expert_clip="per_expert")


def test_without_a_limit_every_policy_is_sonar():
    for policy in ("exact", "lagged", "per_tensor", "per_expert"):
        assert equal(trained(policy, 0.0), trained("none", 0.0))


def test_settings_refuse_what_makes_no_sense_and_take_the_rest():
    from test_configs import composed

    from experiments.settings import SettingsError, check_values

    for policy in ("exact", "lagged", "per_tensor", "per_expert"):
        check_values(composed("mode=sonar", f"mode.expert_clip={policy}"))
        with pytest.raises(SettingsError, match="Leave expert_clip='none'"):
            check_values(composed("mode=standard", f"mode.expert_clip={policy}"))
    with pytest.raises(SettingsError, match="no global norm of the whole step"):
        check_values(composed(f"mode={EXACT}", "mode.accumulation=per_microbatch"))
    with pytest.raises(SettingsError, match="clipping by value is element-wise"):
        check_values(composed(f"mode={EXACT}", "trainer.gradient_clip_algorithm=value"))
    assert json.dumps(OmegaConf.to_container(composed(f"mode={EXACT}").mode))


def test_a_run_out_of_memory_is_not_sent_to_exact_clipping_where_it_saves_nothing():
    from test_out_of_memory import NEEDS

    from lightning_sonar.memory.out_of_memory import options

    def advice(**more):
        found = options(NEEDS, capacity=1000, mode=MODES["standard"], **more)
        return {option.change: option.note for option in found if EXACT in option.change}

    assert "a second backward pass" in advice()[f"mode={EXACT!r}"]
    assert advice(accumulating=True) == {}


# Slow.


@pytest.mark.slow
def test_the_planted_batch_leaves_its_files_and_exact_is_standard(tmp_path):
    from experiments.planted_batch import POLICIES, main

    small = ["--steps", "6", "--planted-at", "3", "--hidden", "64", "--layers", "1", "--heldout", "8"]
    main([*small, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "planted_batch.json").read_text())["results"]
    losses = {result["policy"]: result["heldout"] for result in found}
    assert list(losses) == [policy.label for policy in POLICIES]
    assert losses["exact"] == losses["standard"]
    assert len({str(value) for value in losses.values()}) == len(POLICIES) - 1
    assert (tmp_path / "planted_batch.md").read_text().count("\n") == len(POLICIES) + 2
    assert (tmp_path / "planted_batch.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["exact", "lagged", "per_tensor", "per_expert", "none"])
def test_every_policy_trains_with_every_backend(policy, dtype, checkpointing):
    for backend in ("eager", "grouped_mm", "batched_mm"):
        results = []
        for _ in range(2):
            model = small_model(dtype=dtype, backend=backend, checkpointing=checkpointing)
            results.append(snapshot(*fit(model, "sonar", steps=6, strategy_options={"expert_clip": policy})))
        assert differing(*results) == []


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
