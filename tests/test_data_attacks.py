"""Data that is broken, odd or out of reach: it trains as it is meant, or one message names file, place and remedy."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import logging
import lzma
import os
import random
import re
import struct
import sys
import types
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lightning_sonar.data import (
    IGNORED,
    DataError,
    InstructionData,
    from_alpaca,
    load_alpaca,
    read_records,
    train_tokenizer,
)
from lightning_sonar.data.tokenizer import _pieces

ROW = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
OTHER = {"instruction": "Subtract.", "output": "مرحبا 🦙"}
RECORDS = [from_alpaca("Add.", "1 and 2", "3"), from_alpaca("Subtract.", "", "مرحبا 🦙")]
LINE, LINE_2 = (json.dumps(row, ensure_ascii=False).encode() for row in (ROW, OTHER))
MARK = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f"word {number} ### Response:\n" for number in range(50)], 300)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def rows_of(path: Path, rows: list[dict]) -> Path:
    return write(path, "\n".join(json.dumps(row) for row in rows).encode())


def refused(path: object) -> str:
    """The one line in which a file is refused."""
    with pytest.raises(DataError) as caught:
        read_records(path)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "expected" in message
    return message


def outcome(path: Path) -> list | str:
    """The records of a file, or the line in which it is refused."""
    try:
        return read_records(path)
    except DataError as error:
        said = str(error)
    assert str(path) in said
    assert "\n" not in said
    return said


def set_up(path: Path, tmp_path: Path, **options) -> InstructionData:
    data = InstructionData("json", str(path), cache_dir=str(tmp_path / "cache"), **{"seq_len": 128, **options})
    data.setup()
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()))
    return data


# --- encodings and line ends


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("joined.jsonl", MARK + LINE + b"\n" + MARK + LINE_2 + b"\n"),
        ("mark_crlf.jsonl", MARK + LINE + b"\r\n" + LINE_2 + b"\r\n"),
        ("old_mac.jsonl", LINE + b"\r" + LINE_2 + b"\r"),
        ("old_mac.json", LINE + b"\r" + LINE_2),
        ("mixed.jsonl", LINE + b"\r\n\r\r\n" + LINE_2 + b"\r"),
        ("mark_cr.json", MARK + b"[\r" + LINE + b",\r" + LINE_2 + b"\r]\r"),
        ("escaped.jsonl", LINE + b"\n" + json.dumps(OTHER).encode()),
        ("spaces.jsonl", b"  \t\n " + LINE + b"  \n\n\t" + LINE_2 + b" \n \n"),
    ],
)
def test_marks_and_line_ends_of_any_system_give_the_same_records(tmp_path, name, data):
    assert read_records(write(tmp_path / name, data)) == RECORDS


def packed(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.jsonl", data)
    return buffer.getvalue()


TEXT = LINE.decode()


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (TEXT.encode("utf-16"), "line 1: not UTF-8 .*UTF-16.*convert the file"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), "line 1: not UTF-8 .*UTF-16.*convert the file"),
        (TEXT.encode("utf-32"), "line 1: not UTF-8 .*UTF-32.*convert the file"),
        (TEXT.encode("utf-16-le"), "line 1: holds a NUL byte, as UTF-16 does.*convert the file"),
        (TEXT.encode("utf-16-be"), "line 1: holds a NUL byte"),
        (LINE + b"\n" + LINE_2 + b"\n" + bytes(512), "line 3: holds a NUL byte.*crash.*write it anew"),
        (LINE + b"\n" + TEXT.encode("latin-1") + b"\xe9", "line 2: not UTF-8 .*convert the file"),
        (LINE + b"\n" + "é".encode()[:1], "line 2: not UTF-8"),
        (b"\xed\xa0\x80" + LINE, "line 1: not UTF-8"),  # half of a pair, as some write it
        (gzip.compress(LINE), "compressed by gzip.*unpack"),
        (bz2.compress(LINE), "compressed by bzip2.*unpack"),
        (lzma.compress(LINE), "compressed by xz.*unpack"),
        (b"\x28\xb5\x2f\xfd" + LINE, "compressed by zstd.*unpack"),
        (packed(LINE), "a zip archive.*unpack"),
        (b"PAR1" + LINE, r"is Parquet; name it \.parquet"),
    ],
)
def test_another_encoding_or_kind_of_file_is_named_with_the_remedy(tmp_path, suffix, data, says):
    assert re.search(says, refused(write(tmp_path / f"data{suffix}", data)))


@pytest.mark.parametrize("data", [b"", MARK, b"\n", MARK + b"\r\n\r", b" \t "])
@pytest.mark.parametrize("name", ["none.jsonl", "none.json"])
def test_a_file_of_nothing_says_so(tmp_path, name, data):
    assert "holds no records" in refused(write(tmp_path / name, data))


# --- broken and odd JSON


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (LINE + b"\n" + b'{"instruction": "a", "output": "b", "output": "c"}', "line 2: the key 'output' stands twice"),
        (b'{"instruction": "a", "output": "b", "output": "b"}', "line 1: the key 'output' stands twice"),
        (b'{"x": [{"y": {"z": 1, "z": 2}}], "instruction": "a", "output": "b"}', "the key 'z' stands twice"),
        (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "the key 'role' stands twice"),
        (b'{"instruction": 1' + b"0" * 5000 + b"}", "line 1: broken JSON"),
        (b'{"instruction": NaN, "output": "b"}', "line 1: 'instruction' is of type float"),
        (b'{"instruction": true, "output": "b"}', "line 1: 'instruction' is of type bool"),
        (b'{"instruction": {"a": 1}, "output": "b"}', "line 1: 'instruction' is of type dict"),
        (b'{"instruction": "a\tb\x01", "output": "b"}', "line 1: broken JSON .*control character"),
        (b'{"instruction": "a", "output": "\\ud83d"}', "line 1: .*half of a surrogate pair"),
        (b'{"instruction": "\\udc00", "output": "b"}', "line 1: .*half of a surrogate pair"),
        (b'{"\\ud83d": 1}', "line 1: missing column: found .*ud83d"),
        (b'{"messages": [{"role": "\\ud83d", "content": "a"}, {"role": "assistant", "content": "b"}]}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "'content' of message 1 is of type list"),
        (b'{"Instruction": "a", "Output": "b"}', "found 'Instruction', 'Output'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "line 1: broken JSON .*git-lfs"),
        (b"<!DOCTYPE html><html></html>", "line 1: broken JSON .*DOCTYPE"),
        (b"null", "line 1: found a NoneType"),
        (LINE + b"," + LINE, "line 1: broken JSON .*one object a line"),
    ],
)
def test_a_broken_or_ambiguous_line_is_named_with_its_reason(tmp_path, data, says):
    assert re.search(says, refused(write(tmp_path / "data.jsonl", data)))


def test_a_key_that_stands_twice_is_found_in_lists_and_whole_files_too(tmp_path):
    twice = b'{"instruction": "a", "output": "b", "input": "", "input": "c"}'
    listed = refused(write(tmp_path / "list.json", b"[" + LINE + b", " + twice + b"]"))
    assert "record 2: the key 'input' stands twice" in listed
    assert "record 1: the key 'input' stands twice" in refused(write(tmp_path / "one.json", twice))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_a_file_cut_anywhere_gives_whole_records_or_an_error(tmp_path, kind):
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW, {**OTHER, "input": None}]), tmp_path / "whole")
        whole = (tmp_path / "whole").read_bytes()
    else:
        whole = LINE + b"\n" + LINE_2 if kind == "jsonl" else b"[" + LINE + b",\n" + LINE_2 + b"]"
    read = 0
    for size in range(0, len(whole), 9 if kind == "parquet" else 1):
        found = outcome(write(tmp_path / f"cut.{kind}", whole[:size]))
        if not isinstance(found, str):
            # Only lines can be whole without the rest; a file cut between them cannot be told from a shorter one.
            assert found == RECORDS[:1]
            assert whole[:size].rstrip() == LINE
            read += 1
    assert read == (2 if kind == "jsonl" else 0)
    assert read_records(write(tmp_path / f"cut.{kind}", whole)) == RECORDS


# --- Parquet


def test_damaged_parquet_gives_an_error_or_text_and_nothing_else(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 5), tmp_path / "whole")
    whole, chance = (tmp_path / "whole").read_bytes(), random.Random(0)
    errors = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        errors += isinstance(outcome(write(tmp_path / "damaged.parquet", bytes(damaged))), str)
    assert errors > 200


def parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_with_bytes_that_are_no_text_is_refused(tmp_path):
    broken = pyarrow.StringArray.from_buffers(
        2, pyarrow.py_buffer(struct.pack("<iii", 0, 1, 2)), pyarrow.py_buffer(b"\xffa")
    )
    said = refused(parquet(tmp_path / "a.parquet", instruction=broken, output=broken))
    assert "broken Parquet ('utf-8' codec can't decode" in said
    said = refused(parquet(tmp_path / "b.parquet", instruction=[b"a"], output=[b"b"]))
    assert "record 1: 'instruction' is of type bytes" in said


def test_a_parquet_column_that_stands_twice_is_refused(tmp_path):
    arrays = [pyarrow.array([text]) for text in "abc"]
    table = pyarrow.Table.from_arrays(arrays, names=["instruction", "output", "output"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "the column 'output' stands twice" in refused(tmp_path / "a.parquet")


def test_other_columns_of_parquet_do_not_matter_whatever_is_in_them(tmp_path):
    nanoseconds = pyarrow.array([1_700_000_000_000_000_001], pyarrow.timestamp("ns"))  # Python has no such time
    text = pyarrow.array(["a"]).dictionary_encode()
    path = parquet(tmp_path / "a.parquet", when=nanoseconds, instruction=text, output=pyarrow.array(["b"]))
    assert read_records(path) == [from_alpaca("a", "", "b")]
    said = refused(parquet(tmp_path / "b.parquet", when=nanoseconds, question=text))
    assert "record 1: missing column: found 'when', 'question'" in said
    assert "holds no records" in refused(parquet(tmp_path / "c.parquet", instruction=pyarrow.array([], "string")))


# --- what is no readable file


@pytest.mark.timeout(30)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_pipe_or_a_device_is_refused_and_never_waited_for(tmp_path, suffix):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"zeros{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        assert "is a pipe, a socket or a device" in refused(tmp_path / f"{name}{suffix}")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("~nobody-of-this-name/data.jsonl", "cannot be read .*home directory"),
        ("d" * 300 + ".jsonl", "cannot be read .*too long"),
        ("a\0b.jsonl", "cannot be read .*null byte"),
        ("nowhere/data.jsonl", "no such file"),
        (__file__ + "/data.jsonl", "no such file"),
        ("/", "is a directory"),
        ("/dev/null", "unsupported suffix"),
        (5, "of type int"),
        (["a.jsonl"], "of type list"),
        (None, "of type NoneType"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_in_one_line(path, says):
    assert re.search(says, refused(path))


def test_a_dangling_link_and_a_circle_of_links_are_refused(tmp_path):
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "circle.jsonl").symlink_to(tmp_path / "circle.jsonl")
    assert "no such file" in refused(tmp_path / "dangling.jsonl")
    assert "cannot be read" in refused(tmp_path / "circle.jsonl")


@pytest.mark.parametrize("method", ["stat", "read_bytes"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_that_the_system_does_not_give_out_is_named_with_its_reason(tmp_path, monkeypatch, method, number):
    path = write(tmp_path / "a.jsonl", LINE)

    def refuse(self, **_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(type(path), method, refuse)
    assert f"cannot be read ({os.strerror(number)})" in refused(path)


def test_an_error_that_says_nothing_is_named_by_its_kind(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", LINE)

    def refuse(self):
        raise OSError

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    assert "cannot be read (OSError)" in refused(path)


# --- odd text trains as it stands

ODD = [
    "👩‍👩‍👧‍👦🏳️‍🌈🦙" * 3,
    "مرحبا بالعالم \u202eabc\u202c שלום",
    "a\x00b\x1b[31m\x7f",
    "line\u2028separator\u2029and\x85next",
    "\ufeffmark\u200binside\u00ad",
    "e\u0301 ﬁ ½ \U0010ffff \ufffd",
    "  leading\ttabs \r\n and ends  \n\n",
    "<|end|> <|pad|> </s> ### Response:\n",
    "'; DROP TABLE records; -- {{7*7}} ${jndi:x} %s",
]


@pytest.mark.parametrize("escape", [True, False])
def test_any_text_reaches_the_labels_unchanged(tmp_path, escape):
    rows = [{"instruction": text, "output": f"{text} {number}"} for number, text in enumerate(ODD * 2)]
    text = "\n".join(json.dumps(row, ensure_ascii=escape) for row in rows)
    data = set_up(write(tmp_path / "odd.jsonl", text.encode()), tmp_path, seq_len=1024, batch_size=1)
    learnt = [
        data.tokenizer.decode([label for label in example.labels if label != IGNORED][:-1])
        for example in (*data.train_set, *data.heldout_set)
    ]
    assert sorted(learnt) == sorted(row["output"] for row in rows)


@pytest.mark.parametrize("long", ["x" * 100_000, "word " * 20_000, "🦙" * 25_000, "מ" * 100_000])
def test_a_record_of_100000_characters_is_cut_or_dropped_and_counted(tmp_path, tokenizer, caplog, long):
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(30)]
    rows[7]["output"], rows[8]["output"], rows[9]["instruction"] = long, f"{long}!", long
    with caplog.at_level(logging.INFO, logger="lightning_sonar"):
        data = set_up(rows_of(tmp_path / "long.jsonl", rows), tmp_path, tokenizer=tokenizer)
    examples = [*data.train_set, *data.heldout_set]
    assert max(len(example.input_ids) for example in examples) == 128
    assert [example.cut for example in examples].count(True) == 2
    assert data.train_dropped + data.heldout_dropped == 1
    assert "30 records, 3 held out, 0 left out as copies of these, 1 dropped because" in caplog.text
    assert "seq_len=128, 2 cut to it; 26 training examples" in caplog.text


def test_only_words_of_more_than_512_characters_are_cut_for_training():
    for text in ("", "a b", "x" * 511, "x" * 512 + " y", "a " + "🦙" * 1500 + " b", " " * 2000, "word\n" * 500):
        pieces = list(_pieces(text))
        assert "".join(pieces) == text
        assert (len(pieces) == 1) == (max(map(len, re.findall(r"\S+|\s+", text)), default=0) < 512)


@pytest.mark.timeout(60)
def test_a_tokenizer_is_trained_on_100000_characters_without_a_space(tmp_path):
    rows = [{"instruction": f"Say {n}.", "output": "ab" * 50_000 if n < 2 else f"{n}"} for n in range(30)]
    data = set_up(rows_of(tmp_path / "long.jsonl", rows), tmp_path, vocab_size=300)
    assert data.vocab_size <= 300


# --- few records, empty ones, copies


def test_empty_responses_teach_to_end_and_are_counted(tmp_path, tokenizer, caplog):
    rows = [{"instruction": f"Say {n}.", "output": "" if n < 2 else f"It is {n}."} for n in range(40)]
    with caplog.at_level(logging.INFO, logger="lightning_sonar"):
        data = set_up(rows_of(tmp_path / "a.jsonl", rows), tmp_path, tokenizer=tokenizer)
    shortest = min((example for example in data.train_set), key=lambda e: sum(label != IGNORED for label in e.labels))
    assert [label for label in shortest.labels if label != IGNORED] == [tokenizer.eos_token_id]
    assert "2 with an empty response, which teach to end at once" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("empty", ["", "  \n\t "])
def test_a_file_in_which_every_response_is_empty_is_warned_of(tmp_path, tokenizer, caplog, empty):
    rows = [{"instruction": f"Say {n}.", "output": empty} for n in range(40)]
    with caplog.at_level(logging.WARNING, logger="lightning_sonar"):
        set_up(rows_of(tmp_path / "a.jsonl", rows), tmp_path, tokenizer=tokenizer)
    assert "40 with an empty response" in caplog.text


def test_an_empty_prompt_trains(tmp_path, tokenizer):
    rows = [{"instruction": "", "input": "", "output": f"It is {n}."} for n in range(20)]
    assert len(set_up(rows_of(tmp_path / "a.jsonl", rows), tmp_path, tokenizer=tokenizer).train_set) == 18


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([ROW], "only 1 record; expected at least 2, one to train on and one to hold out"),
        ([ROW] * 2, "only 0 training examples are left .*1 held out, 1 left out as copies.*or more data"),
        ([ROW] * 500, "only 0 training examples are left .*50 held out, 450 left out as copies.*or more data"),
        ([ROW, OTHER], "only 1 training examples are left .*use a smaller batch_size"),
    ],
)
def test_too_few_different_records_are_counted_in_the_error(tmp_path, tokenizer, rows, says):
    with pytest.raises(DataError, match=says) as caught:
        set_up(rows_of(tmp_path / "a.jsonl", rows), tmp_path, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)


def test_copies_are_counted_in_what_is_said(tmp_path, tokenizer, caplog):
    rows = [{"instruction": f"Say {n % 20}.", "output": f"It is {n % 20}."} for n in range(40)]
    with caplog.at_level(logging.INFO, logger="lightning_sonar"):
        data = set_up(rows_of(tmp_path / "a.jsonl", rows), tmp_path, tokenizer=tokenizer)
    copies = 40 - len(data.train_set) - len(data.heldout_set)
    assert copies > 0
    assert f"4 held out, {copies} left out as copies of these" in caplog.text


@pytest.mark.parametrize("name", ["seq_len", "batch_size", "eval_batch_size", "heldout_size", "num_workers"])
@pytest.mark.parametrize("value", ["2", 2.5, True, [2]])
def test_a_count_that_is_no_whole_number_is_refused(name, value):
    with pytest.raises(DataError, match=rf"{name}={re.escape(repr(value))}: expected a whole number, at least"):
        InstructionData(**{name: value})


@pytest.mark.parametrize("options", [{"source": "json", "path": 5}, {"cache_dir": ["a"]}])
def test_a_name_that_is_no_text_is_refused(options):
    with pytest.raises(DataError, match=r"is of type (int|list); expected the name of one (file|folder)$"):
        InstructionData(**options)


# --- the hub


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "record 2: missing column: found 'text'"),
        ({**ROW, "output": None}, "record 2: 'output' is null"),
        ({**ROW, "instruction": 3}, "record 2: 'instruction' is of type int"),
    ],
)
def test_a_data_set_of_the_hub_that_has_changed_is_explained(monkeypatch, row, says):
    there = types.SimpleNamespace(load_dataset=lambda name, split: [ROW, row])
    monkeypatch.setitem(sys.modules, "datasets", there)
    with pytest.raises(DataError, match=f"tatsu-lab/alpaca, {says}.*Instead use data=builtin"):
        load_alpaca()
