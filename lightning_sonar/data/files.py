"""Records from a local JSON, JSON Lines or Parquet file."""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_sonar.data.errors import DataError
from lightning_sonar.data.records import Record, from_alpaca, from_messages

__all__ = ["read_records", "record_of"]

_SUFFIXES = (".json", ".jsonl", ".parquet")
_CHAT_COLUMNS = ("messages", "conversations", "conversation")
_COLUMNS = ("instruction", "input", "output", *_CHAT_COLUMNS)
_EXPECTED = "'instruction', 'output' and optionally 'input', or 'messages' (or 'conversations')"

# How files of other kinds begin; no JSON text does.
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ\0", "compressed by xz"),
    (b"PK\x03\x04", "a zip archive"),
    (b"PAR1", "Parquet; name it .parquet"),
)
_UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")

_Located = tuple[str, Any]  # where a row stands ("line 3"), and the row


class _Repeated(dict[str, Any]):
    """An object of JSON in which a key stands twice; Python would silently take the last one."""

    key: str


def read_records(path: str | Path) -> list[Record]:
    """All records of a file in Alpaca's format or with chat messages.

    A ``.jsonl`` file has one object a line, a ``.json`` file a list of objects or one object a line; Parquet has the
    same columns.

    Raises:
        DataError: if there is a record that cannot be used, or no file that can be read; nothing is left out silently.
    """
    path = _file(path)
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_rows(path)
    records = [_record(path, where, row) for where, row in rows]
    if not records:
        raise DataError(f"{path}: holds no records; expected at least one with {_EXPECTED}")
    return records


def _file(given: str | Path) -> Path:
    """The path, if an ordinary file with a known suffix stands there; to read a pipe or a device may never end."""
    if not isinstance(given, (str, Path)):
        raise DataError(f"path={given!r} is of type {type(given).__name__}; expected the name of one file")
    mode: int | None = None
    try:
        path = Path(given).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        path = Path(given).expanduser()
    except (OSError, ValueError, RuntimeError) as error:  # also a home of nobody's, or a name with a NUL
        raise DataError(f"{given}: cannot be read ({_reason(error)}); expected a readable file") from error
    suffix = path.suffix.lower()
    if mode is not None and stat.S_ISDIR(mode):
        raise DataError(f"{path}: is a directory; expected one file, {_list(_SUFFIXES)}")
    if suffix not in _SUFFIXES:
        raise DataError(f"{path}: unsupported suffix {path.suffix!r}; expected one of {_list(_SUFFIXES)}")
    if mode is None:
        raise DataError(f"{path}: no such file (looked in {Path.cwd()}); expected a {suffix} file")
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: is a pipe, a socket or a device; expected an ordinary file, so copy the data to one")
    return path


def _json_rows(path: Path) -> Iterable[_Located]:
    text = _text(path)
    if path.suffix.lower() == ".json":
        if text.lstrip().startswith("["):
            return _array_rows(path, text)
        whole = _one_object(text)
        if whole is not None:
            return [("record 1", whole)]
    # Much data named .json has one object a line.
    return _line_rows(path, text)


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)}); expected a readable file") from error
    for start, kind in _FOREIGN:
        if data.startswith(start):
            raise DataError(f"{path}: is {kind}; expected JSON as plain text, so unpack or rename the file first")
    if data.startswith(_UTF_16_OR_32):
        raise DataError(
            f"{path}, line 1: not UTF-8 (it begins as UTF-16 or UTF-32 does); expected UTF-8, so convert the file first"
        )
    nul = data.find(b"\0")
    if nul >= 0:
        line = data.count(b"\n", 0, nul) + 1
        raise DataError(
            f"{path}, line {line}: holds a NUL byte, as UTF-16 does, and a file whose writing a crash cut short; "
            "expected JSON in UTF-8, so convert the file or write it anew"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 ({error.reason}); expected UTF-8, so convert the file first"
        ) from error


def _array_rows(path: Path, text: str) -> Iterator[_Located]:
    try:
        rows = _loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: broken JSON ({error.msg}, column {error.colno}); expected a list of objects"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: broken JSON ({error}); expected a list of objects") from error
    for number, row in enumerate(rows, start=1):
        yield f"record {number}", row


def _one_object(text: str) -> dict[str, Any] | None:
    """The object that the whole text is, if it is one."""
    try:
        whole = _loads(text)
    except (ValueError, RecursionError):
        return None
    return whole if isinstance(whole, dict) else None


def _line_rows(path: Path, text: str) -> Iterator[_Located]:
    # Not splitlines(): U+2028 and its like may stand inside a JSON string; line feeds and carriage returns may not.
    for number, line in enumerate(re.split("\r\n|\n|\r", text), start=1):
        # Files that were joined have each one's mark inside.
        line = line.lstrip("\ufeff")
        if not line.strip():
            continue
        try:
            yield f"line {number}", _loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
            raise DataError(
                f"{path}, line {number}: broken JSON ({reason}): {_excerpt(line)}; "
                f"expected one object a line with {_EXPECTED}"
            ) from error


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeated = _Repeated(found)
    repeated.key = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    return repeated


def _repeated_key(row: Any) -> str | None:
    """A key that stands twice in an object of a record, if there is one."""
    rest = [row]
    while rest:
        value = rest.pop()
        if isinstance(value, _Repeated):
            return value.key
        rest += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return None


def _parquet_rows(path: Path) -> Iterator[_Located]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs the package 'pyarrow': pip install pyarrow") from error
    try:
        # ParquetFile, not read_table, which would make columns of folders named like a=b.
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise DataError(f"{path}: the column {twice!r} stands twice; expected it once, so remove one")
            # No other columns: there may be kinds among them that Python has no values for.
            rows = file.read([name for name in _COLUMNS if name in names]).to_pylist()
    except DataError:
        raise
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: broken Parquet ({_reason(error)}); expected a Parquet file") from error
    absent = dict.fromkeys(names)
    for number, row in enumerate(rows, start=1):
        yield f"record {number}", absent | row


def _record(path: Path, where: str, row: Any) -> Record:
    try:
        repeated = _repeated_key(row)
        if repeated is not None:
            raise DataError(f"the key {repeated!r} stands twice in one object; expected it once, so remove one")
        record = record_of(row)
        for text, _ in record:
            text.encode()
    except DataError as error:
        raise DataError(f"{path}, {where}: {error}") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, {where}: {error.object[error.start]!r} is half of a surrogate pair; expected valid Unicode text"
        ) from error
    return record


def record_of(row: Any) -> Record:
    """The record that a row stands for, by its columns.

    Raises:
        DataError: if it has not the columns of either format, or something else than text in them.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"found a {type(row).__name__}; expected an object with {_EXPECTED}")
    if row.get("instruction") is not None and "output" in row:
        return from_alpaca(_field(row, "instruction"), _field(row, "input"), _field(row, "output"))
    for column in _CHAT_COLUMNS:
        if row.get(column) is not None:
            messages = row[column]
            if not isinstance(messages, list):
                raise DataError(
                    f"{column!r} is of type {type(messages).__name__}; "
                    "expected a list of messages with 'role' and 'content'"
                )
            return from_messages(messages)
    for column in ("instruction", *_CHAT_COLUMNS):
        if column in row and row[column] is None:
            raise DataError(f"{column!r} is null; expected text or a list of messages")
    columns = _list(map(repr, row)) if row else "none"
    raise DataError(f"missing column: found {columns}; expected {_EXPECTED}")


def _field(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None and column == "input":
        return ""
    if not isinstance(value, str):
        found = "null" if value is None else f"of type {type(value).__name__}"
        raise DataError(f"{column!r} is {found}; expected text")
    return value


def _reason(error: Exception) -> str:
    """What an exception says, in a line; some say nothing."""
    said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return said or type(error).__name__


def _excerpt(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
