"""Records from a local JSON, JSON Lines or Parquet file."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_sonar.data.errors import DataError
from lightning_sonar.data.records import Record, from_alpaca, from_messages

__all__ = ["read_records"]

_SUFFIXES = (".json", ".jsonl", ".parquet")
_CHAT_COLUMNS = ("messages", "conversations", "conversation")
_EXPECTED = "'instruction', 'output' and optionally 'input', or 'messages' (or 'conversations')"

_Located = tuple[str, Any]  # where a row stands ("line 3"), and the row


def read_records(path: str | Path) -> list[Record]:
    """All records of a file in Alpaca's format or with chat messages.

    JSON is a list of objects or one object a line, whatever the suffix; Parquet has the same columns.
    """
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir():
        raise DataError(f"{path}: is a directory; expected one file, {_list(_SUFFIXES)}")
    if suffix not in _SUFFIXES:
        raise DataError(f"{path}: unsupported suffix {path.suffix!r}; expected one of {_list(_SUFFIXES)}")
    if not path.exists():
        raise DataError(f"{path}: no such file (looked in {Path.cwd()}); expected a {suffix} file")
    rows = _parquet_rows(path) if suffix == ".parquet" else _json_rows(path)
    records = [_record(path, where, row) for where, row in rows]
    if not records:
        raise DataError(f"{path}: holds no records; expected at least one with {_EXPECTED}")
    return records


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
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected a readable file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 ({error.reason}); expected UTF-8, so convert the file first"
        ) from error


def _array_rows(path: Path, text: str) -> Iterator[_Located]:
    try:
        rows = json.loads(text)
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
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return whole if isinstance(whole, dict) else None


def _line_rows(path: Path, text: str) -> Iterator[_Located]:
    # Not splitlines(): U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
            raise DataError(
                f"{path}, line {number}: broken JSON ({reason}): {_excerpt(line)}; "
                f"expected one object a line with {_EXPECTED}"
            ) from error


def _parquet_rows(path: Path) -> Iterator[_Located]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: Parquet needs the package 'pyarrow': pip install pyarrow") from error
    try:
        # ParquetFile, not read_table, which would make columns of folders named like a=b.
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = file.read().to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: broken Parquet ({reason}); expected a Parquet file") from error
    for number, row in enumerate(rows, start=1):
        yield f"record {number}", row


def _record(path: Path, where: str, row: Any) -> Record:
    try:
        record = _convert(row)
        for text, _ in record:
            text.encode()
    except DataError as error:
        raise DataError(f"{path}, {where}: {error}") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, {where}: {error.object[error.start]!r} is half of a surrogate pair; expected valid Unicode text"
        ) from error
    return record


def _convert(row: Any) -> Record:
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


def _excerpt(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
