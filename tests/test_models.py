from __future__ import annotations

import json

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


# --- random weights of any architecture

MIXTRAL = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
MIXTRAL |= {"num_local_experts": 4, "vocab_size": 64}


def test_an_architecture_is_built_with_random_weights_at_its_default_or_the_given_size():
    assert models.build_config("hf", config="mixtral").hidden_size == 4096
    model = models.build("hf", config="mixtral", num_layers=2, dtype=torch.float32, **MIXTRAL)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert [tuple(tensor.shape) for tensor in find_expert_tensors(model).tensors] == [(4, 32, 32), (4, 32, 16)] * 2
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("folder", [True, False])
def test_a_config_json_or_its_folder_is_built_with_random_weights(tmp_path, folder):
    models.build_config("hf", config="mixtral", num_layers=1, **MIXTRAL).save_pretrained(tmp_path)
    source = str(tmp_path if folder else tmp_path / "config.json")
    config = models.build_config("hf", config=source, vocab_size=80)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 1, 80)
    assert len(find_expert_tensors(models.build("hf", config=source))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "mixtrl"}, "config=mixtrl is no architecture .* nor a file here. Did you mean mixtral"),
        ({"config": "zzzzzz"}, "config=zzzzzz is no architecture .* Expected a model_type such as mixtral, qwen3_moe"),
        ({"config": "no/such"}, "config=no/such: there is no file no/such; expected a config.json or a folder"),
        ({"config": "vit"}, "config=vit: transformers has no causal language model of this architecture"),
        ({"config": "aria"}, "no causal language model of this architecture. Take its language model, aria_text"),
        ({"config": "mixtral", "hiden_size": 8}, "MixtralConfig has no value 'hiden_size'. Did you mean hidden_size"),
        ({"config": "zaya", "num_experts_per_tok": 2}, "config=zaya: transformers refuses these values: .*=1"),
        ({"config": "mixtral", "model_id": "a/b"}, "model.id=a/b and model.config=mixtral both say what the model is"),
        ({}, "needs model.id: .*; or, for random weights, model.config"),
    ],
)
def test_mistakes_about_an_architecture_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build_config("hf", **arguments)


def test_a_preset_takes_no_architecture_and_an_architecture_no_weights():
    with pytest.raises(ValueError, match="model.config=mixtral is only for model=hf, but the model is 'olmoe'"):
        models.build_config("olmoe", config="mixtral")
    with pytest.raises(ValueError, match="pretrained=True needs a checkpoint, and config=mixtral has none"):
        models.build("hf", config="mixtral", pretrained=True, num_layers=1, **MIXTRAL)


@pytest.mark.parametrize("text", ["{bad", "{}", json.dumps({"model_type": "nope"})])
def test_a_config_json_that_says_nothing_is_explained(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json: no configuration can be made of it: "):
        models.build_config("hf", config=str(tmp_path / "config.json"))


def test_a_model_with_expert_code_of_its_own_knows_no_other_backend():
    small = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = models.build_config("hf", config="llama4_text", **small)
    assert not models.takes_backend(config)
    assert models.takes_backend(models.build_config("hf", config="mixtral"))
    with pytest.raises(ValueError, match="backend=grouped_mm: models of type llama4_text .* Use backend=eager"):
        models.build("hf", config="llama4_text", backend="grouped_mm", **small)


def test_an_architecture_without_a_whole_default_names_what_to_set():
    with pytest.raises(
        ValueError, match="cannot make a dots1 model .* Set the values that it lacks in model.overrides"
    ):
        models.count_parameters(models.build_config("hf", config="dots1"))


def test_parameters_are_counted_by_the_given_pattern():
    small = models.build_config("hf", config="mixtral", num_layers=1, **MIXTRAL)
    total, experts = models.count_parameters(small, experts=r"experts\.down_proj$")
    assert experts == 4 * 32 * 16
    assert experts < models.count_parameters(small)[1] < total
