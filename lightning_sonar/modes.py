"""Training modes: which tensors step inside backward, which are clipped, and what that gives up.

A mode names scopes of tensors. It knows no tensors, no optimizer and no framework, so the law that binds the
scopes together can be checked where a mode is made, not deep in a run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args

Scope = Literal["none", "experts", "dense", "all"]
Granularity = Literal["tensor", "expert"]
ExpertClip = Literal["none"]

_PARTS: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "experts": frozenset({"experts"}),
    "dense": frozenset({"dense"}),
    "all": frozenset({"experts", "dense"}),
}
_CHOICES = {
    "in_backward": get_args(Scope),
    "clip": get_args(Scope),
    "granularity": get_args(Granularity),
    "expert_clip": get_args(ExpertClip),
}


@dataclass(frozen=True)
class Mode:
    """Which tensors step inside backward and which are clipped by global norm.

    Args:
        in_backward: tensors that are updated, and their gradients freed, inside backward.
        clip: tensors that the global-norm clip at the end of backward measures and scales.
        granularity: one hook a tensor, or one hook an expert of each tensor.
        expert_clip: how expert gradients are clipped inside backward; ``"none"`` is the paper's.
        gives_up: what a user loses against standard training, in words.

    Raises:
        ValueError: for an unknown choice, or if a tensor is both freed in backward and clipped after it.

    Source: the modes are the rows of the table in arXiv 2611.03577.
    """

    in_backward: Scope = "experts"
    clip: Scope = "dense"
    granularity: Granularity = "tensor"
    expert_clip: ExpertClip = "none"
    gives_up: str = "clipping on experts"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                raise ValueError(
                    f"Mode({field.name}={value!r}): expected one of {', '.join(map(repr, _CHOICES[field.name]))}."
                )
        both = _PARTS[self.in_backward] & _PARTS[self.clip]
        if both:
            raise ValueError(
                f"Mode(in_backward={self.in_backward!r}, clip={self.clip!r}): the gradients of "
                f"{' and '.join(sorted(both))} tensors are freed inside backward, so they cannot be in the "
                "global norm that is taken after it. Take them out of one of the two scopes."
            )

    def steps_in_backward(self, is_expert: bool) -> bool:
        """Whether a tensor (an expert's or a dense one) is updated inside backward."""
        return ("experts" if is_expert else "dense") in _PARTS[self.in_backward]

    def clips(self, is_expert: bool) -> bool:
        """Whether a tensor (an expert's or a dense one) is in the global-norm clip."""
        return ("experts" if is_expert else "dense") in _PARTS[self.clip]


MODES: MappingProxyType[str, Mode] = MappingProxyType(
    {
        "standard": Mode("none", "all", gives_up="nothing"),
        "standard_no_expert_clip": Mode("none", "dense", gives_up="clipping on experts"),
        "in_backward_all": Mode("all", "none", gives_up="all clipping"),
        "sonar": Mode("experts", "dense", gives_up="clipping on experts"),
        "sonar_per_expert": Mode("experts", "dense", granularity="expert", gives_up="clipping on experts"),
    }
)
"""The named modes, in the order of the paper's table."""


def resolve_mode(mode: str | Mode) -> Mode:
    """Return the named mode, or ``mode`` itself if it is one already.

    Raises:
        ValueError: if no mode has that name; the message lists the names.
    """
    if isinstance(mode, Mode):
        return mode
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not a mode. Choose one of {', '.join(MODES)}, or pass a Mode.")
    return MODES[mode]


def mode_name(mode: Mode) -> str:
    """The name under which ``mode`` stands in ``MODES``, or its representation if it stands there not."""
    return next((name for name, named in MODES.items() if named == mode), repr(mode))
