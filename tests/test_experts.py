from __future__ import annotations

import pytest
import torch
from helpers import small_model
from torch import nn

from lightning_sonar import find_expert_tensors


class Experts(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.zeros(num_experts, 6, 5))
        self.down = nn.Parameter(torch.zeros(num_experts, 5, 3))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, 6))
        self.router = nn.Parameter(torch.zeros(num_experts, 5))


@pytest.mark.parametrize("family", ["olmoe", "granite"])
def test_finds_both_batched_tensors_of_every_layer(family):
    found = find_expert_tensors(small_model(family, num_layers=3))
    assert len(found) == 6
    assert {name.rsplit(".", 1)[-1] for name in found.names} == {"gate_up_proj", "down_proj"}
    assert all(tensor.ndim == 3 and tensor.shape[0] == 6 for tensor in found.tensors)


def test_router_weight_in_the_same_module_stays_out_and_a_bias_stays_in():
    assert find_expert_tensors(nn.Sequential(Experts())).names == ["0.up", "0.down", "0.up_bias"]


def test_convolution_and_attention_parameters_are_not_experts():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), Experts(), nn.MultiheadAttention(8, 2))
    assert all(name.startswith("1.") for name in find_expert_tensors(model).names)


def test_a_three_dimensional_tensor_of_another_length_is_not_an_expert_tensor():
    model = Experts()
    model.other = nn.Parameter(torch.zeros(3, 2, 2))
    assert "other" not in find_expert_tensors(model).names


def test_shared_experts_are_listed_once():
    experts = Experts()
    assert len(find_expert_tensors(nn.ModuleList([experts, experts]))) == 3


def test_frozen_experts_are_left_out_and_all_frozen_is_an_error():
    model = Experts()
    model.up.requires_grad_(False)
    assert find_expert_tensors(model).names == ["down", "up_bias"]
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="All expert tensors of Experts are frozen"):
        find_expert_tensors(model)


def test_patterns_choose_by_name():
    model = small_model()
    found = find_expert_tensors(model, [r"layers\.0\..*gate_up", r"layers\.1\..*down"])
    assert [name.split("layers.")[1] for name in found.names] == [
        "0.mlp.experts.gate_up_proj",
        "1.mlp.experts.down_proj",
    ]
    assert find_expert_tensors(model, "gate_up_proj").names == find_expert_tensors(model, ["gate_up_proj"]).names


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("nothing_like_it", "matches no parameter. The model's names begin: "),
        ("(", "is not a regular expression"),
        ("norm", r"matches .*norm.* \[32\].*cannot hold experts"),
    ],
)
def test_bad_patterns_are_explained(patterns, message):
    with pytest.raises(ValueError, match=message):
        find_expert_tensors(small_model(), patterns)


class ListOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))


class Unmarked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 3))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3), "none with three dimensions. Is this a Mixture-of-Experts model"),
        (ListOfExperts(), r"keeps its experts as a list of modules: experts \(4 modules\)"),
        (Unmarked(), r"weight \[4, 3, 3\].*Add one \(self.num_experts = E\)"),
    ],
)
def test_nothing_found_says_what_was_seen_and_what_to_pass(model, message):
    with pytest.raises(ValueError, match=message) as caught:
        find_expert_tensors(model)
    assert "experts=<regex over parameter names>" in str(caught.value)


def test_report_counts_shapes_and_share():
    model = small_model(num_layers=2)
    text = find_expert_tensors(model).report()
    total = sum(p.numel() for p in model.parameters())
    experts = 2 * (6 * 32 * 32 + 6 * 32 * 16)
    assert text.startswith(f"4 expert tensors, {experts:,} of {total:,} parameters ({experts / total:.1%})")
    assert "2 x model.layers.*.mlp.experts.gate_up_proj [6, 32, 32]" in text


def test_a_switch_with_expert_in_its_name_is_no_number_of_experts():
    module = nn.Module()
    module.has_experts = True
    module.kernel = nn.Parameter(torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match="No batched expert tensors found"):
        find_expert_tensors(module)
