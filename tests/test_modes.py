from __future__ import annotations

import dataclasses

import pytest

from lightning_sonar import MODES, Mode
from lightning_sonar.modes import mode_name, resolve_mode


def test_named_modes_are_the_papers_rows_in_order():
    papers = ["standard", "standard_no_expert_clip", "in_backward_all", "sonar", "sonar_per_expert"]
    assert list(MODES) == [*papers, "sonar_exact_clip"]


@pytest.mark.parametrize(
    ("name", "steps", "clips"),
    [
        ("standard", (False, False), (True, True)),
        ("standard_no_expert_clip", (False, False), (False, True)),
        ("in_backward_all", (True, True), (False, False)),
        ("sonar", (True, False), (False, True)),
        ("sonar_per_expert", (True, False), (False, True)),
        ("sonar_exact_clip", (True, False), (True, True)),
    ],
)
def test_each_mode_steps_and_clips_its_scope(name, steps, clips):
    mode = MODES[name]
    assert (mode.steps_in_backward(True), mode.steps_in_backward(False)) == steps
    assert (mode.clips(True), mode.clips(False)) == clips


@pytest.mark.parametrize(
    ("in_backward", "clip", "what"),
    [
        ("experts", "experts", "experts"),
        ("experts", "all", "experts"),
        ("all", "dense", "dense"),
        ("all", "all", "dense and experts"),
        ("dense", "all", "dense"),
    ],
)
def test_what_is_freed_in_backward_cannot_be_clipped_after_it(in_backward, clip, what):
    with pytest.raises(ValueError, match=f"gradients of {what} tensors are freed inside backward"):
        Mode(in_backward=in_backward, clip=clip)


@pytest.mark.parametrize("field", ["in_backward", "clip", "granularity", "expert_clip"])
def test_unknown_choice_is_refused_with_the_valid_ones(field):
    with pytest.raises(ValueError, match=f"Mode\\({field}='nonsense'\\): expected one of '"):
        Mode(**{field: "nonsense"})


def test_modes_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODES["sonar"].clip = "all"  # type: ignore[misc]
    with pytest.raises(TypeError):
        MODES["mine"] = Mode()  # type: ignore[index]


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="mode='sonnar' is not a mode. Choose one of standard, .*sonar"):
        resolve_mode("sonnar")


def test_a_mode_resolves_to_itself_and_knows_its_name():
    mode = Mode(in_backward="dense", clip="experts")
    assert resolve_mode(mode) is mode
    assert mode_name(MODES["sonar"]) == "sonar"
    assert mode_name(mode).startswith("Mode(")
