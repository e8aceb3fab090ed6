"""Instruction data that every Python carries: the docstrings of its own standard library."""

import ast
import hashlib
import json
import os
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from lightning_sonar.data.cache import cache_folder, read_cached, write_cached
from lightning_sonar.data.errors import DataError
from lightning_sonar.data.records import Record, from_alpaca

__all__ = ["builtin_records"]

# Raise it when what is extracted changes, so that older cache files are not read.
_FORMAT = 1
_MIN_CHARACTERS = 20
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    # Distributions package these apart, or Python dropped them: without them machines differ less.
    | {"distutils", "idlelib", "lib2to3", "tkinter", "turtledemo"}
)

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Alpaca = tuple[str, str, str]  # instruction, input, output


def builtin_records(cache_dir: str | Path | None = None) -> list[Record]:
    """About 6,000 records: write the docstring of a function, method or class, given its signature.

    They are parsed from the source of the running Python's standard library, in a fixed order, and
    cached in `cache_dir` (by default the user's cache folder) for this version of Python.
    """
    root = _stdlib_folder()
    folder = cache_folder(cache_dir)
    path = None if folder is None else folder / _cache_name(root)
    rows = None if path is None else _load(path)
    if rows is None:
        rows = list(_extract(root))
        if not rows:
            raise DataError(
                f"{root}: no docstrings found. data=builtin reads the source of Python's standard library, "
                "which this installation does not carry as .py files; use data=json data.path=FILE instead"
            )
        if path is not None:
            write_cached(path, "".join(_line(row) for row in rows))
    return [from_alpaca(*row) for row in rows]


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _cache_name(root: Path) -> str:
    # Two installations of one version (a distribution's, a user's own) need not carry the same modules.
    installation = hashlib.sha256(f"{_FORMAT}\n{sys.version}\n{root}".encode()).hexdigest()[:12]
    return f"builtin-{platform.python_implementation().lower()}-{platform.python_version()}-{installation}.jsonl"


def _line(row: _Alpaca) -> str:
    instruction, input, output = row
    return json.dumps({"instruction": instruction, "input": input, "output": output}) + "\n"


def _load(path: Path) -> list[_Alpaca] | None:
    text = read_cached(path)
    if not text:
        return None
    try:
        rows = [json.loads(line) for line in text.splitlines()]
        found = [(row["instruction"], row["input"], row["output"]) for row in rows]
        return found if all(isinstance(part, str) for row in found for part in row) else None
    except (ValueError, KeyError, TypeError):
        return None


def _extract(root: Path) -> Iterator[_Alpaca]:
    seen: set[str] = set()
    for path in _sources(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for name, inside_class, node in _definitions(_parse(path), "", inside_class=False):
            output = ast.get_docstring(node)
            if output is None or len(output) < _MIN_CHARACTERS:
                continue
            # A docstring repeated under many names would reach both the training and the held-out part.
            if output in seen or not _is_encodable(output):
                continue
            seen.add(output)
            kind = "class" if isinstance(node, ast.ClassDef) else "method" if inside_class else "function"
            yield f"Write the docstring of this {kind} of {module}.", _signature(name, node), output


def _sources(root: Path) -> Iterator[Path]:
    """All source files except tests and what was installed later, in an order no file system decides."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _parse(path: Path) -> ast.Module:
    """The file's syntax tree; empty if Python cannot read it, as some samples are broken on purpose."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the library are not the user's concern
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def _definitions(node: ast.AST, prefix: str, *, inside_class: bool) -> Iterator[tuple[str, bool, _Definition]]:
    """Qualified name, whether a class holds it, and node of every definition, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            name = prefix + child.name
            yield name, inside_class, child
            yield from _definitions(child, f"{name}.", inside_class=isinstance(child, ast.ClassDef))
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _definitions(child, prefix, inside_class=inside_class)


def _signature(name: str, node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        return f"class {name}({bases})" if bases else f"class {name}"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{keyword} {name}({ast.unparse(node.args)}){returns}"


def _is_encodable(text: str) -> bool:
    """Whether the text is valid Unicode; a literal such as '\\udc80' is not and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
