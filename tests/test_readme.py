from __future__ import annotations

import csv
import re
import shlex
import statistics
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import batches, loader, small_model

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


def commands() -> list[tuple[str, str]]:
    """Each page's lines in sh blocks, and its commands within the text."""
    found = [(page, line) for page in PAGES for block in blocks("sh", page) for line in block.splitlines()]
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.S | re.M)
        inline = re.findall(r"`(python\s[^`]+)`", prose)
        found.extend((page, " ".join(line.split())) for line in inline)
    return [(page, line.split("#")[0].strip()) for page, line in found if line.startswith("python ")]


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


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_names_a_program_and_what_it_takes(page, line):
    from experiments.overrides import OverrideError, check_overrides, split_arguments
    from experiments.planning import OWN
    from lightning_sonar.config_dir import config_dir

    _, program, *arguments = shlex.split(line)
    assert (ROOT / program).is_file(), f"{page} speaks of {program}"
    if Path(program).name in ("run.py", "plan.py"):
        own = OWN if program.endswith("plan.py") else ()
        flags, overrides = split_arguments([part for part in arguments if part.split("=")[0] not in own])
        assert set(flags) <= {"--help", "-m"}
        if "hydra/sweeper=optuna" in overrides and find_spec("optuna") is None:
            with pytest.raises(OverrideError, match=r"pip install 'lightning-sonar\[sweep\]'"):
                check_overrides(overrides, config_dir())
        else:
            check_overrides(overrides, config_dir())
        return
    source = (ROOT / program).read_text()
    for flag in (part.split("=")[0] for part in arguments if part.startswith("-")):
        assert f'"{flag}"' in source, f"{page}: {program} knows no {flag}"


def test_there_are_commands_to_look_at():
    assert len(commands()) > 20


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            slugs = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page} links to {target}{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("python", page)])
def test_python_blocks_are_code_that_finds_its_names(page):
    import lightning_sonar

    for block in blocks("python", page):
        compile(block, page, "exec")
        for names in re.findall(r"^from lightning_sonar import (.*)$", block, re.M):
            for name in names.split(","):
                assert hasattr(lightning_sonar, name.strip()), f"{page} imports {name.strip()}"


def rows(path: str, after: str = "") -> list[list[str]]:
    """The rows of a page's first table after some words, cell by cell, its head left out."""
    text = (ROOT / path).read_text()
    table = re.search(r"(?:^\|.*\n)+", text[text.index(after) :], re.M)
    assert table is not None
    return [[cell.strip(" `") for cell in line.strip("|\n").split("|")] for line in table[0].splitlines()[2:]]


def test_the_peers_are_those_of_their_page():
    measured = {(row[2], row[5]): row for row in rows("docs/peers.md") if row[3]}
    found = rows("README.md", "## How it compares")
    assert len(found) == len(measured)
    for _, peak, ratio, loss, *checks in found:
        row = measured.pop((peak, loss))
        said = [float(part) for part in re.findall(r"[\d.]+", ratio)]
        exact = [float(row[3]), *map(float, row[4].split(" to "))]
        last = 0.05 if said[0] >= 5 else 0.005
        # Both are rounded.
        assert all(abs(a - b) <= last + 0.0006 for a, b in zip(said, exact, strict=False))
        assert [cell.split()[0] for cell in checks] == [cell.split()[0] for cell in row[6:]]


def test_the_small_papers_figures_are_those_of_its_report():
    models = {
        name: {row[0]: row for row in rows("docs/paper_small/report.md", f"## {name}")} for name in ("olmoe", "granite")
    }
    for mode, peak, saved, time, loss in rows("README.md", "### Measured here"):
        found = [models[name][mode] for name in ("olmoe", "granite")]
        assert loss.split(" / ") == [row[3] for row in found]
        assert [f"{float(mb) / 1e3:.3f}" for mb in peak.split(" / ")] == [row[1] for row in found]
        assert time.split(" / ") == [f"{float(row[2].split()[0]):.0f}" for row in found]
        shares = [row[5] for row in found]
        assert saved.replace("%", "").split(" / ") == (
            [share.strip("%").removesuffix(".0") for share in shares] if mode != "standard" else [""]
        )


def test_the_gaps_over_five_seeds_are_those_of_their_report():
    with (ROOT / "docs/paper_small_five_seeds/report.csv").open() as file:
        runs = {(run["mode"], int(run["seed"])): float(run["heldout_loss"]) for run in csv.DictReader(file)}
    gaps = [runs["sonar", seed] - runs["standard", seed] for seed in range(5)]
    flat = " ".join(README.split())
    *first, last = [f"{gap:+.4f}" for gap in gaps]
    assert f"{', '.join(first)} and {last}: {statistics.mean(gaps):+.4f} ± {statistics.stdev(gaps):.4f}" in flat
