"""Tensors of more than 2**31 elements: every offset and count holds them. None of them is allocated."""

from __future__ import annotations

import pytest
import torch
from extended_products import extended_products
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sonar import FusedAdamW, plan_memory
from lightning_sonar.accumulate import HostSums
from lightning_sonar.optim import reference, step_one
from lightning_sonar.optim.stochastic import StochasticRounding


def test_chunks_of_stochastic_rounding_reach_beyond_32_bits(monkeypatch):
    n = 2**32 + 5
    seen = []
    monkeypatch.setattr(reference, "CHUNK", 2**30)
    monkeypatch.setattr(
        reference,
        "adamw_reference_",
        lambda p, *_, rounding, **__: seen.append((p.storage_offset(), p.numel(), rounding.offset)),
    )
    p = torch.empty(n, dtype=torch.bfloat16, device="meta")
    reference.adamw_in_chunks_(p, p, p, p, torch.zeros((), device="meta"), rounding=StochasticRounding(0, 0, 2**33))
    assert seen == [(i * 2**30, 2**30, 2**33 + i * 2**30) for i in range(4)] + [(2**32, 5, 2**33 + 2**32)]


def test_the_last_expert_of_a_huge_tensor_rounds_by_its_own_place(monkeypatch):
    tensor = torch.nn.Parameter(torch.empty(64, 2**14, 2**13, dtype=torch.bfloat16, device="meta"))  # 2**33
    tensor.grad = torch.empty_like(tensor)
    made = FusedAdamW([tensor], stochastic_rounding=True)
    seen = []
    monkeypatch.setattr(
        "lightning_sonar.optim.adamw.adamw_", lambda p, *_, rounding, **__: seen.append((p.numel(), rounding.offset))
    )
    step_one.step_slice(made, made.param_groups[0], tensor, 63, {})
    assert seen == [(2**27, 63 * 2**27)]


def test_bits_of_places_beyond_32_bits_differ_from_those_32_bits_before():
    tensor, step = torch.empty(16), torch.ones(())
    near, far = (StochasticRounding(3, 1, offset).bits_for(tensor, step) for offset in (8, 8 + 2**35))
    assert not torch.equal(near, far)


def test_host_sums_of_a_huge_gradient_are_added_in_parts():
    with FakeTensorMode():
        tensor = torch.nn.Parameter(torch.empty(64, 2**13, 2**13, dtype=torch.bfloat16))  # 2**32 elements
        sums = HostSums()
        for _ in range(2):
            tensor.grad = torch.empty_like(tensor)
            sums.add(tensor)
        tensor.grad = torch.empty_like(tensor)
        sums.complete(tensor)
        assert sum(buffer.numel() for buffer in sums.buffers) == 2**32


def test_products_taken_in_32_bits_would_be_noticed():
    text = """
    %pid = tt.get_program_id x : i32
    %start = arith.muli %pid, %c1024_i32 : i32
    %wide = arith.extsi %start : i32 to i64
    %fine = arith.extsi %pid : i32 to i64
    %splat = tt.splat %start : i32 -> tensor<1024xi32>
    %sum = arith.addi %splat, %range : tensor<1024xi32>
    %late = arith.extsi %sum : tensor<1024xi32> to tensor<1024xi64>
    """
    assert extended_products(text) == ["%late", "%wide"]
    assert extended_products(text, in_sums=False) == ["%wide"]
    assert extended_products(text.replace("arith.muli", "arith.remsi")) == []


@pytest.mark.parametrize("mode", ["standard", "sonar"])
def test_a_plan_counts_experts_of_2_to_the_32_elements_exactly(mode):
    gate_up, down = 128 * 8192 * 4096, 128 * 4096 * 4096
    plan = plan_memory(
        "olmoe",
        mode=mode,
        num_layers=1,
        num_experts=128,
        hidden_size=4096,
        intermediate_size=4096,
        vocab_size=512,
        batch_size=1,
        seq_len=16,
        rounding=1,
    )
    assert gate_up == 2**32
    assert plan.params_expert == gate_up + down
    step_counts = plan.split["optimizer_state"] - 2 * 2 * plan.params_total
    assert 0 < step_counts < 1000
    assert plan.split["parameters"] == pytest.approx(2 * plan.params_total, rel=1e-6)
    assert plan.split["expert_gradients"] == 2 * (gate_up + down if mode == "standard" else gate_up)
