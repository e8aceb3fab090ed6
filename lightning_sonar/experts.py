"""Which parameters are batched expert tensors, found by structure rather than by name."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

# transformers' dispatch decorator puts these on every module that holds batched experts.
_DISPATCH_ATTRIBUTES = ("has_gate", "is_transposed", "is_concatenated")
_BIAS_OR_SCALE = re.compile(r"(bias|scale)", re.IGNORECASE)
# Modules that only hold parameters of the module above them.
_HOLDERS = (nn.ParameterList, nn.ParameterDict, ParametrizationList)


class NoExpertsError(ValueError):
    """A model in which no expert tensor can be updated.

    Attributes:
        found: what there is: expert tensors that are all frozen, or nothing.
        frozen: whether there are expert tensors, all of them frozen.
    """

    def __init__(self, message: str, found: ExpertTensors) -> None:
        super().__init__(message)
        self.found = found
        self.frozen = bool(found.frozen)


class Source:
    """A model, held weakly, and what was asked of it."""

    def __init__(self, model: nn.Module, patterns: str | Sequence[str]) -> None:
        self._model = weakref.ref(model)
        self._patterns = patterns

    @property
    def model(self) -> nn.Module | None:
        """The model, or None if it is gone."""
        return self._model()

    def look_again(self) -> ExpertTensors | None:
        """The model's expert tensors as they are now; None if the model is gone, or has none of the kind."""
        model = self.model
        try:
            return None if model is None else _find(model, self._patterns)
        except ValueError:  # a pattern matches nothing any more
            return None


@dataclass(frozen=True)
class ExpertTensors(Mapping[str, Tensor]):
    """The batched expert parameters of one model, ordered as in ``model.named_parameters()``.

    A mapping from parameter name to parameter. Every tensor has the experts along dimension 0: ``[E, ...]``.
    A parameter that several modules share stands here once.

    Attributes:
        named: name to parameter.
        total_numel: number of elements of all the model's parameters, for the share in :meth:`report`.
        frozen: name to parameter of the frozen ones, which are no part of the mapping.
        source: where they were found; copies and pickles are without it.
    """

    named: dict[str, nn.Parameter]
    total_numel: int
    frozen: dict[str, nn.Parameter] = field(default_factory=dict)
    source: Source | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "source": None}

    def __getitem__(self, name: str) -> nn.Parameter:
        return self.named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)

    @property
    def names(self) -> list[str]:
        return list(self.named)

    @property
    def tensors(self) -> list[nn.Parameter]:
        return list(self.named.values())

    @property
    def numel(self) -> int:
        """Number of expert elements, all tensors together."""
        return sum(tensor.numel() for tensor in self.named.values())

    def report(self) -> str:
        """A few lines for a person: how many tensors, what share of the model, and the shapes by name."""
        share = self.numel / max(self.total_numel, 1)
        kinds: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, tensor in self.named.items():
            kinds.setdefault((re.sub(r"\d+", "*", name), tuple(tensor.shape)), []).append(name)
        lines = [
            f"{len(self)} expert tensors, {self.numel:,} of {self.total_numel:,} parameters ({share:.1%}):",
            *(f"  {len(names)} x {pattern} {list(shape)}" for (pattern, shape), names in kinds.items()),
        ]
        return "\n".join(lines)


def find_expert_tensors(model: nn.Module, patterns: Literal["auto"] | str | Sequence[str] = "auto") -> ExpertTensors:
    """Find the batched expert parameters of a model.

    By default they are found by structure: a module that owns a parameter with three dimensions, and an integer
    attribute with "expert" in its name whose value is that parameter's first dimension (or that carries the
    attributes of transformers' experts dispatch). Its 3-D parameters with that first dimension are expert
    tensors, and its 2-D ones only if they are biases or scales by name, so that a router weight ``[E, H]`` held
    by the same module stays out.

    Args:
        model: any module.
        patterns: ``"auto"``, or one or more regular expressions; a parameter whose name one of them matches
            anywhere (``re.search``) is an expert tensor.

    Returns:
        The tensors, ordered and named as in ``model.named_parameters()``; frozen ones are left out.

    Raises:
        NoExpertsError: a ValueError, if nothing is found. The message says what was seen and what to pass.
        ValueError: if a pattern matches nothing or a match has no expert dimension.

    Source: the rule follows transformers 5's batched layout, ``gate_up_proj [E, 2I, H]``, ``down_proj [E, H, I]``.
    """
    found = _find(model, patterns)
    if not found:
        raise NoExpertsError(_nothing_found(model, frozen=bool(found.frozen)), found)
    return found


def _find(model: nn.Module, patterns: str | Sequence[str]) -> ExpertTensors:
    if patterns == "auto":
        chosen = _by_structure(model)
    else:
        chosen = _by_name(model, [patterns] if isinstance(patterns, str) else list(patterns))
    parameters = dict(model.named_parameters())
    experts = {name: p for name, p in parameters.items() if id(p) in chosen}
    return ExpertTensors(
        {name: p for name, p in experts.items() if p.requires_grad},
        sum(p.numel() for p in parameters.values()),
        {name: p for name, p in experts.items() if not p.requires_grad},
        Source(model, patterns),
    )


def _by_structure(model: nn.Module) -> set[int]:
    return {id(p) for module in model.modules() for p in expert_parameters_of(module)}


def expert_parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """The expert parameters that ``module`` itself owns (not its children), by the structural rule.

    Those in a ParameterList or ParameterDict of the module, and the originals of its parametrizations, are its own.
    """
    own = dict(_own_parameters(module))
    counts = _expert_counts(module)
    experts: list[nn.Parameter] = []
    for num_experts in {p.shape[0] for p in own.values() if p.ndim == 3}:
        if num_experts not in counts and not _is_dispatched(module):
            continue
        experts += [
            p
            for name, p in own.items()
            if p.ndim in (2, 3) and p.shape[0] == num_experts and (p.ndim == 3 or _BIAS_OR_SCALE.search(name))
        ]
    return experts


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from module.named_parameters(recurse=False)
    for name, child in module.named_children():
        if isinstance(child, _HOLDERS):
            yield from child.named_parameters(name, recurse=False)
        elif name == "parametrizations":
            for original, holder in child.named_children():
                yield from holder.named_parameters(original, recurse=False)


def owner_name(model: nn.Module, name: str) -> str:
    """The name of the module that a parameter is used by: what owns it, or what owns the list that it is in."""
    owner = name.rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), (*_HOLDERS, nn.ModuleDict)):
        owner = owner.rpartition(".")[0]
    return owner


def _expert_counts(module: nn.Module) -> set[int]:
    return {
        value
        for name, value in vars(module).items()
        if "expert" in name.lower() and isinstance(value, int) and not isinstance(value, bool)
    }


def _is_dispatched(module: nn.Module) -> bool:
    return all(hasattr(module, attribute) for attribute in _DISPATCH_ATTRIBUTES)


def _by_name(model: nn.Module, patterns: Iterable[str]) -> set[int]:
    chosen: set[int] = set()
    for pattern in patterns:
        try:
            matches = {name: p for name, p in model.named_parameters() if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(f"experts={pattern!r} is not a regular expression: {error}.") from error
        if not matches:
            some = ", ".join([name for name, _ in model.named_parameters()][:5])
            raise ValueError(f"experts={pattern!r} matches no parameter. The model's names begin: {some}.")
        flat = [f"{name} {list(p.shape)}" for name, p in matches.items() if p.ndim < 2]
        if flat:
            raise ValueError(
                f"experts={pattern!r} matches {', '.join(flat[:3])}, which cannot hold experts along "
                "dimension 0. Narrow the pattern to the batched expert tensors [E, ...]."
            )
        chosen |= {id(p) for p in matches.values()}
    return chosen


def _nothing_found(model: nn.Module, frozen: bool) -> str:
    if frozen:
        return (
            f"All expert tensors of {type(model).__name__} are frozen (requires_grad=False), so there is nothing to "
            "update inside backward. Unfreeze them, train with mode='standard_no_expert_clip', or, if adapters on "
            "the experts train in their place (LoRA), pass experts=<regex over the adapters' parameter names>."
        )
    three_dim = [f"{name} {list(p.shape)}" for name, p in model.named_parameters() if p.ndim == 3]
    lists = [
        f"{name} ({len(module)} modules)"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and "expert" in name.lower()
    ]
    seen = f"{type(model).__name__} has {sum(1 for _ in model.parameters())} parameters"
    if lists:
        return (
            f"No batched expert tensors found. {seen}, and keeps its experts as a list of modules: "
            f"{', '.join(lists[:3])}. Store each layer's experts as one parameter [E, ...] (transformers 5 does "
            "so for its MoE models), or pass experts=<regex over parameter names> to treat each weight as one tensor."
        )
    if three_dim:
        return (
            f"No batched expert tensors found. {seen}; these have three dimensions: {', '.join(three_dim[:5])}, "
            "but the modules that own them have no integer attribute with 'expert' in its name that equals the "
            "first dimension. Add one (self.num_experts = E), or pass experts=<regex over parameter names>."
        )
    return (
        f"No batched expert tensors found. {seen}, none with three dimensions. Is this a Mixture-of-Experts model? "
        "If its experts are stored otherwise, pass experts=<regex over parameter names>."
    )
