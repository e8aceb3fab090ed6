"""Where records come from: local files, the standard library, the hub, the cache."""

import json
import platform
import sys
import types
import warnings

import pytest

from lightning_sonar.data import (
    DataError,
    builtin,
    builtin_records,
    from_alpaca,
    from_messages,
    load_alpaca,
    read_records,
)
from lightning_sonar.data.cache import cache_folder, read_cached, write_cached

ROW = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
RECORD = from_alpaca("Add.", "1 and 2", "3")
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


# --- records


def test_only_the_output_of_an_alpaca_record_counts():
    assert [counts for _, counts in RECORD] == [False, True]
    assert RECORD[0][0] == "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n"
    assert RECORD[1][0] == "3"


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_input_leaves_no_heading(empty):
    assert from_alpaca("Add.", empty, "3")[0][0] == "### Instruction:\nAdd.\n\n### Response:\n"


def test_a_chat_of_one_turn_equals_the_alpaca_record():
    assert from_messages(CHAT) == from_alpaca("Hi", "", "Hello")


def test_every_answer_of_a_chat_counts_and_nothing_else():
    more = [{"role": "system", "content": "Be kind."}, *CHAT, *CHAT, {"role": "user", "content": "Bye"}]
    record = from_messages(more)
    assert [text for text, counts in record if counts] == ["Hello", "Hello"]
    prompts = [text for text, counts in record if not counts]
    assert prompts == [
        "### System:\nBe kind.\n\n### Instruction:\nHi\n\n### Response:\n",
        "\n\n### Instruction:\nHi\n\n### Response:\n",
    ]


def test_sharegpt_and_content_parts_are_chats_too():
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    parts = [CHAT[0], {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]}]
    assert from_messages(sharegpt) == from_messages(parts) == from_messages(CHAT)


# --- files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.jsonl", json.dumps(ROW) + "\n"),
        ("bom_crlf.jsonl", b"\xef\xbb\xbf" + json.dumps(ROW).encode() + b"\r\n\r\n  \r\n"),
        ("list.json", json.dumps([ROW], indent=2)),
        ("bom.json", b"\xef\xbb\xbf" + json.dumps([ROW]).encode()),
        ("lines.json", json.dumps(ROW) + "\n"),
        ("one.json", json.dumps(ROW, indent=2)),
        ("UPPER.JSONL", json.dumps(ROW)),
    ],
)
def test_json_in_any_shape_is_read(tmp_path, name, text):
    assert read_records(write(tmp_path / name, text)) == [RECORD]


def test_lines_end_only_at_line_feeds(tmp_path):
    row = {"instruction": "a\u2028b\x85c", "output": "d\u2029e"}
    path = write(tmp_path / "a.jsonl", json.dumps(row, ensure_ascii=False) + "\n" + json.dumps(ROW))
    assert read_records(path) == [from_alpaca(row["instruction"], "", row["output"]), RECORD]


def test_json_with_one_object_a_line_is_read_beyond_its_first_line(tmp_path):
    path = write(tmp_path / "a.json", f"{json.dumps(ROW)}\n{json.dumps({'messages': CHAT})}\n")
    assert read_records(path) == [RECORD, from_messages(CHAT)]


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_chat_columns_are_read(tmp_path, column):
    assert read_records(write(tmp_path / "a.jsonl", json.dumps({"id": 1, column: CHAT}))) == [from_messages(CHAT)]


def test_parquet_is_read_in_both_formats(tmp_path):
    rows = [ROW, {"instruction": "Say", "input": None, "output": "مرحبا 🦙"}]
    folder = tmp_path / "part=7"  # must not become a column
    folder.mkdir()
    expected = [RECORD, from_alpaca("Say", "", "مرحبا 🦙")]
    assert read_records(write_parquet(folder / "a.parquet", rows)) == expected
    assert read_records(write_parquet(tmp_path / "c.parquet", [{"messages": CHAT}])) == [from_messages(CHAT)]


def one(**changes):
    return json.dumps({**ROW, **changes})


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("empty.jsonl", "", ["holds no records", "'instruction', 'output'"]),
        ("blank.json", " \n\r\n", ["holds no records"]),
        ("empty_list.json", "[]", ["holds no records"]),
        (
            "broken.jsonl",
            one() + "\n\n{'a': 1}\n",
            ["broken.jsonl, line 3", "broken JSON", "one object a line"],
        ),
        ("cut.jsonl", one() + "\n" + one()[:-9], ["cut.jsonl, line 2", "broken JSON"]),
        (
            "cut.json",
            "[" + one() + ",\n" + one()[:-9],
            ["cut.json, line 2", "broken JSON", "list of objects"],
        ),
        ("deep.json", "[" * 100_000, ["deep.json", "broken JSON"]),
        ("deep.jsonl", '{"a":' * 100_000, ["deep.jsonl, line 1", "broken JSON"]),
        (
            "column.jsonl",
            one() + '\n{"question": "?", "answer": "!"}',
            ["column.jsonl, line 2", "missing column", "found 'question', 'answer'", "'messages'"],
        ),
        (
            "column.json",
            '[{"instruction": "a"}]',
            ["column.json, record 1", "found 'instruction'", "'output'"],
        ),
        ("none.jsonl", "{}", ["line 1", "found none"]),
        ("number.jsonl", one(output=3), ["line 1", "'output' is of type int", "expected text"]),
        ("null.jsonl", one(output=None), ["line 1", "'output' is null", "expected text"]),
        ("null_first.jsonl", one(instruction=None), ["line 1", "'instruction' is null"]),
        ("list.jsonl", one(input=["a"]), ["line 1", "'input' is of type list", "expected text"]),
        ("rows.jsonl", "[1]", ["line 1", "found a list", "expected an object"]),
        ("rows.json", '["a"]', ["record 1", "found a str", "expected an object"]),
        (
            "chat_text.jsonl",
            '{"messages": "Hi"}',
            ["line 1", "'messages' is of type str", "list of messages"],
        ),
        (
            "chat_item.jsonl",
            '{"messages": ["Hi"]}',
            ["line 1", "message 1 is of type str", "role and content"],
        ),
        ("chat_keys.jsonl", '{"messages": [{"text": "Hi"}]}', ["message 1 has the keys 'text'", "'role'"]),
        ("chat_empty_keys.jsonl", '{"messages": [{}]}', ["message 1 has the keys none"]),
        ("chat_role.jsonl", '{"messages": [{"role": "", "content": "a"}]}', ["'role' of message 1 is empty"]),
        (
            "chat_null.jsonl",
            '{"messages": [{"role": "assistant", "content": null}]}',
            ["line 1", "'content' of message 1 is null", "expected text"],
        ),
        (
            "chat_silent.jsonl",
            json.dumps({"messages": CHAT[:1]}),
            ["no assistant message (1 in all)", "expected"],
        ),
        ("chat_none.jsonl", '{"messages": []}', ["no assistant message (0 in all)"]),
        (
            "half.jsonl",
            r'{"instruction": "a", "output": "b\ud83d"}',
            ["line 1", "surrogate", "valid Unicode"],
        ),
        ("latin.jsonl", one().encode() + b"\n\xe9", ["latin.jsonl, line 2", "not UTF-8", "convert"]),
        ("wide.json", one().encode("utf-16"), ["wide.json, line 1", "not UTF-8"]),
        (
            "broken.parquet",
            "PAR1 but not really",
            ["broken.parquet", "broken Parquet", "expected a Parquet file"],
        ),
        ("data.csv", "a,b", ["unsupported suffix '.csv'", ".json, .jsonl, .parquet"]),
        ("data", "a,b", ["unsupported suffix ''", ".json, .jsonl, .parquet"]),
    ],
)
def test_a_bad_file_is_named_with_place_and_expectation(tmp_path, name, text, parts):
    path = write(tmp_path / name, text)
    with pytest.raises(DataError) as caught:
        read_records(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: no such file \(looked in .*\); expected a \.jsonl file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(DataError, match=r"folder\.json: is a directory; expected one file"):
        read_records(tmp_path / "folder.json")


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.json", "[]")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a\.json: cannot be read \(Permission denied\)"):
        read_records(path)


def test_parquet_errors_name_record_and_columns(tmp_path):
    with pytest.raises(DataError, match="record 1: missing column: found 'question', 'answer'"):
        read_records(write_parquet(tmp_path / "a.parquet", [{"question": "?", "answer": "!"}]))
    with pytest.raises(DataError, match="record 2: 'output' is null"):
        read_records(write_parquet(tmp_path / "b.parquet", [ROW, {**ROW, "output": None}]))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", "")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs the package 'pyarrow'"):
        read_records(path)


# --- the hub


def hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_alpaca_comes_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [ROW]

    hub(monkeypatch, load_dataset)
    assert load_alpaca() == [RECORD]
    assert asked == [("tatsu-lab/alpaca", "train")]


def test_an_unreachable_hub_says_what_to_use_instead(monkeypatch):
    def load_dataset(name, split):
        raise ConnectionError("Couldn't reach the hub")

    hub(monkeypatch, load_dataset)
    with pytest.raises(DataError, match=r"ConnectionError: Couldn't reach.*data=builtin.*data=json data\.path="):
        load_alpaca()


def test_alpaca_without_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the package 'datasets'.*data=builtin"):
        load_alpaca()


# --- the standard library, on a small stand-in for it

SOURCE = '''
import sys

def free(a, /, b: int = 3, *args, c=None, **kwargs) -> str:
    """Return something long enough to count."""

class Box(dict, metaclass=type):
    """A box that holds whatever is put into it."""

    async def open(self):
        """Open the box and wait until it is open."""
        def inner():
            """A function inside a method of a class."""

    def short(self):
        """Too short."""

    def copy(self):
        """Return something long enough to count."""

if sys.platform:
    try:
        def guarded():
            """Defined only under some condition."""
    except ImportError:
        pass

def half():
    """A lone surrogate \\ud83d is not text at all."""

PATTERN = "\\d"  # an invalid escape: Python warns when parsing it
'''


@pytest.fixture
def stdlib(tmp_path, monkeypatch):
    root = tmp_path / "stdlib"
    for folder in ("pkg", "test", "site-packages", "json/tests"):
        (root / folder).mkdir(parents=True)
        write(root / folder / "hidden.py", 'def hidden():\n    """This must be found in pkg only."""\n')
    write(root / "pkg" / "__init__.py", SOURCE)
    write(root / "broken.py", "def broken(:\n")
    write(root / "latin.py", b"# coding: no-such-codec\n")
    write(root / "nul.py", b"\0")
    monkeypatch.setattr(builtin, "_stdlib_folder", lambda: root)
    return root


@pytest.fixture
def extractions(monkeypatch):
    """Counts how often the source is parsed."""
    calls = []
    extract = builtin._extract

    def counted(root):
        calls.append(root)
        return extract(root)

    monkeypatch.setattr(builtin, "_extract", counted)
    return calls


def test_every_definition_asks_for_its_docstring_once(stdlib, tmp_path):
    def asked(kind, module, signature, output):
        return from_alpaca(f"Write the docstring of this {kind} of {module}.", signature, output)

    assert builtin_records(tmp_path / "cache") == [
        asked(
            "function",
            "pkg",
            "def free(a, /, b: int=3, *args, c=None, **kwargs) -> str",
            "Return something long enough to count.",
        ),
        asked("class", "pkg", "class Box(dict, metaclass=type)", "A box that holds whatever is put into it."),
        asked("method", "pkg", "async def Box.open(self)", "Open the box and wait until it is open."),
        asked("function", "pkg", "def Box.open.inner()", "A function inside a method of a class."),
        asked("function", "pkg", "def guarded()", "Defined only under some condition."),
        asked("function", "pkg.hidden", "def hidden()", "This must be found in pkg only."),
    ]


def test_parsing_odd_files_leaks_no_warning(stdlib, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        builtin_records(tmp_path / "cache")
    assert caught == []


def test_a_python_without_source_says_what_to_use_instead(stdlib, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "_stdlib_folder", lambda: tmp_path / "none")
    with pytest.raises(DataError, match=r"none: no docstrings found.*data=json data\.path="):
        builtin_records(tmp_path / "cache")


def test_the_second_call_reads_the_cache(stdlib, tmp_path, extractions):
    first = builtin_records(tmp_path / "cache")
    assert builtin_records(tmp_path / "cache") == first
    assert len(extractions) == 1


@pytest.mark.parametrize("keep", [0, 1, 40, 200, -1])
def test_a_cut_cache_is_rebuilt(stdlib, tmp_path, extractions, keep):
    first = builtin_records(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert builtin_records(tmp_path / "cache") == first
    assert len(extractions) == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]\n[]", b"null\n", b'{"sha256": "0"}\nabc'])
def test_a_cache_of_something_else_is_rebuilt(stdlib, tmp_path, extractions, content):
    first = builtin_records(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(content)
    assert builtin_records(tmp_path / "cache") == first
    assert len(extractions) == 2


def test_a_whole_cache_of_other_rows_is_rebuilt(stdlib, tmp_path, extractions):
    first = builtin_records(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    write_cached(path, '{"other": 1}\n')
    assert builtin_records(tmp_path / "cache") == first
    assert len(extractions) == 2


def test_another_python_version_rebuilds(stdlib, tmp_path, extractions, monkeypatch):
    builtin_records(tmp_path / "cache")
    monkeypatch.setattr(platform, "python_version", lambda: "9.9.9")
    builtin_records(tmp_path / "cache")
    assert len(extractions) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(stdlib, tmp_path, extractions):
    blocked = write(tmp_path / "file", "") / "cache"  # a folder below a file: not even root can make it
    assert builtin_records(blocked) == builtin_records(blocked) != []
    assert len(extractions) == 2


def test_no_home_is_no_error(stdlib, monkeypatch):
    monkeypatch.setattr(builtin, "cache_folder", lambda cache_dir: None)
    assert builtin_records()


# --- the cache


def test_the_cache_lies_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_sonar"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_folder() == tmp_path / "home" / ".cache" / "lightning_sonar"


def test_a_user_without_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("lightning_sonar.data.cache.Path.home", no_home)
    assert cache_folder() is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    assert write_cached(path, "old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert not write_cached(path, "new")
    assert read_cached(path) == "old"
    assert list(tmp_path.iterdir()) == [path]
