"""Every key alone: a value of the wrong kind is refused in one message that names it."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_space import (
    CONF,
    GROUPS,
    UNAVAILABLE,
    check_refusal,
    composed,
    run,
    validated,
    with_data,
    write_records,
)
from omegaconf import OmegaConf, open_dict


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records to train on."""
    folder = tmp_path_factory.mktemp("space")
    write_records(folder / "records.jsonl")
    return folder


GROUP_FILES = [
    (group, path.stem) for group in GROUPS if group != "mode" for path in sorted((CONF / group).glob("*.yaml"))
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_group_file_with_every_mode_is_accepted_or_refused_in_one_message(place, monkeypatch):
    counts: Counter[str] = Counter()
    unexpected: list[str] = []
    for group, name in GROUP_FILES:
        for mode in GROUPS["mode"]:
            cfg = composed(with_data(place, {group: name, "mode": mode}, width=False), place / "alone")
            outcome = validated(cfg, place / "alone", monkeypatch)
            counts[outcome.kind] += 1
            if outcome.kind != "validated":
                check_refusal(outcome, [group, "mode"])
                # What has no slices of one expert: low-bit blocks, and shards.
                sliced = mode == "sonar_per_expert" and (group == "optimizer" or name == "fsdp")
                if not sliced and (group, name) not in [*UNAVAILABLE, ("data", "alpaca")]:
                    unexpected.append(f"{group}={name} mode={mode}: {outcome.message}")
    print(dict(counts))
    assert not unexpected
    assert counts["validated"] >= 150


def keys_of(node: Any, path: str = "") -> Iterator[str]:
    """Every key of a configuration, those of groups included."""
    for name in node:
        key = f"{path}.{name}" if path else str(name)
        yield key
        child = node._get_node(name)
        if OmegaConf.is_dict(child):
            yield from keys_of(child, key)


TEXTS = {
    *("ckpt_path", "objective", "mode.experts", "model.attn_implementation", "data.path", "data.cache_dir"),
    *("trainer.default_root_dir", "trainer.strategy.experts"),
    *("callbacks.memory_profiler.dirpath", "callbacks.model_checkpoint.dirpath"),
    *("callbacks.model_checkpoint.filename", "logger.csv.save_dir", "logger.csv.name", "logger.csv.version"),
}
"""Keys that may hold any text, as far as can be seen before data is read."""

ONE_LESS = {
    *("data.seed", "trainer.max_steps", "trainer.max_epochs", "trainer.num_sanity_val_steps"),
    *("size_defaults.tiny.max_steps", "size_defaults.full.max_steps", "logger.csv.version"),
}
"""Keys to which -1 means something: without end, all of them, or a number like any other."""


def accepted(place: Path, monkeypatch: Any, value: Any, *overrides: str) -> set[str]:
    """Keys that take a value; of every other one it is checked that the refusal names it."""
    folder = place / "leaf"
    groups = {"callbacks": "checkpoint", "logger": "csv", "mode": "sonar"}
    cfg = composed([*with_data(place, groups, width=False), *overrides], folder)
    taken = set()
    for key in keys_of(cfg):
        made = copy.deepcopy(cfg)
        with open_dict(made):
            OmegaConf.update(made, key, value, merge=False)
        outcome = validated(made, folder, monkeypatch)
        if outcome.kind == "validated":
            taken.add(key)
        else:
            check_refusal(outcome, [key])
    return taken


def test_a_text_is_refused_wherever_it_means_nothing(place, monkeypatch):
    assert accepted(place, monkeypatch, "abc") == TEXTS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_less_than_nothing_is_refused_wherever_it_means_nothing(place, monkeypatch):
    assert accepted(place, monkeypatch, -1) == ONE_LESS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("value", [None, float("nan"), 1.5, True, [1, 2], {"a": 1}, ""], ids=repr)
def test_any_value_anywhere_is_accepted_or_refused_in_one_message(place, monkeypatch, value):
    taken = accepted(place, monkeypatch, value)
    if isinstance(value, float) and value != value:
        assert not taken
    assert not taken & {"model", "mode", "trainer", "optimizer", "scheduler", "data", "trainer.strategy", "mode.name"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.max_time=abc"], "trainer.max_time=abc: .*DD:HH:MM:SS.*trainer.max_time=null would do"),
        (["trainer.strategy=ddp"], "trainer.strategy=ddp: expected keys with values"),
        (["trainer.num_nodes=abc"], "trainer.num_nodes=abc: expected a whole number, at least 1"),
        (["trainer.limit_val_batches=-1"], "trainer.limit_val_batches=-1: "),
        (["trainer.inference_mode=abc"], "trainer.inference_mode=abc: expected true or false"),
        (["+trainer.no_such_argument=1"], "trainer.no_such_argument=1: .*unexpected keyword"),
        (["callbacks.memory_profiler.steps=0"], "callbacks.memory_profiler.steps=0: "),
        (["callbacks.progress_bar=7"], "callbacks.progress_bar=7: expected keys with values"),
        (["model.router_aux_loss=nan"], "model.router_aux_loss=nan: expected a number"),
        (["model.overrides=null"], "model.overrides=null: expected keys with values"),
        (["model.id=some/where"], "model.id=some/where: only model=hf takes it"),
        (["model.pretrained=true", "model.size=tiny"], "model.pretrained=true: there is no checkpoint of the tiny"),
        (["optimizer.lr=inf"], "optimizer.lr=inf: expected a number"),
        (["optimizer.betas=[2,0.9]"], r"optimizer.betas=\[2,0.9\]: "),
        (["mode.log_grad_norm=-2"], "mode.log_grad_norm=-2: expected true, false or a whole number"),
        (["~mode.check"], "mode.check: this key is gone, and the run needs it"),
        (["~model"], "model=null: expected a configuration of this group"),
        (["data.source=parquet"], "data.source=parquet: .*data.source=builtin would do"),
        (["size_defaults.tiny=null"], "size_defaults.tiny=null: expected keys with values: seq_len, lr, max_steps"),
        (["mode=sonar_per_expert", "optimizer=bnb_adamw8bit"], "optimizer=.*: mode=sonar_per_expert .* Use mode=sonar"),
        (["trainer=ddp", "trainer.overfit_batches=2"], "trainer.overfit_batches=2: .* Use trainer.limit_train_batches"),
        (["ckpt_path=''"], "ckpt_path='': expected a text or null, and this one is empty"),
    ],
)
def test_a_mistake_is_named_with_its_value_and_what_would_do(place, monkeypatch, overrides, message):
    outcome = validated(composed(overrides, place / "mistake"), place / "mistake", monkeypatch)
    assert outcome.kind == "refused", outcome.message
    assert re.search(message, outcome.message), outcome.message
    check_refusal(outcome, [override.lstrip("~+").split("=")[0] for override in overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+model.overrides.num_experts_per_tok=100", r"model.overrides=.*num_experts_per_tok:100"),
        ("trainer.val_check_interval=100000", r"val_check_interval.*100000"),
        ("mode.experts=nothing_of_that_name", "nothing_of_that_name"),
        ("model.attn_implementation=no_such", "no_such"),
    ],
)
def test_what_shows_only_in_the_run_ends_in_one_message_too(place, override, message):
    outcome = run([*with_data(place, {"mode": "sonar"}), override], place / "late")
    check_refusal(outcome, [override.lstrip("+").split("=")[0], "model.overrides"])
    assert re.search(message, outcome.message), outcome.message


def test_a_callback_that_is_null_is_left_out(place):
    groups = {"callbacks": "default", "mode": "sonar"}
    outcome = run(
        [*with_data(place, groups), "callbacks.memory_profiler=null", "callbacks.progress_bar=null"], place / "without"
    )
    assert outcome.kind == "trained", outcome.message
    assert not (place / "without" / "memory.json").exists()
