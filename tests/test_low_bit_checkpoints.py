"""Low-bit optimizers in checkpoints, and what is said of large updates."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, make_trainer, small_model, snapshot
from low_bit_cases import BOTH, all_torchao, bnb, eager, needs_bitsandbytes, tensors, train, values  # noqa: F401

from lightning_sonar import SonarMoEStrategy
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.optim import (
    ao_adamw8bit,
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
