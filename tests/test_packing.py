"""Several records in one row: what the rows hold, and that none sees another."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import fit, small_model

from lightning_sonar import models
from lightning_sonar.data import (
    IGNORED,
    DataError,
    Example,
    InstructionData,
    check_packing,
    collate,
    collate_packed,
    pack,
    packed_arguments,
    router_loss,
)
from lightning_sonar.language_model import LanguageModel

PACKED_FAMILIES = ["olmoe", "granite"]


def examples(sizes, seed=0):
    draw = random.Random(seed)
    made = []
    for size in sizes:
        ids = [draw.randrange(2, 90) for _ in range(size)]
        made.append(Example(ids, [IGNORED, IGNORED, *ids[2:]]))
    return made


def tiny(family, attention="eager"):
    model = small_model(family)
    model.set_attn_implementation(attention)
    return model


# --- rows


@pytest.mark.parametrize("seed", range(5))
def test_every_example_is_in_one_row_and_no_row_is_too_long(seed):
    draw = random.Random(seed)
    made = examples([draw.randrange(2, 33) for _ in range(200)], seed)
    rows = pack(made, 32)
    assert sorted(id(example) for row in rows for example in row) == sorted(map(id, made))
    assert max(sum(len(example.input_ids) for example in row) for row in rows) <= 32
    assert rows == pack(made, 32)


def test_rows_are_nearly_as_few_as_tokens_allow():
    draw = random.Random(3)
    made = examples([draw.randrange(4, 40) for _ in range(500)])
    tokens = sum(len(example.input_ids) for example in made)
    assert len(pack(made, 64)) <= 1.02 * tokens / 64 + 1


def test_examples_as_long_as_a_row_have_one_each():
    assert [len(row) for row in pack(examples([8, 8, 3, 5]), 8)] == [1, 1, 2]


def test_an_example_longer_than_a_row_is_refused():
    with pytest.raises(DataError, match="an example has 9 tokens, but a row holds 8"):
        pack(examples([9]), 8)


def test_positions_begin_anew_and_labels_stay_inside_their_record():
    first, second = Example([5, 6, 7], [5, 6, 7]), Example([8, 9], [8, 9])
    batch = collate_packed([(first, second), (second,)], pad_id=0, pad_to=7)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 0], [8, 9, 0, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]]
    ignored = IGNORED
    assert batch["labels"].tolist()[0] == [ignored, 6, 7, ignored, 9, ignored, ignored]


def test_a_row_longer_than_asked_for_is_refused():
    with pytest.raises(DataError, match="pad_to=4, but a row has 5 tokens"):
        collate_packed([tuple(examples([3, 2]))], pad_id=0, pad_to=4)


# --- models


@pytest.mark.parametrize("family", PACKED_FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_of_a_packed_row_are_those_of_its_records_alone(family, attention):
    model = tiny(family, attention)
    made = examples([7, 5, 9, 2])
    batch = collate_packed([(made[0], made[1]), (made[2], made[3])], pad_id=0, pad_to=14)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], use_cache=False, **packed_arguments(batch)).logits
        for example, row, start in ((made[0], 0, 0), (made[1], 0, 7), (made[2], 1, 0), (made[3], 1, 9)):
            alone = model(input_ids=torch.tensor([example.input_ids]), use_cache=False).logits[0]
            packed = logits[row, start : start + len(example.input_ids)]
            torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_the_attention_mask_of_a_plain_batch_would_let_records_see_one_another(family):
    model = tiny(family)
    made = examples([7, 5])
    batch = collate_packed([tuple(made)], pad_id=0)
    with torch.no_grad():
        mixed = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        alone = model(input_ids=torch.tensor([made[1].input_ids]), use_cache=False).logits
    assert (mixed[0, 7:] - alone[0]).abs().max() > 5e-4


@pytest.mark.parametrize("family", PACKED_FAMILIES)
@pytest.mark.parametrize("kind", ["full", "chunked"])
def test_loss_of_packed_rows_is_the_token_weighted_loss_of_their_records(family, kind):
    module = LanguageModel(tiny(family), torch.optim.SGD, loss=kind)
    made = examples([7, 5, 9, 4, 6])
    rows = pack(made, 12)
    assert len(rows) == 3
    packed = module.loss(collate_packed(rows, pad_id=0, pad_to=12))
    total = tokens = 0
    for example in made:
        count = sum(label != IGNORED for label in example.labels[1:])
        total += module.loss(collate([example], pad_id=0)) * count
        tokens += count
    torch.testing.assert_close(packed, total / tokens, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_gradients_of_packed_rows_are_those_of_a_padded_batch(family):
    made = examples([7, 5, 6])
    grads = []
    for batch in (collate_packed([(made[0], made[1]), (made[2],)], pad_id=0), collate(made, pad_id=0)):
        model = tiny(family)
        LanguageModel(model, torch.optim.SGD).loss(batch).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in grads[0].items():
        torch.testing.assert_close(gradient, grads[1][name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text)


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_the_routers_loss_counts_the_same_tokens_packed_or_not(family):
    model = tiny(family)
    made = examples([7, 5, 6])
    found = []
    for batch in (collate_packed([(made[0], made[1]), (made[2],)], pad_id=0, pad_to=16), collate(made, 0, pad_to=9)):
        output = model(
            input_ids=batch["input_ids"], output_router_logits=True, use_cache=False, **packed_arguments(batch)
        )
        found.append(router_loss(model, output, batch))
        own = output.aux_loss
    assert own is found[1]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_training_on_packed_rows_takes_the_same_steps_in_sonar_and_without(deterministic):
    data = [collate_packed(pack(examples([7, 5, 9, 4], seed), 13), pad_id=0, pad_to=13) for seed in range(3)]
    weights = []
    for mode in ("sonar", "standard_no_expert_clip"):
        model = small_model("olmoe", torch.bfloat16)
        fit(model, mode, steps=3, data=data)
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# --- models that cannot


def blind_to_positions():
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    return models.build("hf", "full", config="gpt_oss", dtype=torch.float32, vocab_size=96, pad_token_id=0, **shape)


def test_a_model_whose_attention_ignores_positions_is_refused_on_its_first_batch():
    module = LanguageModel(blind_to_positions(), torch.optim.SGD)
    with pytest.raises(DataError, match="GptOssForCausalLM does not keep to the records .* Use data.packing=false"):
        module.loss(collate_packed([tuple(examples([4, 5]))], pad_id=0))
    module.loss(collate(examples([4, 5]), pad_id=0))


def test_layers_that_keep_a_state_are_refused_by_name():
    model = small_model()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(DataError, match="OlmoeForCausalLM has linear_attention"):
        check_packing(model, 2)


def test_flash_attention_is_refused_for_more_than_one_row():
    model = small_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(DataError, match="batches of one row, and this batch has 2. Use data.batch_size=1"):
        check_packing(model, 2)


@pytest.mark.parametrize("family", PACKED_FAMILIES)
def test_the_check_leaves_the_model_and_random_state_as_they_were(family):
    model = small_model(family).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check_packing(model, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert not model.get_input_embeddings()._forward_hooks


# --- the data module


def write(path, sizes):
    lines = [f'{{"instruction": "Say {n}.", "output": "{"ab " * size}{n}"}}\n' for n, size in enumerate(sizes)]
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture
def data(tmp_path):
    def make(**options):
        path = write(tmp_path / "rows.jsonl", [1 + n % 13 for n in range(120)])
        made = InstructionData(
            "json", path, seq_len=128, vocab_size=300, cache_dir=str(tmp_path / "cache"), heldout_size=8, **options
        )
        made.setup()
        return made

    return make


def test_packing_gives_fewer_rows_with_the_same_examples_and_leaves_held_out_ones_alone(data):
    plain, packed = data(), data(packing=True)
    assert packed.train_set == plain.train_set
    assert packed.heldout_set == plain.heldout_set
    assert len(packed.train_rows) < len(packed.train_set) / 2
    assert len(plain.train_rows) == len(plain.train_set)
    assert len(packed.train_dataloader()) == len(packed.train_rows) // 2
    assert sum(len(row) for row in packed.train_rows) == len(packed.train_set)
    batch = next(iter(packed.train_dataloader()))
    assert batch["input_ids"].shape == batch["position_ids"].shape == (2, 128)
    assert "position_ids" not in next(iter(packed.val_dataloader()))


def test_a_packed_loader_resumes_with_the_very_next_batch(data):
    whole = [batch["input_ids"] for batch in data(packing=True, batch_size=3).train_dataloader()]
    assert len(whole) > 3
    loader = data(packing=True, batch_size=3).train_dataloader()
    batches = iter(loader)
    seen = [next(batches)["input_ids"] for _ in range(2)]
    resumed = data(packing=True, batch_size=3).train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    seen += [batch["input_ids"] for batch in resumed]
    assert len(seen) == len(whole)
    assert all(torch.equal(left, right) for left, right in zip(seen, whole, strict=True))


def test_a_checkpoint_of_unpacked_data_is_not_continued_packed(data):
    resumed = data(packing=True).train_dataloader()
    with pytest.raises(DataError, match="size was 11"):
        resumed.load_state_dict(data().train_dataloader().state_dict())


def test_a_batch_of_more_rows_than_there_are_is_explained(data):
    with pytest.raises(DataError, match="batch_size=100, but only 112 training examples are left, packed into"):
        data(packing=True, batch_size=100)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_packing_is_true_or_false(value):
    with pytest.raises(DataError, match="packing=.*: expected true or false"):
        InstructionData(packing=value)


def test_an_example_goes_where_it_fits_exactly():
    rows = pack(examples([6, 4, 2]), 8)
    assert [[len(example.input_ids) for example in row] for row in rows] == [[6, 2], [4]]
