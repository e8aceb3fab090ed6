"""Sharding an MoE model with FSDP2 so that expert gradients can be freed, and the check that they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_sonar.experts import find_expert_tensors, owner_name


def shard_moe_(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    experts: str | Sequence[str] = "auto",
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
) -> nn.Module:
    """Shard a model with FSDP2, in place: each experts module, then each layer, then the model.

    FSDP2 reduces the gradients of one unit into one buffer, and each gradient is a view of it. An experts module that
    is a unit of its own has a buffer that can be freed inside backward; in its layer's unit nothing could be.

    Args:
        model: a model with batched expert tensors.
        mesh: the mesh to shard over; None is all ranks. Two-dimensional: replicated over the first, sharded over the
            second dimension.
        experts: ``"auto"``, or regular expressions over parameter names; see `find_expert_tensors`.
        mp_policy: FSDP2's mixed precision; None keeps the parameters' dtype.
        reshard_after_forward: FSDP2's; None frees whole parameters after forward and gathers them again in backward.

    Returns:
        ``model``.

    Raises:
        lightning_sonar.experts.NoExpertsError: if no expert tensors are found.
        ValueError: if a part of the model is sharded already.

    Source: torch's ``fully_shard``.
    """
    names = find_expert_tensors(model, experts).names
    return shard_units_(model, expert_modules(model, names), mesh, mp_policy, reshard_after_forward)


def shard_units_(
    model: nn.Module,
    own_units: Iterable[nn.Module],
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
) -> nn.Module:
    """As `shard_moe_`, for modules that are known already."""
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            f"{sharded[0] or 'The model'} is sharded already. Shard a model once: by the strategy, or by shard_moe_ in "
            "configure_model."
        )
    inside = set(model.modules())
    units = [module for module in own_units if module in inside and module is not model]
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy or MixedPrecisionPolicy()}
    for unit in dict.fromkeys([*units, *_layers(model, units)]):
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)
    return model


def expert_modules(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules that own the parameters of these names, each once."""
    return list({id(m): m for m in (model.get_submodule(owner_name(model, name)) for name in names)}.values())


def has_sharded_parameters(model: nn.Module) -> bool:
    """Whether some parameter is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _layers(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The elements of the outermost module lists that hold the units: dense layers among them, too."""
    wanted = set(units)
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and wanted & set(child.modules()):
                found.extend(child)
            else:
                visit(child)

    visit(model)
    return found


class GatheredLeaves:
    """What stands for sharded parameters in the graph: the whole ones that FSDP2 gathers for forward.

    They are leaves: backward for the sharded parameters themselves finds nothing and says nothing. FSDP2 makes each
    of them once, puts it in its module's place for forward, and takes it out again.

    Args:
        modules: the modules that own the parameters.
        tensors: the sharded parameters.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> None:
        wanted = {id(tensor) for tensor in tensors}
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._handles: list[Any] = []
        for module in modules:
            own = {name: id(tensor) for name, tensor in module.named_parameters(recurse=False) if id(tensor) in wanted}
            if own:
                # After FSDP2's own hook, which went on when the module was sharded.
                self._handles.append(module.register_forward_pre_hook(partial(self._see, own)))

    def _see(self, own: dict[str, int], module: nn.Module, args: Any) -> None:
        for name, key in own.items():
            self._leaves[key] = weakref.ref(module.get_parameter(name))

    def leaf_of(self, tensor: Tensor) -> Tensor:
        """The leaf of the last forward that stands for ``tensor``; itself if its module has not run."""
        ref = self._leaves.get(id(tensor))
        leaf = None if ref is None else ref()
        return tensor if leaf is None else leaf

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leaves.clear()


class HeldUntilUsed:
    """Keeps the memory of a freed gradient from being given away before its update has run on the device.

    An `Observer` of `InBackward`. With copies of the shards (a two-dimensional mesh) FSDP2 makes a gradient on one
    stream and runs the hooks on another, and relies on gradients staying until backward ends.
    """

    def on_gradient(self, tensor: Tensor) -> None:
        """The hook runs on the current stream."""
        grad = tensor.grad
        if isinstance(grad, DTensor) and grad.device_mesh.ndim > 1 and grad.is_cuda:
            grad.to_local().record_stream(torch.cuda.current_stream(grad.device))

    def on_phase(self, phase: str) -> None:
        """Nothing to do."""


class FreedCheck:
    """Watches the first step: is the memory of each released gradient given back before backward ends?

    An `Observer` of `InBackward`.

    Raises:
        RuntimeError: when backward has ended, naming tensors whose gradients are still in memory.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._looked = False
        self._storages: dict[str, weakref.ref[torch.UntypedStorage]] = {}

    def on_gradient(self, tensor: Tensor) -> None:
        """Remember the storage of this rank's shard of the gradient."""
        grad = tensor.grad
        if isinstance(grad, DTensor) and not self._looked:
            name = self._names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")
            self._storages[name] = weakref.ref(grad.to_local().untyped_storage())

    def on_phase(self, phase: str) -> None:
        """Look when the clip begins, which is after backward."""
        if phase != "clip" or self._looked:
            return
        self._looked = True
        kept = [name for name, storage in self._storages.items() if storage() is not None]
        self._storages.clear()
        if kept:
            raise RuntimeError(
                f"The gradients of {len(kept)} tensors were used inside backward but their memory was not freed, "
                f"{', '.join(kept[:3])} among them: FSDP2 keeps all gradients of a unit in one buffer, and other "
                "parameters' are in it. Each experts module must be a unit of its own: leave the sharding to "
                "SonarMoEFSDPStrategy, or call shard_moe_(model, mesh) in configure_model. If the experts module owns "
                "other parameters too (a router), use mode='standard_no_expert_clip'."
            )
