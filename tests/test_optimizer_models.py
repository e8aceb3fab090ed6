"""What the planner's stand-ins allocate, against the libraries' own states."""

import functools

import pytest
import torch
from helpers import AutomaticLM, batches, small_model
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sonar import FusedAdamW, plan_memory
from lightning_sonar.memory.optimizer_models import MODELLED, StandIn, label_of, note_of, with_models
from lightning_sonar.memory.optimizer_models.layouts import TORCHAO_4BIT, TORCHAO_8BIT, TORCHAO_FP8
from lightning_sonar.memory.tracker import StorageTracker
from lightning_sonar.optim import ExpertsAndDense, ao_adamw4bit, ao_adamw8bit, ao_adamw_fp8, bnb_adamw8bit, flash_adamw
from lightning_sonar.optim.low_bit_base import CHUNK
from lightning_sonar.optim.states import make_states, state_tensors

# Quantised, with a last block that is not full, too small, and not a multiple of a block.
SHAPES = ((8, 64, 32), (65, 70), (63, 65), (4096,), (16,), ())


def state_bytes(factory, shapes=SHAPES, dtype=torch.bfloat16):
    """Bytes of all states, each storage once."""
    optimizer = factory([torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])
    make_states(optimizer)
    with StorageTracker() as tracker:
        tracker.track(state_tensors(optimizer))
    return tracker.ledger.live_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bitsandbytes_states_are_modelled_to_the_byte(dtype):
    pytest.importorskip("bitsandbytes")
    assert state_bytes(with_models(bnb_adamw8bit), dtype=dtype) == state_bytes(bnb_adamw8bit, dtype=dtype)


def test_the_size_from_which_bitsandbytes_quantises_is_modelled():
    pytest.importorskip("bitsandbytes")
    factory = functools.partial(bnb_adamw8bit, min_8bit_size=5000)
    assert state_bytes(with_models(factory)) == state_bytes(factory)
    assert state_bytes(factory) > state_bytes(bnb_adamw8bit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factory", [ao_adamw8bit, ao_adamw4bit, ao_adamw_fp8])
def test_torchao_states_are_modelled_to_the_byte(factory, dtype):
    pytest.importorskip("torchao")
    assert state_bytes(with_models(factory), dtype=dtype) == state_bytes(factory, dtype=dtype)


def test_another_block_size_of_torchao_is_modelled():
    pytest.importorskip("torchao")
    factory = functools.partial(ao_adamw8bit, block_size=64)
    assert state_bytes(with_models(factory)) == state_bytes(factory)


def test_flash_states_are_three_bytes_and_an_eighth():
    # int8 twice, fp16 for 32 elements twice, a correction of 8 bits; the count of steps is 8 bytes.
    assert state_bytes(with_models(flash_adamw), [(64, 64)]) == 64 * 64 * 3 + 2 * 2 * 64 * 64 // 32 + 8
    assert state_bytes(with_models(flash_adamw), [(64, 64)], torch.float32) == 64 * 64 * 2 + 2 * 2 * 64 * 64 // 32 + 8


@pytest.mark.parametrize(
    ("factory", "layout", "an_element"),
    [(ao_adamw8bit, TORCHAO_8BIT, 8), (ao_adamw4bit, TORCHAO_4BIT, 26), (ao_adamw_fp8, TORCHAO_FP8, 0)],
)
def test_temporaries_are_those_of_one_chunk(factory, layout, an_element):
    with FakeTensorMode():
        expert = torch.nn.Parameter(torch.empty(64, 1024, 1024, dtype=torch.bfloat16))
        optimizer = with_models(functools.partial(factory, watch_every=0))([expert])
        make_states(optimizer)
        expert.grad = torch.empty_like(expert)
        with StorageTracker() as tracker:
            optimizer.step()
    assert layout.chunk <= CHUNK
    assert tracker.ledger.peak_bytes == layout.chunk * an_element + 2 * 4 * layout.chunk // layout.block


def test_a_stand_in_refuses_to_leave_real_parameters_as_they_are():
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    with pytest.raises(TypeError, match="only allocates"):
        with_models(bnb_adamw8bit)([parameter]).step()


def test_only_low_bit_optimizers_are_replaced():
    assert with_models(FusedAdamW) is FusedAdamW
    parameters = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2, 2, 2))]
    factory = functools.partial(ExpertsAndDense, experts=functools.partial(ao_adamw4bit), dense=FusedAdamW, lr=1e-4)
    optimizer = with_models(factory)(parameters)
    assert isinstance(optimizer.experts, StandIn)
    assert type(optimizer.dense) is FusedAdamW
    assert optimizer.param_groups[0]["lr"] == 1e-4
    assert label_of(optimizer) == "ao AdamW4bit for experts, FusedAdamW (model)"
    assert "; of FusedAdamW in it the step is the real one" in note_of(optimizer)


def test_labels_and_notes_tell_what_is_modelled():
    parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
    made = {factory: with_models(factory)(parameters) for factory in MODELLED}
    assert sorted(label_of(optimizer) for optimizer in made.values()) == [
        "FlashAdamW (model)",
        "ao AdamW4bit (model)",
        "ao AdamW8bit (model)",
        "ao AdamWFp8 (model)",
        "bnb AdamW8bit (model)",
    ]
    assert not any("of other" in note_of(optimizer) or "real one" in note_of(optimizer) for optimizer in made.values())
    assert "watched step" in note_of(made[bnb_adamw8bit])
    assert "watched step" not in note_of(made[flash_adamw])
    assert "watched step" not in note_of(with_models(functools.partial(bnb_adamw8bit, watch_every=0))(parameters))


@pytest.mark.parametrize("parted", [False, True], ids=["all", "experts"])
def test_a_module_of_ones_own_with_torchao_is_refused_not_compiled(parted):
    pytest.importorskip("torchao")

    def optimizer(parameters):
        if parted:
            return ExpertsAndDense(parameters, experts=ao_adamw8bit, dense=FusedAdamW, lr=1e-3)
        return ao_adamw8bit(parameters)

    with pytest.raises(RuntimeError, match=r"TorchAOAdamW8bit does not run on fake.*plan_memory\('olmoe', optimizer="):
        plan_memory(lambda: AutomaticLM(small_model(), optimizer), batch=batches(1)[0], precision="32")


def test_a_plan_says_that_the_optimizer_is_modelled():
    plan = plan_memory(size="tiny", num_layers=1, optimizer=bnb_adamw8bit)
    whole = plan_memory(size="tiny", num_layers=1)
    assert plan.optimizer == "bnb AdamW8bit (model)"
    assert any("bnb AdamW8bit is modelled" in note for note in plan.notes)
    # Two bytes and 8 for each block of 256 in the place of four.
    share = plan.split["optimizer_state"] / whole.split["optimizer_state"]
    assert share == pytest.approx((2 + 8 / 256) / 4, rel=0.002)
    assert not any("modelled" in note for note in whole.notes)
