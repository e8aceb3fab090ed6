"""Low-bit optimizers in checkpoints, and what is said of large updates."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, make_trainer, small_model, snapshot
from low_bit_cases import (  # noqa: F401
    BOTH,
    TORCHAO,
    all_torchao,
    bnb,
    bnb_experts,
    eager,
    needs_bitsandbytes,
    tensors,
    train,
    values,
)

from lightning_sonar import FusedAdamW, SonarMoEStrategy
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.optim import (
    ExpertsAndDense,
    ao_adamw4bit,
    ao_adamw8bit,
    ao_adamw_fp8,
    bnb_adamw8bit,
    largest_update,
    make_states,
)

pytestmark = pytest.mark.usefixtures("deterministic")

# -- checkpoints ---------------------------------------------------------------------------------------------------


def run(optimizer, steps, ckpt=None, mode="sonar", dtype=torch.bfloat16):
    data = batches(6)
    module = AutomaticLM(small_model(seed=0 if ckpt is None else 5, dtype=dtype), optimizer)
    trainer = make_trainer(SonarMoEStrategy(mode=mode), steps, "bf16-true", max_epochs=-1)
    given = ResumableLoader(data, ShuffledBatches(len(data), 1, seed=0), collate_fn=lambda examples: examples[0])
    trainer.fit(module, given, ckpt_path=ckpt, weights_only=True if ckpt else None)
    return trainer, module


@BOTH
@pytest.mark.usefixtures("needs_bitsandbytes")
def test_bitsandbytes_resumes_bitwise_and_its_codes_stay_codes(optimizer, tmp_path):
    path = str(tmp_path / "half.ckpt")
    run(optimizer, 3)[0].save_checkpoint(path)
    resumed = snapshot(*run(optimizer, 6, path, mode="standard_no_expert_clip"))
    assert differing(snapshot(*run(optimizer, 6)), resumed) == []
    kinds = {
        value.dtype for name, value in resumed.items() if "experts" in name and name.endswith(("state1", "state2"))
    }
    assert kinds == {torch.uint8}
    assert {value.dtype for name, value in resumed.items() if ".absmax" in name} == {torch.float32}


@all_torchao
@pytest.mark.usefixtures("eager")
def test_torchao_resumes_bitwise_through_lightning(make, tmp_path):
    path = str(tmp_path / "half.ckpt")
    optimizer = functools.partial(make, lr=1e-2)
    run(optimizer, 3)[0].save_checkpoint(path)
    straight, resumed = (run(optimizer, 6, ckpt) for ckpt in (None, path))
    held = [values(trainer.optimizers[0], list(module.parameters())) for trainer, module in (straight, resumed)]
    assert differing(*held) == []


@pytest.mark.usefixtures("eager")
def test_torchao_takes_the_moments_of_plain_adamw_and_of_torchao():
    parameters = tensors()
    plain = torch.optim.AdamW(parameters, lr=1e-2)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    optimizer = ao_adamw8bit(parameters)
    optimizer.load_state_dict(plain.state_dict())
    moment = optimizer.state[parameters[0]]["exp_avg"]
    torch.testing.assert_close(moment.dequantize(), plain.state[parameters[0]]["exp_avg"].float(), rtol=0.02, atol=0)
    optimizer.step()  # the saved learning rate is a number, and torchao wants a tensor
    again = ao_adamw8bit(parameters)
    again.load_state_dict(torch.optim.Optimizer.state_dict(optimizer))
    assert differing(values(optimizer, parameters), values(again, parameters)) == []


@pytest.mark.usefixtures("eager")
def test_another_block_size_is_named_when_loaded():
    parameters = tensors()
    saved = ao_adamw8bit(parameters, block_size=128)
    make_states(saved)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has codes and scales of shapes .*\[128\]"):
        ao_adamw8bit(parameters).load_state_dict(saved.state_dict())


def stepped(make, parameters):
    """An optimizer after one step on gradients of very different sizes."""
    optimizer = make(parameters, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype).pow_(3)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("plain", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.usefixtures("needs_bitsandbytes")
def test_bitsandbytes_takes_the_moments_of_plain_adamw(plain):
    parameters = tensors()
    saved = stepped(plain, parameters).state_dict()
    optimizer = bnb_adamw8bit(parameters)
    optimizer.load_state_dict(saved)
    state = optimizer.state[parameters[0]]
    assert state["step"] == 1
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for index, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        wanted = saved["state"][0][name].float().view(-1, 256)
        table, largest = state[f"qmap{index}"], state[f"absmax{index}"][:, None]
        assert torch.equal(state[f"absmax{index}"], wanted.abs().amax(dim=1))
        # No code is nearer.
        error = (table[state[f"state{index}"].view(-1, 256).int()] * largest - wanted).abs()
        least = (table[:, None, None] * largest - wanted).abs().amin(dim=0)
        torch.testing.assert_close(error, least, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    small = optimizer.state[parameters[2]]
    assert torch.equal(small["state1"], saved["state"][2]["exp_avg"].float())
    optimizer.step()


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_loaded_moments_are_no_further_off_than_those_of_bitsandbytes_own_step():
    parameter = torch.nn.Parameter(torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(0)))
    library = stepped(bnb_adamw8bit, [parameter])
    saved = stepped(torch.optim.AdamW, [parameter]).state_dict()
    loaded = bnb_adamw8bit([parameter])
    loaded.load_state_dict(saved)

    def off(optimizer, index, name):
        state = optimizer.state[parameter]
        table, largest = state[f"qmap{index}"], state[f"absmax{index}"][:, None]
        return (
            table[state[f"state{index}"].view(-1, 256).int()] * largest - saved["state"][0][name].view(-1, 256)
        ).abs()

    for index, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        maxima = [each.state[parameter][f"absmax{index}"] for each in (loaded, library)]
        torch.testing.assert_close(*maxima)
        ours, its = off(loaded, index, name), off(library, index, name)
        assert 0 < ours.mean() <= its.mean() < 0.02 * maxima[0].mean()
    # Divided by nothing, a first moment would blow up the weights.
    assert bool((loaded.state[parameter]["state2"] > 0)[saved["state"][0]["exp_avg_sq"] > 0].all())


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_a_block_that_is_not_full_and_a_block_of_zeros_are_quantised():
    parameter = torch.nn.Parameter(torch.zeros(65, 70))
    saved = stepped(torch.optim.AdamW, [parameter]).state_dict()
    saved["state"][0]["exp_avg"].view(-1)[:256] = 0
    optimizer = bnb_adamw8bit([parameter])
    optimizer.load_state_dict(saved)
    state = optimizer.state[parameter]
    found = state["qmap1"][state["state1"].view(-1).int()] * state["absmax1"].repeat_interleave(256)[: 65 * 70]
    wanted = saved["state"][0]["exp_avg"].view(-1)
    assert not found[:256].any()
    torch.testing.assert_close(found, wanted, rtol=0.06, atol=0.02 * float(wanted.abs().max()))


OTHERS = {
    "bnb to fused": (bnb_adamw8bit, FusedAdamW, r"of bitsandbytes.*FusedAdamW expects.*float tensors"),
    "torchao to fused": (ao_adamw8bit, FusedAdamW, r"of torchao.*FusedAdamW expects.*Resume with the optimizer that"),
    "bnb to torchao": (bnb_adamw8bit, ao_adamw8bit, r"of bitsandbytes.*TorchAOAdamW8bit expects"),
    "fp8 to 8-bit": (ao_adamw_fp8, ao_adamw8bit, r"codes of torch.float8_e4m3fn; expected torch.uint8"),
    "torchao to bnb": (ao_adamw4bit, bnb_adamw8bit, r"of torchao.*BitsAndBytesAdamW8bit expects"),
}


@pytest.mark.parametrize(("wrote", "reads", "match"), OTHERS.values(), ids=OTHERS)
@pytest.mark.usefixtures("eager", "needs_bitsandbytes")
def test_states_of_another_library_are_refused_with_what_to_do(wrote, reads, match):
    parameters = tensors()
    saved = stepped(wrote, parameters).state_dict()
    optimizer = reads(parameters, lr=0.5)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    assert float(optimizer.param_groups[0]["lr"]) == 0.5


@pytest.mark.parametrize("make", [bnb_adamw8bit, ao_adamw8bit])
@pytest.mark.usefixtures("eager", "needs_bitsandbytes")
def test_groups_divided_in_another_way_are_named(make):
    parameters = tensors()
    saved = ExpertsAndDense(parameters, experts=make, dense=FusedAdamW, lr=1e-2).state_dict()
    with pytest.raises(ValueError, match=r"groups of \[1, 2\] parameters; .*AdamW8bit has \[3\].*ExpertsAndDense"):
        make(parameters).load_state_dict(saved)


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_a_run_goes_on_with_experts_of_bitsandbytes_from_fused_ones_and_not_back(tmp_path):
    path, later = str(tmp_path / "fused.ckpt"), str(tmp_path / "bnb.ckpt")

    def twice_fused(parameters):
        return ExpertsAndDense(parameters, experts=FusedAdamW, dense=FusedAdamW, lr=1e-2)

    run(twice_fused, 2)[0].save_checkpoint(path)
    trainer, _ = run(bnb_experts, 4, path)
    assert {state["step"] for state in trainer.optimizers[0].experts.state.values() if "state1" in state} == {4}
    trainer.save_checkpoint(later)
    with pytest.raises(ValueError, match="of bitsandbytes"):
        run(twice_fused, 6, later)


# -- copies --------------------------------------------------------------------------------------------------------


def torchao_and_bnb(parameters, lr):
    return ExpertsAndDense(parameters, experts=ao_adamw8bit, dense=bnb_adamw8bit, lr=lr)


def bnb_and_fused(parameters, lr):
    return ExpertsAndDense(parameters, experts=bnb_adamw8bit, dense=FusedAdamW, lr=lr)


COPIED = {"bnb": bnb_adamw8bit, **TORCHAO, "torchao, bnb": torchao_and_bnb, "bnb, fused": bnb_and_fused}


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
@pytest.mark.usefixtures("eager", "needs_bitsandbytes")
def test_a_copy_goes_on_as_the_original(make, twin_of):
    optimizer = stepped(make, tensors())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches the instance
    twin = twin_of(optimizer)
    assert type(twin) is type(optimizer)
    held = []
    for each in (optimizer, twin):
        parameters = [p for group in each.param_groups for p in group["params"]]
        for seed, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(seed)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        held.append(parameters)
    before = values(optimizer, held[0])
    twin.step()
    assert differing(before, values(optimizer, held[0])) == []
    optimizer.step()
    assert differing(values(optimizer, held[0]), values(twin, held[1])) == []
    assert len(twin.state) == 3


# -- large updates -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_an_update_larger_than_the_weights_is_warned_of():
    parameter = torch.nn.Parameter(torch.full((4, 32, 32), 1e-3))
    optimizer = bnb_adamw8bit([parameter], lr=0.1, watch_every=2)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert largest_update(optimizer) is None
    parameter.data.fill_(1e-3)
    with pytest.warns(UserWarning, match=r"\[4, 32, 32\] is 100 times its largest weight"):
        optimizer.step()
    assert largest_update(optimizer) == pytest.approx(100, rel=0.02)
    assert largest_update(optimizer) is None


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_a_nan_is_the_largest_update_and_zeros_are_none():
    weights = [torch.nn.Parameter(torch.zeros(2, 4, 4)), torch.nn.Parameter(torch.ones(2, 4, 4))]
    optimizer = bnb_adamw8bit(weights, lr=1e-3, watch_every=1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert largest_update(optimizer) == pytest.approx(1e-3, rel=0.1)
    weights[0].grad[0, 0, 0] = torch.nan
    with pytest.warns(UserWarning, match="is nan times"):
        optimizer.step()


def test_a_negative_interval_is_refused():
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ValueError, match="watch_every=-1"):
        bnb_adamw8bit([torch.nn.Parameter(torch.zeros(2))], watch_every=-1)


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_the_language_model_logs_the_largest_update():
    trainer, _ = fit(small_model(), "sonar", optimizer=functools.partial(bnb, watch_every=2), steps=2)
    assert 0 < trainer.callback_metrics["largest_update"] < 1
