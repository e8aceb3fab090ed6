"""A cache folder that is full, read-only, half-written or shared by two runs: it costs time, never right data."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lightning_sonar.data import InstructionData, builtin, builtin_records, cached_tokenizer, train_tokenizer
from lightning_sonar.data import cache as cache_file
from lightning_sonar.data.cache import read_cached, write_cached

ROW = {"instruction": "Add.", "input": "1 and 2", "output": "3"}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def rows_of(path: Path, count: int) -> Path:
    rows = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(count)]
    return write(path, "\n".join(json.dumps(row) for row in rows).encode())


def set_up(path: Path, tmp_path: Path) -> InstructionData:
    data = InstructionData("json", path, cache_dir=tmp_path / "cache", seq_len=64, vocab_size=300)
    data.setup()
    next(iter(data.train_dataloader()))
    return data


def test_a_cached_file_cut_or_changed_anywhere_is_not_believed(tmp_path):
    path = tmp_path / "a.json"
    assert write_cached(path, json.dumps(ROW) * 2)
    whole = path.read_bytes()
    for size in range(len(whole)):
        assert read_cached(write(path, whole[:size])) is None
    for place in range(len(whole)):
        changed = bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]])
        # A letter of the checksum's own name, or a space around it, is no letter of the data.
        assert read_cached(write(path, changed)) in (None, json.dumps(ROW) * 2)
    body = whole.index(b"\n") + 1
    assert read_cached(write(path, whole[:body] + b"x" + whole[body + 1 :])) is None
    assert read_cached(write(path, whole)) == json.dumps(ROW) * 2


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"sha256": 5}\n', b"\0" * 4096, b"5\nx", b'"a"\nx', b"\xff\n"])
def test_something_else_in_the_place_of_a_cached_file_is_not_believed(tmp_path, data):
    assert read_cached(write(tmp_path / "a.json", data)) is None


def test_a_folder_in_the_place_of_a_cached_file_changes_nothing(tmp_path):
    texts = [f"word {number}" for number in range(20)]
    expected = train_tokenizer(texts, 300).get_vocab()
    cached_tokenizer(texts, 300, tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    assert cached_tokenizer(texts, 300, tmp_path).get_vocab() == expected
    assert list(tmp_path.iterdir()) == [path]


def test_cached_records_of_another_kind_are_read_anew(tmp_path, monkeypatch):
    root = tmp_path / "stdlib"
    root.mkdir()
    write(root / "mod.py", b'def f():\n    """Return something long enough to count."""\n')
    monkeypatch.setattr(builtin, "_stdlib_folder", lambda: root)
    first = builtin_records(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    for value in (None, 5, ["a"]):
        assert write_cached(path, json.dumps({"instruction": "a", "input": "b", "output": value}) + "\n")
        assert builtin_records(tmp_path / "cache") == first


class Full(io.BytesIO):
    """A file on a disk that is full."""

    def write(self, data) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["makedirs", "mkstemp", "write", "close", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_cache_that_is_full_or_read_only_costs_time_and_nothing_else(tmp_path, monkeypatch, step, number):
    path = rows_of(tmp_path / "a.jsonl", 20)

    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if step == "makedirs":
            patch.setattr(cache_file.Path, "mkdir", fail)
        elif step == "mkstemp":
            patch.setattr(tempfile, "mkstemp", fail)
        elif step == "replace":
            patch.setattr(os, "replace", fail)
        else:
            real = os.fdopen

            def opened(descriptor, mode):
                real(descriptor, mode).close()
                made = Full()
                if step == "close":
                    made.write = lambda data: len(data)  # type: ignore[method-assign]
                    made.close = fail  # type: ignore[method-assign]
                return made

            patch.setattr(os, "fdopen", opened)
        data = set_up(path, tmp_path)
    assert not list((tmp_path / "cache").glob("*"))
    assert data.tokenizer.get_vocab() == set_up(path, tmp_path).tokenizer.get_vocab()


def test_a_temporary_file_that_cannot_be_removed_is_no_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", fail)
    monkeypatch.setattr(cache_file.Path, "unlink", fail)
    assert not write_cached(tmp_path / "a.json", "text")


def test_what_a_killed_process_left_goes_when_nobody_can_be_writing_it(tmp_path):
    stale, fresh, other = (tmp_path / name for name in ("a.jsonx1.tmp", "a.jsonx2.tmp", "b.jsonx3.tmp"))
    for path in (stale, fresh, other):
        write(path, b"half")
    for path in (stale, other):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    assert write_cached(tmp_path / "a.json", "text")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", fresh.name, other.name}


WRITER = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
path, mine = Path(sys.argv[2]), sys.argv[3]
for number in range(150):
    assert cache.write_cached(path, mine * (2000 + number))
    text = cache.read_cached(path)
    assert text is not None and set(text) in ({"a"}, {"b"}) and 2000 <= len(text) < 2150, text
"""


def test_two_processes_that_write_one_cached_file_never_see_a_part_of_it(tmp_path):
    path = tmp_path / "cache" / "a.json"
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, cache_file.__file__, str(path), letter], stderr=subprocess.PIPE)
        for letter in "ab"
    ]
    for process in started:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert list(path.parent.iterdir()) == [path]


def test_two_runs_that_share_a_cache_train_on_the_same_tokens(tmp_path):
    path = rows_of(tmp_path / "a.jsonl", 200)
    together, found = threading.Barrier(2), {}

    def run(name: int) -> None:
        data = InstructionData("json", path, seq_len=64, cache_dir=tmp_path / "cache", vocab_size=300)
        together.wait(30)
        data.setup()
        found[name] = data

    threads = [threading.Thread(target=run, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0].train_set == found[1].train_set
    assert found[0].heldout_set == found[1].heldout_set
    assert len(list((tmp_path / "cache").iterdir())) == 1
