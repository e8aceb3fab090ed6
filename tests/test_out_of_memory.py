"""What is said of a run that went out of memory: the arithmetic and the measurement."""

import dataclasses
import json

import pytest
import torch
from test_profiler import Automatic, expert_tensors, nbytes
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sonar import MODES
from lightning_sonar.memory.diagnosis import diagnose
from lightning_sonar.memory.out_of_memory import Alive, Needs, allocated, asked_for, failure, is_out_of_memory, options

ON_CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 76.25 GiB "
    "is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
)
ON_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
ON_CPU += "allocate 2097152 bytes. Error code 12 (Cannot allocate memory)"
NEEDS = Needs(
    parameters=100,
    states=200,
    expert_gradients=90,
    dense_gradients=10,
    largest_expert_gradient=15,
    largest_dense_gradient=4,
    rest=50,
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        RuntimeError(ON_CUDA),
        RuntimeError(ON_CPU),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        MemoryError(),
    ],
)
def test_running_out_of_memory_is_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError(ON_CPU), KeyboardInterrupt()])
def test_other_failures_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


def test_the_allocators_figures_are_read_from_the_message():
    assert asked_for(ON_CPU) == (2097152, 0)
    nbytes, margin = asked_for(ON_CUDA)
    assert nbytes == 2.5 * 2**30
    assert margin == pytest.approx(0.005 * 2**30, abs=2)
    assert allocated(ON_CUDA) == 76.25 * 2**30
    assert asked_for("Killed") is allocated(ON_CPU) is None


@pytest.mark.parametrize(
    ("mode", "gradients"),
    [
        ("standard", 90 + 10),
        ("standard_no_expert_clip", 90 + 10),
        ("in_backward_all", 15),
        ("sonar", 10 + 15),
        ("sonar_per_expert", 10 + 15),
    ],
)
def test_a_mode_needs_the_gradients_it_keeps_and_the_largest_it_frees(mode, gradients):
    assert NEEDS.of(MODES[mode]) == 100 + 200 + 50 + gradients
    assert NEEDS.of(MODES[mode], accumulating=True) == 100 + 200 + 50 + 100


def test_what_fits_and_gives_up_least_comes_first():
    found = options(NEEDS, capacity=400, mode=MODES["standard"])
    named = [option.change for option in found]
    assert named[0] == "mode='sonar'"
    assert named.index("mode='in_backward_all'") > named.index("mode='sonar_per_expert'")
    assert (found[0].needed_bytes, found[0].fits, found[0].note) == (375, True, "gives up clipping on experts")
    # Without its 50 of activations standard needs 400: nothing is left for a batch, and sonar fits with the whole one.
    assert not any("batch" in change for change in named)
    for change in ("activation checkpointing", "cross-entropy in chunks (model.loss=chunked"):
        (option,) = (option for option in found if option.change.startswith(change))
        assert (option.fits, option.needed_bytes) == (None, None)
        assert "50 bytes would have to go" in option.note


def test_what_does_not_fit_comes_last():
    found = options(NEEDS, capacity=370, mode=MODES["standard"])
    assert [option.fits for option in found] == sorted((option.fits for option in found), key=[True, None, False].index)
    assert found[0].change == "mode='in_backward_all'"
    assert {option.change: option.fits for option in found}["mode='sonar'"] is False


@pytest.mark.parametrize(
    ("capacity", "text"),
    [
        (425, "a batch of at most 50% of this one (same mode)"),
        # 315 of in_backward_all's 365 are fixed.
        (340, "a batch of at most 50% of this one (mode='in_backward_all')"),
    ],
)
def test_a_smaller_batch_shrinks_the_activations_alone(capacity, text):
    changes = {option.change: option.fits for option in options(NEEDS, capacity=capacity, mode=MODES["standard"])}
    assert changes[text] is True


def test_the_process_itself_does_not_shrink_with_the_batch():
    needs = dataclasses.replace(NEEDS, process=40)
    changes = [option.change for option in options(needs, capacity=445, mode=MODES["standard"])]
    assert "a batch of at most 50% of this one (same mode)" in changes


def test_a_model_that_is_too_large_is_told_so():
    found = options(NEEDS, capacity=300, mode=MODES["in_backward_all"])
    assert {option.fits for option in found} == {False}
    assert any("the model is too large" in option.note for option in found)


def test_a_mode_that_needs_no_less_is_no_advice():
    changes = [option.change for option in options(NEEDS, capacity=370, mode=MODES["sonar"])]
    assert [change for change in changes if change.startswith("mode=")] == ["mode='in_backward_all'"]


def test_accumulation_is_part_of_the_advice_where_it_loses_the_saving():
    found = options(NEEDS, capacity=400, mode=MODES["sonar"], accumulating=True)
    assert found[0].change == "mode='sonar', accumulation='per_microbatch'"
    assert "once a microbatch" in found[0].note


def test_plain_lightning_is_told_of_the_strategy():
    assert options(NEEDS, capacity=400, mode=None)[0].change == "strategy=SonarMoEStrategy(mode='sonar')"


def test_fragments_are_named_where_the_arithmetic_says_that_it_fits():
    found = options(NEEDS, capacity=1000, mode=MODES["in_backward_all"], cuda=True)
    assert [option.fits for option in found] == [None]
    assert "expandable_segments" in found[0].note


@pytest.mark.parametrize(("phase", "least"), [("forward", True), ("backward", False)])
def test_needs_measured_in_forward_are_called_the_least(phase, least):
    alive = Alive(100, 200, 0, 0, 50, "somewhere")
    told = failure(
        MemoryError(),
        NEEDS,
        alive,
        capacity=400,
        mode=None,
        accumulating=False,
        asked=None,
        asked_gradient=False,
        device="cpu",
        phase=phase,
        step=7,
    )
    assert ("the least there can be" in told.message) is least
    assert ("needs at least 375 bytes, 25 bytes to spare; may fit" in told.message) is least
    assert ("needs 375 bytes, 25 bytes to spare; fits;" in told.message) is not least
    assert "plain Lightning" in told.message
    assert told.needed_by_mode["standard"] == told.needed_bytes == 450
    assert json.loads(json.dumps(told.to_dict()))["alive"]["rest"] == 50


def cuda_figures(monkeypatch, *, in_use, reserved, free, total, fraction=1.0):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: in_use)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_on_cuda_the_figures_are_the_allocators(monkeypatch, fraction):
    gib = 2**30
    cuda_figures(monkeypatch, in_use=60 * gib, reserved=77 * gib, free=1 * gib, total=80 * gib, fraction=fraction)
    module = Automatic()
    with FakeTensorMode():
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owner._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, device="cuda:0"))
        optimizer = torch.optim.AdamW(module.parameters())
        experts = expert_tensors(module)
        for parameter in module.parameters():
            optimizer.state[parameter] = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        for parameter in [experts[0], module.head.bias]:
            parameter.grad = torch.empty_like(parameter)
        told = diagnose(
            torch.OutOfMemoryError(ON_CUDA),
            module=module,
            optimizers=[optimizer],
            device=torch.device("cuda:0"),
            experts={id(tensor) for tensor in experts},
            phase="backward",
        )
    total = nbytes(module.parameters())
    assert told.alive.parameters == total
    assert told.alive.optimizer_state == 2 * total
    assert told.alive.expert_gradients == nbytes([experts[0]])
    assert told.alive.dense_gradients == nbytes([module.head.bias])
    assert told.alive.total == 76.25 * gib
    assert told.capacity_bytes == min(78, 80 * fraction) * gib
    assert told.needed_by_mode["standard"] - told.needed_by_mode["sonar"] == nbytes(experts) - nbytes([experts[0]])
    assert not told.asked_gradient
    assert told.needed_bytes == pytest.approx(78.75 * gib, rel=1e-3)


@pytest.mark.parametrize(("steps", "share"), [(0, 0), (1, 1)])
def test_states_that_are_still_to_come_are_reckoned_with(steps, share):
    module = Automatic()
    optimizer = torch.optim.AdamW(module.parameters())
    if steps:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    told = diagnose(MemoryError(), module=module, optimizers=[optimizer], device=torch.device("cpu"), experts=set())
    total = nbytes(module.parameters())
    assert told.alive.optimizer_state == pytest.approx(share * 2 * total, rel=0.01)
    base = told.needed_by_mode["standard"] - told.alive.rest - 2 * total
    assert base == pytest.approx(2 * total, rel=0.01)
