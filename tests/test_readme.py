from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import batches, loader, small_model

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def test_the_first_two_bash_blocks_run_the_main_job_and_the_tests():
    run, tests = blocks("bash")[:2]
    assert run.splitlines() == ["pip install -e .", "python experiments/run.py model=olmoe mode=sonar"]
    assert tests.splitlines() == ['pip install -e ".[dev]"', "pytest"]


def test_the_python_blocks_run_as_they_stand():
    names: dict = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    data = [{k: v for k, v in batch.items() if k != "attention_mask"} for batch in batches(2)]
    model = small_model(dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names["train"](model, loader(data))
        trainer = names["L"].Trainer(
            strategy=names["SonarMoEStrategy"](),
            accelerator="cpu",
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(names["MyManualMoE"](model), loader(data))
    names["train_plainly"](model, data)
    assert trainer.global_step == 2


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_every_command_of_the_readme_composes(line):
    from experiments.overrides import check_overrides, split_arguments
    from experiments.planning import OWN
    from lightning_sonar.config_dir import config_dir

    command = line.split("#")[0].split()
    assert command[0] == "python"
    assert command[1] in ("experiments/run.py", "experiments/plan.py", "experiments/report.py")
    if command[1].endswith("report.py"):
        return
    own = OWN if command[1].endswith("plan.py") else ()
    flags, overrides = split_arguments([part for part in command[2:] if part.split("=")[0] not in own])
    assert set(flags) <= {"--help", "-m"}
    check_overrides(overrides, config_dir())


def test_links_to_files_work():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target
