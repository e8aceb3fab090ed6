from __future__ import annotations

import pytest
import torch
from helpers import small_model

from lightning_sonar import find_expert_tensors, models


@pytest.mark.parametrize(("name", "total", "experts"), [("olmoe", 6.92e9, 6.44e9), ("granite", 3.30e9, 3.02e9)])
def test_full_size_has_the_published_number_of_parameters(name, total, experts):
    found = models.count_parameters(models.build_config(name, "full"))
    assert found[0] == pytest.approx(total, rel=5e-3)
    assert found[1] == pytest.approx(experts, rel=5e-3)


@pytest.mark.parametrize(("name", "num_experts"), [("olmoe", 64), ("granite", 40)])
def test_tiny_size_keeps_experts_and_top_k_and_most_parameters_in_experts(name, num_experts):
    config = models.build_config(name, "tiny")
    assert config.num_local_experts == num_experts
    assert config.num_experts_per_tok == 8
    total, experts = models.count_parameters(config)
    assert experts / total >= 0.85
    assert config.model_type == models.build_config(name, "full").model_type


def test_granite_ties_its_embeddings_at_both_sizes():
    for size in ("tiny", "full"):
        assert models.build_config("granite", size).tie_word_embeddings
    model = small_model("granite")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("family", ["olmoe", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_build_gives_dtype_backend_and_training_mode(family, dtype):
    model = small_model(family, dtype, "eager")
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.config._experts_implementation == "eager"
    assert model.training
    assert not model.config.use_cache


def test_num_layers_and_overrides_are_taken():
    config = models.build_config("olmoe", "tiny", num_layers=3, hidden_size=64)
    assert (config.num_hidden_layers, config.hidden_size) == (3, 64)


def test_same_seed_gives_the_same_weights():
    left, right = small_model(seed=4), small_model(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama",), "model='llama' is not a model. Choose one of olmoe, granite, hf"),
        (("olmoe", "huge"), "size='huge': expected one of tiny, full"),
        (("hf",), "model=hf needs model.id"),
    ],
)
def test_mistakes_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build_config(*arguments)


def test_no_layers_and_pretrained_tiny_are_refused():
    with pytest.raises(ValueError, match="num_layers=0: expected at least 1"):
        models.build_config("olmoe", num_layers=0)
    with pytest.raises(ValueError, match="pretrained=True needs size='full'"):
        models.build("olmoe", "tiny", pretrained=True)


def test_hf_model_loads_from_a_local_folder_bitwise(tmp_path):
    model = small_model("granite", torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = models.build("hf", "full", model_id=str(tmp_path), pretrained=True, dtype=torch.bfloat16)
    left, right = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert loaded.training
    fresh = models.build("hf", "full", model_id=str(tmp_path), num_layers=1)
    assert len(find_expert_tensors(fresh)) == 2


def test_checkpointing_is_of_the_non_reentrant_kind():
    model = small_model(checkpointing=True)
    kinds = [
        m._gradient_checkpointing_func.keywords for m in model.modules() if getattr(m, "gradient_checkpointing", 0)
    ]
    assert kinds
    assert all(keywords["use_reentrant"] is False for keywords in kinds)
