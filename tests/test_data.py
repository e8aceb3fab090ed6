"""Tokenizer, encoding, batches and the LightningDataModule."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import tokenizers
import torch

from lightning_sonar.data import (
    END_TOKEN,
    IGNORED,
    PAD_TOKEN,
    DataError,
    Example,
    InstructionData,
    builtin_records,
    cached_tokenizer,
    collate,
    encode,
    encode_all,
    from_alpaca,
    from_messages,
    train_tokenizer,
)
from lightning_sonar.data import module as module_file
from lightning_sonar.data import tokenizer as tokenizer_file

ODD_TEXTS = [
    "🦙🏳️‍🌈 👩‍👩‍👧‍👦 emoji",
    "مرحبا بالعالم، שלום עולם",
    "  two  spaces , \t tab\r\nCRLF\n\n\n end ",
    "e\u0301 ﬁ ½ \u200f\ufeff\x00\x1b",
    f"a {END_TOKEN} b {PAD_TOKEN}{END_TOKEN}",
    "",
]


@pytest.fixture(scope="session")
def builtin_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    builtin_records(folder)
    return str(folder)


@pytest.fixture(scope="session")
def builtin_data(builtin_cache):
    data = InstructionData(cache_dir=builtin_cache)
    data.setup()
    return data


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([f"word {number} ### Response:\n" for number in range(50)], 300)


def write_rows(path, count):
    rows = [{"instruction": f"Double {n}.", "output": f"{n} times two is {2 * n}."} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows_file(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", 60)


def json_data(path, tmp_path, **arguments):
    return InstructionData("json", path, vocab_size=300, cache_dir=str(tmp_path / "cache"), **arguments)


def labelled(example):
    return [label for label in example.labels if label != IGNORED]


# --- tokenizer


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    example = encode(((text, True),), tokenizer, 1000)
    assert tokenizer.decode(example.input_ids[:-1]) == text
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_tokenizer_of_bytes_alone_works():
    bare = train_tokenizer([], 258)
    assert len(bare) == 258
    assert bare.decode(bare("Ж🦙")["input_ids"]) == "Ж🦙"


def test_training_again_gives_the_same_tokenizer():
    texts = [f"the {n} quick brown foxes {n * n}" for n in range(200)]
    first, second = (train_tokenizer(texts, 400).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


@pytest.mark.slow  # a process of its own imports torch and lightning anew
def test_another_process_trains_the_same_tokenizer_without_datasets_or_fork_warnings():
    texts = [f"the {n} quick brown foxes {n * n}" for n in range(200)]
    code = (
        "import json, os, sys\n"
        "from lightning_sonar.data import encode_all, from_alpaca, train_tokenizer\n"
        "trained = train_tokenizer(json.load(sys.stdin), 400)\n"
        "encode_all([from_alpaca('a', '', 'b')] * 100, trained, 64)\n"
        "print(trained.backend_tokenizer.to_str())\n"
        "print('datasets' in sys.modules, flush=True)\n"
        "if os.fork() == 0:\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(texts),
        cwd=Path(__file__).parents[1],
        env={key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"},
        capture_output=True,
        text=True,
        check=True,
    )
    other, datasets_imported = ran.stdout.splitlines()
    assert other == train_tokenizer(texts, 400).backend_tokenizer.to_str()
    assert datasets_imported == "False"  # it takes seconds to import, and only the hub needs it
    assert "huggingface/tokenizers" not in ran.stderr


def test_training_uses_no_threads_that_a_fork_would_warn_about(monkeypatch):
    seen = []
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)

    def texts():
        seen.append(os.environ.get("TOKENIZERS_PARALLELISM"))
        yield "text"

    train_tokenizer(texts(), 300)
    assert seen == ["false"]
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_the_users_choice_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    with tokenizer_file.single_threaded():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(DataError, match=r"vocab_size=257: expected at least 258"):
        train_tokenizer(["a"], 257)


@pytest.fixture
def trainings(monkeypatch):
    """Counts how often a tokenizer is trained."""
    calls = []
    train = tokenizer_file._train

    def counted(texts, vocab_size):
        calls.append(vocab_size)
        return train(texts, vocab_size)

    monkeypatch.setattr(tokenizer_file, "_train", counted)
    return calls


def test_a_cached_tokenizer_is_trained_once_and_equals_the_trained_one(tmp_path, trainings):
    texts = ["some words", "some more words"]
    first = cached_tokenizer(texts, 280, tmp_path)
    second = cached_tokenizer(texts, 280, tmp_path)
    assert len(trainings) == 1
    fresh = train_tokenizer(texts, 280)
    for one in (first, second):
        assert one.get_vocab() == fresh.get_vocab()
        assert (one.pad_token, one.eos_token, len(one)) == (PAD_TOKEN, END_TOKEN, len(fresh))
        assert one("some words ")["input_ids"] == fresh("some words ")["input_ids"]


def test_other_texts_sizes_and_versions_train_anew(tmp_path, trainings, monkeypatch):
    cached_tokenizer(["ab", "c"], 280, tmp_path)
    cached_tokenizer(["a", "bc"], 280, tmp_path)
    cached_tokenizer(["ab", "c"], 281, tmp_path)
    monkeypatch.setattr("platform.python_version", lambda: "9.9.9")
    cached_tokenizer(["ab", "c"], 280, tmp_path)
    monkeypatch.setattr(tokenizers, "__version__", "9.9.9")
    cached_tokenizer(["ab", "c"], 280, tmp_path)
    assert len(trainings) == 5


@pytest.mark.parametrize("damage", ["cut", "empty", "not a tokenizer"])
def test_a_damaged_tokenizer_file_is_rebuilt(tmp_path, trainings, damage):
    first = cached_tokenizer(["some words"], 280, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    if damage == "not a tokenizer":
        tokenizer_file.write_cached(path, "{}")
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    assert cached_tokenizer(["some words"], 280, tmp_path).get_vocab() == first.get_vocab()
    assert len(trainings) == 2
    assert path.read_bytes() == whole


def test_a_tokenizer_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert len(cached_tokenizer(["a"], 258, tmp_path / "file" / "cache")) == 258
    monkeypatch.setattr(tokenizer_file, "cache_folder", lambda cache_dir: None)
    assert len(cached_tokenizer(["a"], 258)) == 258


# --- encoding


@pytest.mark.parametrize("response", ODD_TEXTS)
def test_labels_are_the_response_and_the_end_token(tokenizer, response):
    instruction, given = "Say 🦙", "שלום"
    example = encode(from_alpaca(instruction, given, response), tokenizer, 1000)
    ids = labelled(example)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1  # spelled out in the data it is plain text
    assert tokenizer.decode(ids[:-1]) == response
    assert example.input_ids[-len(ids) :] == example.labels[-len(ids) :] == ids
    prompt = tokenizer.decode(example.input_ids[: -len(ids)])
    assert prompt == f"### Instruction:\n{instruction}\n\n### Input:\n{given}\n\n### Response:\n"


def test_every_answer_of_a_chat_ends_with_the_end_token(tokenizer):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    example = encode(from_messages(chat), tokenizer, 1000)
    assert tokenizer.decode(labelled(example)) == f"b{END_TOKEN}b{END_TOKEN}"


def test_examples_are_cut_to_seq_len(tokenizer):
    record = from_alpaca("a", "", "word " * 100)
    whole = encode(record, tokenizer, 10_000)
    cut = encode(record, tokenizer, 64)
    assert len(whole.input_ids) > len(cut.input_ids) == len(cut.labels) == 64
    assert cut.input_ids == whole.input_ids[:64]
    assert cut.labels == whole.labels[:64]
    assert cut.labels[-1] != tokenizer.eos_token_id


def test_a_record_without_any_response_left_is_dropped_and_counted(tokenizer):
    fits, long = from_alpaca("a", "", "b"), from_alpaca("word " * 100, "", "b")
    assert not encode(long, tokenizer, 64).learns
    examples, dropped = encode_all([long, fits, long], tokenizer, 64)
    assert examples == [encode(fits, tokenizer, 64)]
    assert dropped == 2
    assert encode_all([], tokenizer, 64) == ([], 0)


def test_a_label_that_nothing_precedes_does_not_count_as_learning(tokenizer):
    assert not encode((("", True),), tokenizer, 64).learns
    assert not encode((), tokenizer, 64).learns


def test_batched_encoding_equals_one_by_one(tokenizer, monkeypatch):
    monkeypatch.setattr(sys.modules["lightning_sonar.data.encode"], "_CHUNK", 3)
    records = [from_alpaca(f"a{n}", "", f"b{n}" * n) for n in range(10)]
    assert encode_all(records, tokenizer, 64)[0] == [encode(record, tokenizer, 64) for record in records]


def test_a_start_token_is_written_only_if_the_tokenizer_writes_it():
    trained = train_tokenizer(["a"], 258)
    trained.add_special_tokens({"bos_token": "<|start|>"})
    record = from_alpaca("a", "", "b")
    assert encode(record, trained, 64).input_ids[0] != trained.bos_token_id
    trained.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", trained.bos_token_id)]
    )
    example = encode(record, trained, 64)
    assert example.input_ids.count(trained.bos_token_id) == 1
    assert (example.input_ids[0], example.labels[0]) == (trained.bos_token_id, IGNORED)


def test_a_tokenizer_without_an_end_token_is_refused():
    trained = train_tokenizer(["a"], 258)
    trained.eos_token = None
    with pytest.raises(DataError, match=r"no end token; set tokenizer\.eos_token"):
        encode(from_alpaca("a", "", "b"), trained, 64)


# --- batches


def test_batches_are_padded_on_the_right_and_masked():
    batch = collate([Example([5, 6, 7], [IGNORED, 6, 7]), Example([8], [IGNORED])], pad_id=1)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 1, 1]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[IGNORED, 6, 7], [IGNORED, IGNORED, IGNORED]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_batches_are_padded_to_a_fixed_length():
    batch = collate([Example([5, 6], [IGNORED, 6])], pad_id=0, pad_to=4)
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 6, IGNORED, IGNORED]]
    with pytest.raises(DataError, match="pad_to=1, but an example has 2 tokens; encode with seq_len=1"):
        collate([Example([5, 6], [IGNORED, 6])], pad_id=0, pad_to=1)


# --- the data module


def test_the_builtin_data_has_about_six_thousand_records(builtin_data, builtin_cache):
    records = builtin_records(builtin_cache)
    assert 4_500 < len(records) < 9_000
    assert len(set(records)) == len(records)
    assert any("of json.decoder" in prompt for ((prompt, _), _) in records)
    assert len(builtin_data.heldout_set) == min(512, len(records) // 10)
    assert builtin_data.train_dropped + builtin_data.heldout_dropped == 0
    assert builtin_data.vocab_size == len(builtin_data.tokenizer) == 4096
    assert max(len(example.input_ids) for example in builtin_data.train_set) <= 256


def test_no_heldout_example_is_in_training(builtin_data):
    heldout = {tuple(example.input_ids) for example in builtin_data.heldout_set}
    training = {tuple(example.input_ids) for example in builtin_data.train_set}
    assert heldout
    assert training
    assert not heldout & training


def test_copies_of_heldout_records_leave_training(tmp_path):
    records = [from_alpaca(str(number % 25), "", "x") for number in range(100)]
    training, heldout = module_file.split(records, 512)
    assert len(heldout) == 10
    assert not set(heldout) & set(training)
    assert set(heldout) | set(training) == set(records)
    assert len(training) == sum(record not in heldout for record in records)


def test_examples_made_equal_by_cutting_leave_training_too(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    rows = [{"instruction": f"{n % 12}", "output": "long " * 50 + str(n)} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = json_data(str(path), tmp_path, seq_len=64, tokenizer=tokenizer)
    data.setup()
    heldout = {tuple(example.input_ids) for example in data.heldout_set}
    assert len(data.train_set) == 60 - 5 * len(heldout)
    assert not heldout & {tuple(example.input_ids) for example in data.train_set}


def test_the_tokenizer_is_trained_on_the_training_part_only(rows_file, tmp_path, monkeypatch):
    seen = []

    def spy(texts, vocab_size, cache_dir):
        seen.extend(texts)
        return cached_tokenizer(texts, vocab_size, cache_dir)

    monkeypatch.setattr(module_file, "cached_tokenizer", spy)
    data = json_data(rows_file, tmp_path)
    data.setup()
    heldout = [data.tokenizer.decode(labelled(example)[:-1]) for example in data.heldout_set]
    assert len(heldout) == 6
    assert len(seen) == 2 * 54
    assert not set(heldout) & set(seen)


def test_a_given_tokenizer_is_used(rows_file, tmp_path, tokenizer):
    data = json_data(rows_file, tmp_path, tokenizer=tokenizer)
    data.setup()
    assert data.tokenizer is tokenizer
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_without_pad_token_still_pads(rows_file, tmp_path):
    bare = train_tokenizer(["a"], 258)
    bare.pad_token = None
    data = json_data(rows_file, tmp_path, tokenizer=bare)
    data.setup()
    assert next(iter(data.val_dataloader()))["input_ids"].shape == (6, 256)


def order(data):
    return [batch["input_ids"].tolist() for batch in data.train_dataloader()]


def rows_of(data):
    return [row for batch in order(data) for row in batch]


def test_the_seed_changes_the_order_of_training_and_nothing_else(rows_file, tmp_path):
    first, again, other = (json_data(rows_file, tmp_path, seed=seed) for seed in (0, 0, 1))
    for data in (first, again, other):
        data.setup()
    assert first.heldout_set == other.heldout_set
    assert first.train_set == other.train_set
    assert order(first) == order(again) != order(other)
    assert sorted(rows_of(first)) == sorted(rows_of(other))


def test_epochs_differ_and_validation_keeps_its_order(rows_file, tmp_path):
    data = json_data(rows_file, tmp_path, eval_batch_size=4)
    data.setup()
    loader = data.train_dataloader()
    assert [b["input_ids"].tolist() for b in loader] != [b["input_ids"].tolist() for b in loader]
    ids = [row for batch in data.val_dataloader() for row in batch["input_ids"].tolist()]
    assert [row[: len(e.input_ids)] for row, e in zip(ids, data.heldout_set, strict=True)] == [
        example.input_ids for example in data.heldout_set
    ]


def test_training_batches_are_full_and_of_constant_shape(rows_file, tmp_path):
    data = json_data(rows_file, tmp_path, batch_size=7, seq_len=80)
    data.setup()
    shapes = [batch["labels"].shape for batch in data.train_dataloader()]
    assert shapes == [(7, 80)] * (54 // 7)
    data.pad_to_seq_len = False
    widths = {batch["labels"].shape[1] for batch in data.val_dataloader()}
    assert widths == {max(len(example.input_ids) for example in data.heldout_set)}


def test_worker_processes_give_the_same_batches(rows_file, tmp_path, capfd):
    data = json_data(rows_file, tmp_path, max_records=20)
    data.setup()
    alone = order(data)
    data.num_workers = 1
    assert order(data) == alone
    assert "huggingface/tokenizers" not in capfd.readouterr().err


def test_setup_runs_once_whatever_the_stage(rows_file, tmp_path):
    data = json_data(rows_file, tmp_path)
    data.prepare_data()
    data.setup("fit")
    kept = data.train_set, data.heldout_set, data.tokenizer
    Path(rows_file).unlink()
    data.setup("validate")
    assert all(a is b for a, b in zip(kept, (data.train_set, data.heldout_set, data.tokenizer), strict=True))


def test_nothing_is_there_before_setup(rows_file, tmp_path):
    data = json_data(rows_file, tmp_path)
    for name in ("tokenizer", "vocab_size", "train_set", "heldout_set"):
        with pytest.raises(RuntimeError, match=rf"InstructionData\.{name} exists after setup\(\)"):
            getattr(data, name)
    assert str(data)  # Lightning prints a data module by asking for its loaders


def test_only_the_first_max_records_are_used(rows_file, tmp_path):
    data = json_data(rows_file, tmp_path, max_records=20)
    data.setup()
    assert (len(data.train_set), len(data.heldout_set)) == (18, 2)


def test_two_records_are_enough_and_one_is_not(tmp_path):
    data = json_data(write_rows(tmp_path / "two.jsonl", 2), tmp_path, batch_size=1)
    data.setup()
    assert (len(data.train_set), len(data.heldout_set)) == (1, 1)
    data = json_data(write_rows(tmp_path / "one.jsonl", 1), tmp_path)
    with pytest.raises(DataError, match=r"one\.jsonl: only 1 record; expected at least 2"):
        data.setup()


def test_the_alpaca_source_reads_the_hub(tmp_path, tokenizer, monkeypatch):
    records = [from_alpaca(str(number), "", "x") for number in range(20)]
    monkeypatch.setattr(module_file, "load_alpaca", lambda: records)
    data = InstructionData("alpaca", tokenizer=tokenizer)
    data.setup()
    assert len(data.train_set) == 18


def test_too_few_training_examples_name_the_batch_size(rows_file, tmp_path):
    data = json_data(rows_file, tmp_path, batch_size=55)
    with pytest.raises(DataError, match=r"batch_size=55, but only 54 .*60 records, 6 held out.*smaller batch"):
        data.setup()


def test_no_heldout_example_left_names_seq_len(rows_file, tmp_path):
    data = json_data(rows_file, tmp_path, seq_len=4)
    with pytest.raises(DataError, match=r"no held-out example.*60 dropped .* seq_len=4.*larger seq_len"):
        data.setup()


def test_losing_much_of_the_data_is_said_out_loud(tmp_path, tokenizer, caplog):
    path = tmp_path / "a.jsonl"
    rows = [{"instruction": "word " * (n % 2 * 80) + str(n), "output": "b"} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = json_data(str(path), tmp_path, seq_len=64, tokenizer=tokenizer)
    with caplog.at_level(logging.WARNING):
        data.setup()
    assert data.train_dropped + data.heldout_dropped == 30
    assert "30 dropped because their prompt fills seq_len=64" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "csv"}, r"source='csv': expected one of builtin, json, alpaca"),
        ({"source": "json"}, r"source='json' needs path"),
        ({"path": "a.json"}, r"path='a.json' is read only with source='json', but source='builtin'"),
        ({"seq_len": 1}, r"seq_len=1: expected at least 2"),
        ({"batch_size": 0}, r"batch_size=0: expected at least 1"),
        ({"eval_batch_size": 0}, r"eval_batch_size=0: expected at least 1"),
        ({"heldout_size": 0}, r"heldout_size=0: expected at least 1"),
        ({"num_workers": -1}, r"num_workers=-1: expected at least 0"),
        ({"max_records": 1}, r"max_records=1: expected at least 2"),
    ],
)
def test_a_bad_argument_is_named_at_once(arguments, message):
    with pytest.raises(DataError, match=message):
        InstructionData(**arguments)


class Counter(pl.LightningModule):
    """The least that a Trainer accepts."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.shapes = []

    def training_step(self, batch, batch_idx):
        self.shapes.append(tuple(batch["input_ids"].shape))
        return self.weight * batch["labels"].float().mean()

    def validation_step(self, batch, batch_idx):
        assert batch["attention_mask"].any()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own, under new torch
def test_a_trainer_takes_it(rows_file, tmp_path):
    model = Counter()
    trainer = pl.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, json_data(rows_file, tmp_path, seq_len=32))
    assert model.shapes == [(2, 32)] * 3
