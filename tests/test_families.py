"""Every Mixture-of-Experts family of transformers trains in sonar bit for bit as without in-backward updates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from experiments import families
from experiments.families import Family, FamilyError, compare, known, markdown
from experiments.family_shapes import FAMILIES, PATTERNS
from experiments.settings import SettingsError, settle

ROOT = Path(__file__).resolve().parent.parent
# A family of each kind: kernels of their own, biases, shared experts, recurrent layers, routers without gradients.
QUICK = (
    *("aria_text", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss"),
    *("granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "jamba", "jetmoe", "lfm2_moe"),
    *("llama4_text", "minimax", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "dbrx"),
)


def check(family, dtype="bfloat16"):
    if family not in known([family]):
        pytest.skip("the installed transformers has no such architecture")
    row = compare(family, dtype)
    assert row.works, row.reason
    assert row.tensors > 0
    assert 0 < row.share < 1


@pytest.mark.parametrize("family", QUICK)
def test_family_trains_bitwise_alike_with_and_without_in_backward_updates(family):
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in QUICK])
def test_every_other_family_trains_bitwise_alike_too(family):
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_bitwise_alike_in_float32(family):
    check(family, "float32")


def test_at_least_twenty_families_are_quick_and_all_are_known_shapes():
    assert len(set(QUICK)) >= 20
    assert set(QUICK) <= set(FAMILIES)
    assert set(PATTERNS) <= set(FAMILIES)


def test_a_family_whose_experts_keep_their_gradient_does_not_work(monkeypatch):
    train = families.train
    monkeypatch.setattr(families, "train", lambda model, mode, *rest: train(model, "standard_no_expert_clip", *rest))
    row = compare("mixtral")
    assert not row.works
    assert row.reason == "4 expert tensors kept their gradient until the end of backward"


def test_a_family_whose_weights_differ_does_not_work(monkeypatch):
    train = families.train

    def other(model, mode, *rest):
        values, kept = train(model, mode, *rest)
        if mode != "sonar":
            name = next(iter(values))
            values[name] = values[name] + 1
        return values, kept

    monkeypatch.setattr(families, "train", other)
    row = compare("mixtral")
    assert not row.works
    assert re.fullmatch(r"1 of \d+ weights and states differ, model.embed_tokens.weight for one", row.reason)


def test_a_family_that_fails_in_bfloat16_only_says_so(monkeypatch):
    def fails(row):
        if row.dtype == "bfloat16":
            raise RuntimeError("no bfloat16 here\nand more")

    monkeypatch.setattr(families, "_compare", fails)
    row = compare("mixtral")
    assert (row.works, row.dtype, row.reason) == (True, "float32", "RuntimeError: no bfloat16 here")
    page = markdown([row], "bfloat16")
    assert "yes, in float32; not in bfloat16: RuntimeError: no bfloat16 here" in page
    assert "in bfloat16 (1 of them, which cannot run in it, in float32) on a CPU" in page


def test_a_difference_is_not_tried_again_in_float32(monkeypatch):
    def differs(row):
        raise FamilyError("they differ")

    monkeypatch.setattr(families, "_compare", differs)
    row = compare("mixtral")
    assert (row.works, row.dtype, row.reason) == (False, "bfloat16", "they differ")


def test_the_document_lists_the_families_of_the_command():
    page = (ROOT / "docs/families.md").read_text()
    rows = re.findall(r"^\| (\w+) \|", page, re.MULTILINE)[1:]
    assert rows == list(FAMILIES)
    assert families.COMMAND in page
    assert page.startswith(markdown([], "bfloat16").splitlines()[0])


def test_the_table_says_what_works_and_what_does_not():
    rows = [
        Family("good", "grouped_mm", 4, 0.5, 2_000_000_000, 0.9, packs=True, works=True),
        Family("bad", "own", 0, 0.0, default_note="the default has no experts", reason="a | b"),
    ]
    page = markdown(rows, "bfloat16")
    assert "1 of 2 families" in page
    assert "| good | grouped_mm | 2.00 B | 90.0% | 4 | 50.0% | yes | yes |" in page
    assert "| bad | own | the default has no experts |  | 0 | 0.0% | no | no: a \\| b |" in page


def test_the_command_writes_both_forms(tmp_path, capsys):
    page, data = tmp_path / "table.md", tmp_path / "table.json"
    assert families.main(["olmoe", "--write", str(page), "--write", str(data)]) == 0
    assert page.read_text() in capsys.readouterr().out
    (row,) = json.loads(data.read_text())
    assert row["family"] == "olmoe"
    assert row["works"]
    assert row["default_share"] > 0.9


def test_an_unknown_family_is_explained(capsys):
    with pytest.raises(SystemExit):
        families.main(["llama"])
    assert "no such family: llama. Choose from afmoe" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        families.main(["--write", "table.txt"])
    assert "expected a file that ends in .md or .json" in capsys.readouterr().err


def test_the_command_leaves_determinism_as_it_was():
    compare("olmoe")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_the_run_command_trains_an_architecture_from_its_name_on_packed_rows(family, tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"head_dim": 16, "num_local_experts": 4, "vocab_size": 600}
    arguments = [f"+model.overrides.{key}={value}" for key, value in shape.items()]
    arguments += [
        "model=hf",
        f"model.config={family}",
        "model.num_layers=2",
        "trainer.max_steps=3",
        "data.packing=true",
    ]
    arguments += [
        "trainer.limit_val_batches=1",
        "data.max_records=200",
        "data.seq_len=128",
        f"hydra.run.dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "experiments/run.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert f"{family} has no tokenizer" in said
    assert "examples packed into" in said
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 3
    # An architecture with expert code of its own leaves no choice of kernel.
    assert result["backend"] == ("eager" if family == "llama4_text" else "grouped_mm")
    assert result["predicted_peak_bytes"] == pytest.approx(result["peak_memory_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=hf"], "model.id: a value is needed: .* or, for random weights, model.config"),
        (["model=hf", "model.config=mixtral", "model.pretrained=true"], "model.config has no weights. Use model.id"),
        (["model=hf", "model.config=mixtrl"], "model.config=mixtrl is no architecture .* Did you mean mixtral"),
        (["model=hf", "model.config=gpt2"], "model=hf: No batched expert tensors found"),
        (["model=hf", "model.config=dots1"], "model=hf: transformers cannot make a dots1 model"),
    ],
)
def test_the_commands_settings_explain_mistakes_about_an_architecture(overrides, message):
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[*overrides, "trainer.default_root_dir=.", "callbacks=none", "logger=none"])
    with pytest.raises(SettingsError, match=message):
        settle(cfg, lambda _: None)
