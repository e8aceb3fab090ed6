from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "experiments" / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_learn(example, tmp_path):
    assert len(example.read_text().splitlines()) < 60
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    loss = float(re.findall(r"^loss (\S+)", done.stdout, re.M)[-1])
    assert loss < {"lightning_module": 0.4, "huggingface_manual": 3.0, "plain_pytorch": 5.0}[example.stem]


def test_the_three_ways_have_an_example():
    assert [path.stem for path in EXAMPLES] == ["huggingface_manual", "lightning_module", "plain_pytorch"]
