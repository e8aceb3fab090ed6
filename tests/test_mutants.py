"""The faults of `mutants.txt` can still be put in, and the program that does so tells what was seen from what was not.

Whether each is seen says ``python tests/mutants.py``, which takes minutes.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest
from mutants import ROOT, TABLE, Mutant, main, read_mutants

MUTANTS = read_mutants()
FEWEST = 100


def test_there_are_many_faults_and_each_has_a_name_of_its_own():
    assert len(MUTANTS) >= FEWEST
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_goes_in_at_one_place_and_changes_what_runs(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    # Parsed, so that a fault is neither a syntax error nor a change of a comment.
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("file", sorted({test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}))
def test_each_test_that_is_named_exists_and_runs_by_default(file):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for mutant in MUTANTS:
        for test in mutant.tests:
            name = test.partition("::")[2]
            if test.startswith(f"{file}::"):
                assert name in found, mutant.name
                assert "pytest.mark.slow" not in [ast.unparse(mark) for mark in found[name].decorator_list]
    assert all(test.count("::") == 1 for mutant in MUTANTS for test in mutant.tests)


def test_a_fault_that_is_not_at_one_place_is_refused_and_indentation_follows_the_place():
    mutant = Mutant("name", "a.py", ("if a:", "    b()"), ("if not a:", "    b()"), ())
    assert mutant.applied("def f():\n    if a:\n        b()\n") == "def f():\n    if not a:\n        b()\n"
    for text in ("if a:\n    c()\n", "if a:\n    b()\nif a:\n    b()\n"):
        with pytest.raises(ValueError, match=f"stand {text.count('b()')} times in a.py; expected once"):
            mutant.applied(text)


def test_faults_are_chosen_by_part_of_their_name_and_a_part_of_none_is_refused(capsys):
    assert main(["--list", "--only", "betas-are", "--only", "fsync-or"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["the-betas-are-swapped"]
    with pytest.raises(SystemExit):
        main(["--list", "--only", "nothing-like-it"])
    assert "no fault has" in capsys.readouterr().err


def test_a_line_of_another_kind_is_named(tmp_path):
    (tmp_path / "table.txt").write_text("# a comment\n\n@ name a.py test_a.py::test_b\n* what\n")
    with pytest.raises(ValueError, match=r"table.txt, line 4: expected @, -, \+ or #, found '\* what'"):
        read_mutants(tmp_path / "table.txt")


TOY = {
    "toy/__init__.py": "",
    "toy/sums.py": "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n",
    "tests/test_toy.py": (
        "import time\n\nfrom toy.sums import add, double\n\n\n"
        "def test_add():\n    assert add(2, 2) == 4\n\n\ndef test_double():\n    assert double(2) == 4\n\n\n"
        "def test_broken():\n    assert add(1, 1) == 3\n"
    ),
    "pyproject.toml": "[tool.pytest.ini_options]\n",
}
FAULTS = """
@ seen toy/sums.py test_toy.py::test_add
- return a + b
+ return a - b
@ unseen toy/sums.py test_toy.py::test_add test_toy.py::test_double
- return 2 * a
+ return a * a
@ gone toy/sums.py test_toy.py::test_add
- return a - b
+ return b - a
@ blind toy/sums.py test_toy.py::test_broken
- return a + b
+ return a - b
"""


def test_the_program_tells_seen_from_unseen_faults_and_changes_only_its_copy(tmp_path):
    for name, text in TOY.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "table.txt").write_text(FAULTS)
    options = ["--table", "table.txt", "--root", "tree", "--package", "toy", "--preload", "", "--write", "found.json"]
    command = [sys.executable, str(TABLE.with_suffix(".py")), *options]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "tree")}  # the copy has to come before it
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {each["name"]: each["outcome"] for each in found["outcomes"]} == {
        "seen": "killed",
        "unseen": "survived",
        "gone": "not applied",
        "blind": "not run",
    }
    assert (found["faults"], found["killed"], found["survived"]) == (4, 1, 1)
    assert "4 faults: 1 killed, 1 survived, 1 not applied, 1 not run" in done.stdout
    assert all((tmp_path / "tree" / name).read_text() == text for name, text in TOY.items())
