"""Settings and batches at the edge of what there is: no learning rate, no memory in moments, no tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from idle_experts import idle_rows, train_with_idle_experts
from number_faults import DTYPES, INF, NAN, OPTIMIZERS, Faulty, modes, same
from test_in_backward import inputs, toy, values

from lightning_sonar import FusedAdamW, SonarMoEStrategy, find_expert_tensors, release_in_backward
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.modes import MODES
from lightning_sonar.optim import reference

pytestmark = pytest.mark.usefixtures("deterministic")

ROOT = Path(__file__).parent.parent
EACH_MODE = pytest.mark.parametrize("mode", modes(), ids=lambda mode: "-".join(filter(None, mode.values())))


def handle_of(model, made, **mode):
    return release_in_backward(made, find_expert_tensors(model), **mode)


# The learning rate.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@EACH_MODE
def test_a_learning_rate_of_zero_moves_no_weight_and_keeps_the_states_going(mode, dtype):
    for make in OPTIMIZERS.values():
        model = Faulty().to(DTYPES[dtype])
        made = make(model.parameters(), lr=0.0)
        for group in made.param_groups:
            group["weight_decay"] = 0.1
        handle = handle_of(model, made, **mode)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(2):
            handle.train_step(model(inputs(step).to(DTYPES[dtype])), max_norm=0.0 if "all" in mode["mode"] else 0.05)
        assert all(torch.equal(*pair) for pair in zip(start, model.parameters(), strict=True))
        for parameter in model.parameters():
            state = made.state[parameter]
            assert state.get("step", 2) == 2
            assert state.get("exp_avg", state.get("momentum_buffer")).abs().sum() > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_scheduler_that_reaches_zero_freezes_weights_and_not_states(mode):
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(snapshot(trainer, module))

    model = small_model(num_layers=1)
    names = {name for name, _ in LanguageModel(model, fused()).named_parameters()}
    fit(
        model,
        mode,
        optimizer=fused(weight_decay=0.1),
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: float(step < 2)),
        steps=4,
        callbacks=[Watch()],
    )
    assert len(names & set(differing(seen[0], seen[1]))) == len(names)
    moved = set(differing(seen[1], seen[3]))
    assert moved == {f"{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}


# Settings of AdamW.

SETTINGS = {
    "betas of zero": {"betas": (0.0, 0.0)},
    "no first moment": {"betas": (0.0, 0.99)},
    "no second moment": {"betas": (0.9, 0.0)},
    "no eps": {"eps": 0.0},
    "decay to zero": {"weight_decay": 100.0},
    "no decay": {"weight_decay": 0.0},
    "all of it": {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 100.0},
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_at_their_edge_give_what_torchs_adamw_gives_bit_for_bit(settings, dtype):
    found = []
    for make, mode in ((torch.optim.AdamW, "standard"), (FusedAdamW, "standard"), (FusedAdamW, "sonar_per_expert")):
        model = Faulty().to(DTYPES[dtype])
        options = {"fused": True} if make is torch.optim.AdamW else {}
        made = make(model.parameters(), lr=0.01, **SETTINGS[settings], **options)
        handle = handle_of(model, made, mode=mode)
        for step in range(3):
            handle.train_step(model(inputs(step).to(DTYPES[dtype])))
        found.append(values(model, made))
    assert all(value.isfinite().all() for value in found[0])
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_reference_stays_with_torch_at_the_edge_of_settings(settings, dtype):
    """The kernel equals the reference bit for bit (test_kernels.py)."""
    generator = torch.Generator().manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(64, 32, generator=generator).to(dtype))
    made = torch.optim.AdamW([theirs], lr=0.01, fused=True, **SETTINGS[settings])
    p, m, v, step = theirs.detach().clone(), torch.zeros_like(theirs), torch.zeros_like(theirs), torch.zeros(())
    group = made.param_groups[0]
    for _ in range(3):
        theirs.grad = torch.randn(64, 32, generator=generator).to(dtype)
        grad = theirs.grad.clone()
        made.step()
        reference.adamw_reference_(
            *(p, grad, m.detach(), v.detach(), step),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(p, theirs.detach(), **tolerance)


def test_without_eps_a_gradient_of_zero_is_torchs_nan_and_not_ours_alone():
    found = []
    for make in (FusedAdamW, lambda p, **o: torch.optim.AdamW(p, fused=True, **o), torch.optim.AdamW):
        p = torch.nn.Parameter(torch.ones(32))
        p.grad = torch.arange(32.0)
        make([p], lr=0.01, eps=0.0).step()
        found.append(p.detach().isnan().nonzero().flatten().tolist())
    assert found == [[0]] * 3


# Overflow.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loss_beyond_its_dtype_is_a_bad_loss(dtype):
    model = Faulty().to(DTYPES[dtype])
    made = FusedAdamW(model.parameters())
    handle = handle_of(model, made)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    handle.train_step(model(inputs().to(DTYPES[dtype])) * 3e38 * 1e3)
    assert handle.skipped_steps == 1
    assert same(start, [parameter.detach() for parameter in model.parameters()])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "sonar_exact_clip", "in_backward_all"])
def test_huge_but_finite_gradients_do_what_they_do_in_ordinary_training(mode, dtype):
    """Their squares overflow: AdamW's second moment is infinite from then on, in any mode and in torch's own."""
    ordinary = {"sonar_exact_clip": "standard", "in_backward_all": "standard"}.get(mode, "standard_no_expert_clip")
    found = []
    for name in (ordinary, mode):
        model = Faulty().to(DTYPES[dtype])
        made = FusedAdamW(model.parameters(), lr=0.01)
        handle = handle_of(model, made, mode=name, check="gradient")
        for step in range(3):
            hook = model.first.register_hook(lambda grad, step=step: grad * 1e30 if step == 1 else grad)
            handle.train_step(model(inputs(step).to(DTYPES[dtype])), max_norm=0.0 if "all" in mode else 1.0)
            hook.remove()
        assert (handle.skipped_steps, handle.skipped_tensors) == (0, 0)
        found.append(values(model, made))
    assert same(*found)
    # Clipped by its norm, which is infinite, the gradient is zero.
    assert any(value.isinf().any() for value in found[0]) == (mode != "sonar_exact_clip")


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_overflow_under_a_finite_loss_are_left_out_if_looked_at(mode):
    model, made, handle = toy(mode, check="gradient")
    handle.train_step(model(inputs()))
    model.first.register_hook(lambda grad: grad * 3e38 * 1e6)
    before = [made.state[model.first][key].clone() for key in made.state[model.first]]
    first = model.first.detach().clone()
    handle.train_step(model(inputs(1)), max_norm=0.0 if "all" in mode else 1.0)
    assert handle.skipped_tensors > 0
    assert torch.equal(first, model.first)
    assert same(before, [made.state[model.first][key] for key in made.state[model.first]])


# Batches with next to nothing in them.


class WithTheModelsOwnLoss(AutomaticLM):
    def training_step(self, batch, batch_idx):
        return self.model(**batch, use_cache=False).loss


def without_labels(made):
    return [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in made]


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("kind", ["one token", "two tokens", "no labels"])
def test_next_to_empty_batches_train_as_in_ordinary_training(kind, automatic):
    data = batches(3)
    if kind == "no labels":
        data[1:2] = without_labels(data[1:2])
    else:
        data[1:2] = batches(1, batch_size=1, seq_len=1 if kind == "one token" else 2)
        data[1]["labels"] = data[1]["input_ids"].clone()
    found = {}
    for mode in MODES:
        trainer, module = fit(small_model(num_layers=1), mode, automatic=automatic, data=data, steps=3)
        found[mode] = snapshot(trainer, module)
        assert trainer.strategy.skipped_steps == 0
        assert all(value.isfinite().all() for value in found[mode].values())
    assert differing(found["sonar"], found["standard_no_expert_clip"]) == []
    assert differing(found["sonar_per_expert"], found["standard_no_expert_clip"]) == []
    assert differing(found["sonar_exact_clip"], found["standard"]) == []


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_a_batch_without_labels_has_loss_zero_and_gradients_of_zero(loss):
    module = LanguageModel(small_model(num_layers=1), fused(), loss=loss)
    found = module.loss(without_labels(batches(1))[0])
    found.backward()
    assert found == 0
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert grads
    assert not any(grad.any() for grad in grads)


def test_a_loss_that_is_nan_without_labels_is_left_out_as_if_the_batch_were_not_there():
    data = batches(3)
    found = []
    for each in ([data[0], *without_labels(data[1:2]), data[2]], [data[0], data[2]]):
        module = WithTheModelsOwnLoss(small_model(num_layers=1), fused())
        trainer = make_trainer(SonarMoEStrategy())
        if len(each) == 3:
            with pytest.warns(UserWarning, match="1 training steps updated nothing"):
                trainer.fit(module, loader(each))
        else:
            trainer.fit(module, loader(each))
        found.append(snapshot(trainer, module))
    assert differing(*found) == []


@pytest.mark.parametrize("spoil", ["nan", "inf", "-inf", "huge"])
def test_the_chunked_loss_does_not_hide_a_bad_weight_of_the_head(spoil):
    for loss in ("full", "chunked"):
        model = small_model(num_layers=1)
        with torch.no_grad():
            model.lm_head.weight[5] = {"nan": NAN, "inf": INF, "-inf": -INF, "huge": 3e38}[spoil]
        assert LanguageModel(model, fused(), loss=loss).loss(batches(1)[0]).isnan()


# Experts that no token ever reaches.


@pytest.mark.parametrize("backend", ["eager", "grouped_mm"])
@pytest.mark.parametrize("mode", MODES)
def test_experts_without_tokens_follow_adamw_with_gradients_of_zero(mode, backend):
    for dtype in (torch.float32, torch.bfloat16):
        assert train_with_idle_experts(mode, backend, dtype) == idle_rows(dtype)


@pytest.mark.slow
def test_experts_without_tokens_follow_adamw_under_scattermoe():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "idle_experts.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found) == {"sonar", "sonar_per_expert", "standard"}
    assert all(rows == idle_rows(torch.float32) for rows in found.values())
