"""ARCHITECTURE.md says where things live and what imports what; here it is held to it."""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("lightning_sonar", "experiments")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__init__.py"
)


def order() -> dict[str, int]:
    """Modules and packages as the page names them, and where each stands in its order."""
    found = re.search(r"imports only what stands to its left: `(.*?)`", TEXT, re.DOTALL)
    assert found is not None
    steps = [[name.strip() for name in step.split(",")] for step in found[1].split("→")]
    return {name: place for place, names in enumerate(steps) for name in names}


def place_of(module: str, places: dict[str, int]) -> int | None:
    """The place of a module, or of the package that it is in."""
    parts = module.removeprefix("lightning_sonar.").split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((places[name] for name in names if name in places), None)


def imported(path: Path) -> Iterator[str]:
    """Every module of this project that a file imports, inside of functions too."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from lightning_sonar import models` imports a module, too.
            names = [f"{node.module}.{name.name}" for name in node.names] if "." not in node.module else [node.module]
        else:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.split(".")[0] in ("lightning_sonar", "experiments"))


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[0] == "lightning_sonar"], ids=str)
def test_a_module_imports_only_what_stands_to_its_left(path):
    places, mine = order(), ".".join(path.with_suffix("").parts)
    here = place_of(mine, places)
    assert here is not None, f"the order of imports does not name {mine}"
    right = {name for name in imported(path) if (place := place_of(name, places)) is not None and place > here}
    assert not right


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_module_has_its_place_on_the_page(path):
    inside = path.as_posix().removeprefix("lightning_sonar/")
    named = {part.strip() for quoted in re.findall(r"`([^`]+)`", TEXT) for part in quoted.split(",")}
    folders = [name for name in named if name.endswith("/")]
    assert any(fnmatch.fnmatch(inside, name) or fnmatch.fnmatch(path.name, name) for name in named) or any(
        inside.startswith(name) or f"/{name}" in f"/{inside}" for name in folders
    )


def outside(path: Path, everywhere: bool) -> set[str]:
    """What a file imports that is neither Python's nor ours: when it is imported itself, or ``everywhere``."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"lightning_sonar"}


def test_everything_up_to_release_imports_torch_and_triton_only():
    places = order()
    last = places["release"]
    found = {
        path: outside(path, everywhere=False) - {"torch", "triton"}
        for path in MODULES
        if (place := place_of(".".join(path.with_suffix("").parts), places)) is not None and place <= last
    }
    assert len(found) > 30
    assert {path: names for path, names in found.items() if names} == {}


def test_only_experiments_import_hydra():
    found = [path for path in MODULES if outside(path, everywhere=True) & {"hydra", "omegaconf"}]
    assert found
    assert [path for path in found if path.parts[0] != "experiments"] == []
