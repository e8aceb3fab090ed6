"""Any composed configuration is trained, or refused in one message that names the key."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from pathlib import Path

import pytest
from config_space import (
    COMPOSED,
    LATE,
    MISSPELT,
    UNAVAILABLE,
    VALUES,
    check_refusal,
    checked,
    composed,
    named_by,
    run,
    steps_of,
    validated,
    with_data,
    write_records,
)
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

FIXED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with records to train on."""
    folder = tmp_path_factory.mktemp("space")
    write_records(folder / "records.jsonl")
    return folder


@st.composite
def changes(draw: st.DrawFn, most: int, wrong: int) -> dict[str, str]:
    """Values for some keys, of which ``wrong`` in ten are of the wrong kind."""
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=most, unique=True))
    made: dict[str, str] = {}
    for key in keys:
        right, never = VALUES[key]
        choices = never if not right or draw(st.integers(1, 10)) > 10 - wrong else right
        if not any(key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in made):
            made[key] = draw(st.sampled_from(choices))
    return made


def changed(cfg: DictConfig, values: dict[str, str]) -> DictConfig:
    """A copy with values as Hydra reads them from a command line."""
    made = copy.deepcopy(cfg)
    parser = OverridesParser.create()
    for key, value in values.items():
        OmegaConf.update(made, key, parser.parse_override(f"{key}={value}").value(), merge=False)
    return made


@pytest.mark.timeout(1800)
def test_500_compositions_are_accepted_or_refused_in_one_message_that_names_the_key(place, monkeypatch):
    counts: Counter[str] = Counter()
    folder = place / "validated"

    @functools.cache
    def of_groups(row: int) -> DictConfig:
        return composed(with_data(place, COMPOSED[row], width=False), folder)

    @settings(FIXED, max_examples=500)
    @given(st.integers(0, len(COMPOSED) - 1), changes(4, 3), st.sampled_from([None] * 390 + MISSPELT))
    def each(row: int, values: dict[str, str], typo: str | None) -> None:
        counts["composed"] += 1
        if typo is not None:
            outcome = checked([*with_data(place, COMPOSED[row]), typo])
            keys = [typo.lstrip("+").split("=")[0]]
            if outcome is None:  # a new key composes; its class has to refuse it
                with_typo = [*with_data(place, COMPOSED[row]), typo]
                outcome = validated(composed(with_typo, folder), folder, monkeypatch)
                keys = named_by({keys[0]: ""}, COMPOSED[row])
        else:
            outcome = validated(changed(of_groups(row), values), folder, monkeypatch)
            keys = named_by(values, COMPOSED[row])
        counts[outcome.kind] += 1
        event(outcome.kind)
        if outcome.kind != "validated":
            check_refusal(outcome, keys)
        else:
            wrong = [key for key, value in values.items() if value in VALUES[key][1] and key not in LATE]
            assert not wrong, f"accepted: {values}"

    each()
    print(dict(counts))
    assert counts["composed"] >= 500
    assert counts["validated"] >= 100
    assert counts["refused"] >= 100


def train(place: Path, row: int, values: dict[str, str], counts: Counter[str]) -> None:
    """Run one configuration whole, count how it ended, and check that it ended in one of the two ways."""
    counts["tried"] += 1
    folder = place / f"run{counts['tried']}"
    # torchao's optimizers compile an update for each shape, which takes longer than all else.
    optimizer = COMPOSED[row]["optimizer"].replace("adamw4bit", "fused_adamw")
    groups = {**COMPOSED[row], "optimizer": optimizer, "callbacks": "none" if row else "default", "data": "json"}
    outcome = run([*with_data(place, groups), *(f"{key}={value}" for key, value in values.items())], folder)
    counts[outcome.kind] += 1
    print(f"{counts['tried']}: {outcome.kind}: {groups} {values}")
    if outcome.kind == "trained":
        assert steps_of(folder) == 2
    else:
        check_refusal(outcome, named_by(values, groups))


def test_some_compositions_train_two_steps_or_are_refused_while_they_run(place):
    counts: Counter[str] = Counter()
    chance = random.Random(1)
    while counts["trained"] < 6:
        train(place, chance.randrange(len(COMPOSED) - len(UNAVAILABLE)), right_values(chance), counts)
    print(dict(counts))
    assert counts["tried"] < 20


def right_values(chance: random.Random) -> dict[str, str]:
    keys = chance.sample([key for key, (right, _) in sorted(VALUES.items()) if right], 4)
    return {key: chance.choice(VALUES[key][0]) for key in keys}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_60_compositions_train_two_steps_and_the_others_are_refused(place):
    counts: Counter[str] = Counter()
    chance = random.Random(2)
    while counts["trained"] < 60:
        values = right_values(chance)
        if chance.random() < 0.2:
            key = chance.choice(sorted(VALUES))
            values = {key: chance.choice(VALUES[key][1])}
        train(place, counts["tried"] % (len(COMPOSED) - len(UNAVAILABLE)), values, counts)
    print(dict(counts))
    assert counts["refused"] >= 10
    assert counts["tried"] < 150
