"""Training modes: which tensors step inside backward, which are clipped, and what that gives up.

A mode names scopes of tensors. It knows no tensors, no optimizer and no framework, so the law that binds the
scopes together can be checked where a mode is made, not deep in a run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, get_args

Scope = Literal["none", "experts", "dense", "all"]
Granularity = Literal["tensor", "expert"]
ExpertClip = Literal["none", "exact", "lagged", "per_tensor", "per_expert"]

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
_GIVES_UP: dict[str, str] = {
    "none": "clipping on experts",
    "exact": "time, for a second backward pass",
    "lagged": "experts clipped by this step's norm: it is the last step's",
    "per_tensor": "one norm for all: each expert tensor is clipped by its own",
    "per_expert": "one norm for all: each expert of each tensor is clipped by its own",
}


@dataclass(frozen=True)
class Mode:
    """Which tensors step inside backward and which are clipped by global norm.

    Args:
        in_backward: tensors that are updated, and their gradients freed, inside backward.
        clip: tensors that the global-norm clip at the end of backward measures and scales.
        granularity: one hook a tensor, or one hook an expert of each tensor.
        expert_clip: how expert gradients are clipped inside backward. ``"none"``, the paper's: not at all.
            ``"exact"``: by the true global norm, which a first backward pass measures; `clip` is then ``"all"``.
            ``"lagged"``: by the global norm of the step before. ``"per_tensor"``, ``"per_expert"``: each tensor, or
            each expert's slice of it, by its own norm.
        gives_up: what a user loses against standard training, in words.

    Raises:
        ValueError: for an unknown choice, if a tensor is both freed in backward and clipped after it, or for an
            ``expert_clip`` where no experts alone step inside backward.

    Source: the modes without an expert clip are the rows of the table in arXiv 2611.03577.
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
        if self.expert_clip != "none" and self.in_backward != "experts":
            raise ValueError(
                f"Mode(in_backward={self.in_backward!r}, expert_clip={self.expert_clip!r}): {self._why_not()} Leave "
                "expert_clip='none', or let the experts, and only them, step inside backward (mode='sonar')."
            )
        if self.expert_clip == "exact":
            if self.clip != "all":
                raise ValueError(
                    f"Mode(clip={self.clip!r}, expert_clip='exact'): exact clipping measures and scales all tensors "
                    "by one global norm. Set clip='all'."
                )
            return
        both = _PARTS[self.in_backward] & _PARTS[self.clip]
        if both:
            raise ValueError(
                f"Mode(in_backward={self.in_backward!r}, clip={self.clip!r}): the gradients of "
                f"{' and '.join(sorted(both))} tensors are freed inside backward, so they cannot be in the "
                "global norm that is taken after it. Take them out of one of the two scopes, or measure the norm in a "
                "backward pass of its own (expert_clip='exact')."
            )

    def _why_not(self) -> str:
        if self.in_backward == "all":
            return "dense gradients are freed inside backward too and are never clipped, so there is no global norm."
        return (
            "expert gradients are kept until backward has ended, and are in its global-norm clip or are meant to be "
            "left out of it."
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
        "sonar_exact_clip": Mode("experts", "all", expert_clip="exact", gives_up=_GIVES_UP["exact"]),
    }
)
"""The named modes: the paper's, in the order of its table, and what goes beyond it."""


def resolve_mode(mode: str | Mode, expert_clip: ExpertClip | None = None) -> Mode:
    """Return the named mode, or ``mode`` itself if it is one already.

    Args:
        mode: a name from `MODES`, or a `Mode`.
        expert_clip: takes the place of the mode's own, unless None: ``resolve_mode("sonar", "exact")`` is
            ``sonar_exact_clip``.

    Raises:
        ValueError: if no mode has that name (the message lists the names), or the mode cannot have that clip.
    """
    if expert_clip is not None and expert_clip not in get_args(ExpertClip):
        raise ValueError(f"expert_clip={expert_clip!r}: expected one of {', '.join(get_args(ExpertClip))}.")
    if not isinstance(mode, Mode):
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is not a mode. Choose one of {', '.join(MODES)}, or pass a Mode.")
        own = MODES[mode].expert_clip
        if own != "none" and expert_clip not in (None, own):
            raise ValueError(
                f"mode={mode!r} with expert_clip={expert_clip!r}: this mode is mode='sonar' with expert_clip={own!r}. "
                f"Choose mode='sonar' with expert_clip={expert_clip!r}."
            )
        mode = MODES[mode]
    if expert_clip is None or expert_clip == mode.expert_clip:
        return mode
    clip: Scope = mode.clip
    if expert_clip == "exact" and mode.in_backward == "experts":
        clip = "all"
    elif mode.expert_clip == "exact":
        clip = "dense"
    return replace(mode, clip=clip, expert_clip=expert_clip, gives_up=_GIVES_UP[expert_clip])


def mode_name(mode: Mode) -> str:
    """The name under which ``mode`` stands in ``MODES``, if need be with its expert clip, or its representation."""
    for name, named in MODES.items():
        if named == mode:
            return name
    if mode.expert_clip != "none":
        bare = resolve_mode(mode, "none")
        for name, named in MODES.items():
            if named == bare:
                return f"{name}, expert_clip={mode.expert_clip}"
    return repr(mode)
