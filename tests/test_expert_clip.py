"""Clipping the experts inside backward: policies against their formulas, what is refused, what a run is told."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from omegaconf import OmegaConf
from test_checkpoints import resumable
from test_in_backward import Toy, equal, inputs, toy, values

from lightning_sonar import MODES, FusedAdamW, Mode, SonarMoEStrategy, find_expert_tensors, release_in_backward
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


@pytest.mark.parametrize("optimizer", ["FusedAdamW", "SGD"])
@pytest.mark.parametrize("policy", ["per_tensor", "per_expert", "lagged"])
def test_gradients_below_the_limit_are_left_as_they_are(policy, optimizer):
    make = OPTIMIZERS[optimizer]
    assert equal(trained(policy, 1e3, optimizer=make), trained("none", 1e3, optimizer=make))


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
    assert resolve_mode(MODES[EXACT], "none") == MODES["sonar"]
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
