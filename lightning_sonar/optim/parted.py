"""One optimizer made of two: one for expert tensors, one for all other parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from lightning_sonar.experts import NoExpertsError, find_expert_tensors
from lightning_sonar.optim.step_one import Group, is_element_wise

__all__ = ["ExpertsAndDense"]

OptimizerFactory = Callable[..., torch.optim.Optimizer]


class ExpertsAndDense(torch.optim.Optimizer):
    """Lets expert tensors and dense parameters have optimizers of their own, behind one ordinary optimizer.

    Groups and state are the children's own dictionaries, so schedulers, clipping, hooks and callbacks see one
    optimizer. Its state dict is one ordinary state dict: the experts' groups first, then the dense ones; each child
    writes and loads its part itself, because torch's own loading casts 8-bit codes to the parameter's dtype. Example::

        ExpertsAndDense(model, experts=bnb_adamw8bit, dense=FusedAdamW, lr=1e-5)
        ExpertsAndDense(model, experts=partial(bnb_adamw8bit, lr=1e-5), dense=partial(FusedAdamW, lr=3e-5))

    A norm over the gradients of all groups, as in modes that clip all by it, is summed in the order of the groups,
    experts first: its last bit, and so a clipped step, may differ from that of one optimizer over all parameters.

    Args:
        params: a module, whose experts `find_expert_tensors` finds; or what any optimizer takes (parameters, named
            parameters, groups), of which the tensors with three or more dimensions, ``[E, ...]``, are the experts.
            Groups are divided and keep their settings. Parameters that need no gradient are left out; if that leaves no
            expert tensor, the dense optimizer updates all there is, and the experts' has an empty group.
        experts: makes the optimizer of the expert tensors from groups.
        dense: makes the optimizer of all others.
        shared: settings passed to both, such as ``lr``.

    Attributes:
        experts: the experts' optimizer.
        dense: the other one.
        found_inf: as for `FusedAdamW`, passed on to both. Meant for children that read it.

    Raises:
        ValueError: if there is no expert tensor, not even a frozen one, or nothing else to update.
    """

    def __init__(
        self, params: ParamsT | nn.Module, experts: OptimizerFactory, dense: OptimizerFactory, **shared: Any
    ) -> None:
        divided, frozen = _divide(params)
        if frozen and divided[1] and not divided[0]:
            # Numbers of groups stay those of any other run.
            divided[0].append({"params": []})
        kinds = ("expert tensor [E, ...]", "dense parameter")
        for groups, found, missing in zip(divided, divided[::-1], kinds, strict=True):
            if not groups:
                shapes = [list(_tensor(entry).shape) for group in found for entry in group["params"]][:5]
                raise ValueError(
                    f"ExpertsAndDense found no {missing}, only {shapes}. Pass the module, or use one optimizer for all."
                )
        self.experts = experts(divided[0], **shared)
        self.dense = dense(divided[1], **shared)
        self._joining = True
        super().__init__([group for child in self.children for group in child.param_groups], {})
        # Schedulers ask here what every group has. Not before: groups would get what their child does not know.
        self.defaults = {k: v for k, v in self.dense.defaults.items() if k in self.experts.defaults}
        self._join()

    @property
    def children(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.experts, self.dense

    @property
    def element_wise(self) -> bool:
        """See `is_element_wise`: whether all of it is. Who steps one tensor in slices asks the child that holds it."""
        return all(is_element_wise(child) for child in self.children)

    @property
    def found_inf(self) -> Tensor | None:
        return getattr(self.experts, "found_inf", None)

    @found_inf.setter
    def found_inf(self, flag: Tensor | None) -> None:
        for child in self.children:
            child.found_inf = flag  # type: ignore[attr-defined]

    def child_of(self, tensor: Tensor) -> torch.optim.Optimizer:
        """The child that updates ``tensor``.

        Raises:
            ValueError: if neither holds it.
        """
        for child in self.children:
            if any(tensor is p for group in child.param_groups for p in group["params"]):
                return child
        raise ValueError(f"No optimizer here holds this tensor of shape {list(tensor.shape)}.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the child that its tensors belong to, by their number of dimensions.

        Raises:
            ValueError: if it holds both kinds.
        """
        if self._joining:
            super().add_param_group(param_group)
            return
        (experts, dense), _ = _divide([param_group])
        if experts and dense:
            raise ValueError(
                "This parameter group holds expert tensors [E, ...] and other parameters, which have optimizers of "
                "their own here. Add them as two groups."
            )
        child = self.experts if experts else self.dense
        child.add_param_group((experts or dense)[0])
        self._join()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient, each by its own optimizer.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for child in self.children:
            child.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """One ordinary state dict; the second child's parameters are numbered after the first one's."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        states: dict[Any, Any] = {}
        groups: list[Group] = []
        for child, first in zip(self.children, (0, self._count(self.experts)), strict=True):
            # An optimizer writes down all the state it holds, and knows the numbers of its own parameters only.
            mine = {p for group in child.param_groups for p in group["params"]}
            child.state = defaultdict(dict, {p: state for p, state in self.state.items() if p in mine})
            try:
                saved = child.state_dict()
            finally:
                child.state = self.state
            states.update({_shifted(key, first): value for key, value in saved["state"].items()})
            groups += [{**g, "params": [_shifted(p, first) for p in g["params"]]} for g in saved["param_groups"]]
        return self._hooked(self._optimizer_state_dict_post_hooks, {"state": states, "param_groups": groups})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: if it has other groups than this optimizer.
        """
        state_dict = self._hooked(self._optimizer_load_state_dict_pre_hooks, state_dict.copy())
        groups = state_dict["param_groups"]
        found = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if found != expected:
            raise ValueError(
                f"The saved optimizer has groups of {found} parameters; expected {expected}, experts first. It belongs "
                "to another model, or to one optimizer over all parameters; resume with the optimizer that wrote it."
            )
        cut, count = len(self.experts.param_groups), self._count(self.experts)
        for child, mine, first in ((self.experts, groups[:cut], 0), (self.dense, groups[cut:], count)):
            numbers = set(chain.from_iterable(group["params"] for group in mine))
            state = {_shifted(k, -first): v for k, v in state_dict["state"].items() if k in numbers}
            moved = [{**group, "params": [_shifted(p, -first) for p in group["params"]]} for group in mine]
            child.load_state_dict({"state": state, "param_groups": moved})
        self._join()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _hooked(self, hooks: Mapping[int, Callable[..., Any]], state_dict: dict[str, Any]) -> dict[str, Any]:
        for hook in hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        # Groups and state are the children's. Each writes its own state only: a child may have to write it in its way.
        return {
            "defaults": self.defaults,
            "experts": self._alone(self.experts),
            "dense": self._alone(self.dense),
            "_joining": False,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()

    def _alone(self, child: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same child, but with the state of its own parameters alone."""
        twin = object.__new__(type(child))
        mine = {p for group in child.param_groups for p in group["params"]}
        own = defaultdict(dict, {p: state for p, state in self.state.items() if p in mine})
        twin.__dict__.update({**vars(child), "state": own})
        return twin

    def _count(self, child: torch.optim.Optimizer) -> int:
        return sum(len(group["params"]) for group in child.param_groups)

    def _join(self) -> None:
        """Make groups and state the children's own again: loading replaces them."""
        self._joining = False
        state = self.experts.state
        if self.dense.state is not state:
            state.update(self.dense.state)
        self.state = self.dense.state = state
        self.param_groups = [group for child in self.children for group in child.param_groups]


def _shifted(key: Any, by: int) -> Any:
    return key + by if isinstance(key, int) else key


def _divide(params: ParamsT | nn.Module) -> tuple[tuple[list[Group], list[Group]], bool]:
    """The groups of the expert tensors and those of all others, and whether an expert tensor is frozen."""
    frozen = False
    if isinstance(params, nn.Module):
        try:
            expert_ids = {id(tensor) for tensor in find_expert_tensors(params).tensors}
        except NoExpertsError as error:
            if not error.frozen:
                raise
            expert_ids, frozen = set(), True
        given: Iterable[Any] = params.parameters()
    else:
        expert_ids, given = None, params

    def is_expert(entry: Any) -> bool:
        tensor = _tensor(entry)
        return tensor.ndim >= 3 if expert_ids is None else id(tensor) in expert_ids

    listed = list(given)
    groups: list[Group] = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    divided: tuple[list[Group], list[Group]] = ([], [])
    for group in groups:
        entries = group["params"]
        entries = [entries] if isinstance(entries, Tensor) else list(entries)
        for wanted, into in zip((True, False), divided, strict=True):
            mine = [e for e in entries if is_expert(e) is wanted and _tensor(e).requires_grad]
            if mine:
                into.append({**group, "params": mine})
        frozen = frozen or any(is_expert(entry) and not _tensor(entry).requires_grad for entry in entries)
    return divided, frozen


def _tensor(entry: Any) -> Tensor:
    """A parameter, which may come with its name."""
    return cast(Tensor, entry[1] if isinstance(entry, tuple) else entry)
