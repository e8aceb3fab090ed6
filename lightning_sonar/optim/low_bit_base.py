"""What libraries' low-bit optimizers get here, so that they step one tensor inside backward.

The arithmetic and the states are the libraries' own. What is added: a tensor may be stepped in chunks, so that
temporaries stay small; states exist from the start; checkpoints hold plain tensors; the largest update is watched.
A library is imported when an optimizer is made, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_sonar.optim import quantised
from lightning_sonar.optim.saved import MOMENTS, check_groups, check_moments
from lightning_sonar.optim.step_one import Group, Part, narrowed
from lightning_sonar.optim.update_watch import UpdateWatch
from lightning_sonar.sharded import is_sharded, local

__all__ = ["BitsAndBytes", "Flash", "LowBit", "class_of", "numbered"]

CHUNK = 2**24
"""A chunk holds no more elements than this, where a tensor can be divided so."""

WATCHED_CHUNK = 2**22
"""The same, where chunks are made in watched steps only, for a copy of the weights: there the smaller, the better."""


class LowBit(torch.optim.Optimizer):
    """What all low-bit optimizers here have; a base beside the library's own class.

    Attributes:
        watch: how large updates are.
        part_of: see `FusedAdamW`.
    """

    library: type[torch.optim.Optimizer]
    made_of: tuple[type[LowBit], str, str, str]
    watch: UpdateWatch
    part_of: Part | None = None
    chunk = WATCHED_CHUNK
    # Its temporaries are several times the tensor, so it is always stepped in chunks.
    always_chunked = False
    # The library updates no more elements than this at once.
    most: int | None = None
    # Classes of several libraries have the same name.
    prefix = ""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._step_tensor(group, tensor)
        if self.part_of is None:
            self.watch.report()
        return loss

    @torch.no_grad()
    def make_states(self) -> None:
        """Create the state of every parameter that requires a gradient and has none yet."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.requires_grad:
                    self._state_of(group, tensor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: if it has other groups than this optimizer; nothing is loaded then.
        """
        check_groups(self, state_dict["param_groups"])
        super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so it cannot be found by its name.
        return _empty, self.made_of, self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        # Torch's own leaves out the library's settings. Hooks and a scheduler's patches stay behind, as with any
        # optimizer; so do the library's managers, of which a process has one.
        left = ("step", "_opt_called", "part_of", "mng", "page_mng", "constants")
        return {k: v for k, v in vars(self).items() if k not in left and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` returned, or groups and state of a state dict."""
        if "watch" in state:
            # A library's own would take it for a state dict.
            torch.optim.Optimizer.__setstate__(self, state)
        else:
            super().__setstate__(state)

    def _step_tensor(self, group: Group, tensor: Tensor) -> None:
        state, grad = self._state_of(group, tensor), tensor.grad
        # A shard may be empty, and an empty tensor has no largest update.
        watched = self.watch.wants(int(state["step"]) + 1) and local(tensor).numel() > 0
        too_many = self.most is not None and tensor.numel() > self.most
        if grad is None or not (watched or self.always_chunked or too_many):
            self._run(group, tensor, state)
            return
        count = quantised.chunks_of(tensor, quantised.block_of(state), self.chunk)
        if self.most is not None and tensor.numel() // count > self.most:
            raise ValueError(
                f"{type(self).__name__} updates at most {self.most:,} elements at once, and a tensor of shape "
                f"{list(tensor.shape)} cannot be cut into such parts along dimension 0. Use fused_adamw for it."
            )
        after: dict[str, Any] = {}
        for part, part_grad, part_state in quantised.chunks(tensor, grad, state, count):
            # Of a shard each rank watches its own part.
            before = local(part).clone() if watched else None
            part.grad = part_grad
            self._run(group, part, part_state)
            after = part_state
            if before is not None:
                self.watch.take(before, local(part))
        if watched:
            self.watch.tensor_done(tensor.shape)
        if count > 1:
            state["step"] = after["step"]

    def _run(self, group: Group, tensor: Tensor, state: dict[str, Any]) -> None:
        """The library's own step of one tensor, or of a chunk."""
        copy = narrowed(self, group, tensor, {}, self.library)
        copy.state = {tensor: state}
        copy.step()

    def _state_of(self, group: Group, tensor: Tensor) -> dict[str, Any]:
        state = self.state[tensor]
        if not state:
            self._new_state(group, tensor)
        return state

    def _new_state(self, group: Group, tensor: Tensor) -> None:
        raise NotImplementedError


class BitsAndBytes(LowBit):
    """bitsandbytes' optimizers."""

    prefix = "BitsAndBytes"
    # Its kernels take a 32-bit number of elements.
    most = 2**31 - 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `LowBit`; the managers are this process's."""
        super().__setstate__(state)
        if "mng" not in vars(self):
            self.mng = import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
            self.page_mng = import_module("bitsandbytes.functional").GlobalPageManager.get_instance()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load what `state_dict` of this class, of bitsandbytes or of any `torch.optim.AdamW` returned.

        Float moments are quantised, where this optimizer would: each to the nearest code of its block.

        Raises:
            ValueError: if it has other groups, or neither codes nor float moments; nothing is loaded then.
        """
        check_groups(self, state_dict["param_groups"])
        floats = {number: entry for number, entry in state_dict["state"].items() if not _is_bitsandbytes(entry)}
        check_moments(self, floats)
        kept = {number: entry for number, entry in state_dict["state"].items() if number not in floats}
        library: Any = self.library
        library.load_state_dict(self, {**state_dict, "state": kept}, move_to_device)
        for number, group, tensor in numbered(state_dict["param_groups"], self.param_groups):
            if floats.get(number):
                self._take_moments(group, tensor, floats[number])
            state = self.state.get(tensor, {})
            state.update({name: _flat(value) for name, value in state.items() if name in ("state1", "state2")})

    def _take_moments(self, group: Group, tensor: Tensor, saved: dict[str, Any]) -> None:
        self._new_state(group, tensor)
        state = self.state[tensor]
        state["step"] = int(saved["step"])
        for index, name in enumerate(MOMENTS, start=1):
            codes, moment = state[f"state{index}"], saved[name].to(tensor.device)
            if codes.dtype == torch.uint8:
                quantised.encode_(codes, state[f"absmax{index}"], moment, state[f"qmap{index}"])
            else:
                codes.copy_(moment)

    def _step_tensor(self, group: Group, tensor: Tensor) -> None:
        _make_contiguous(tensor)
        super()._step_tensor(group, tensor)

    def _new_state(self, group: Group, tensor: Tensor) -> None:
        if is_sharded(tensor):
            raise ValueError(
                f"{type(self).__name__} got a sharded parameter of shape {list(tensor.shape)}, as FSDP2 makes them; "
                "bitsandbytes' kernels take whole ones. Use torchao's states, which can be sharded (adamw8bit, "
                "adamw4bit, adamw_fp8), or a whole model on each device (SonarMoEDDPStrategy, trainer=ddp)."
            )
        _make_contiguous(tensor)
        copy = narrowed(self, group, tensor, {"mng": _no_overrides()}, self.library)
        copy.state = self.state
        copy.init_state(copy.param_groups[0], tensor, 0, 0)

    def _run(self, group: Group, tensor: Tensor, state: dict[str, Any]) -> None:
        # Overrides of its global manager go by a parameter's position, which a copy does not keep.
        copy = narrowed(self, group, tensor, {"mng": _no_overrides(), "initialized": True}, self.library)
        copy.state = {tensor: state}
        copy.step()


def _make_contiguous(tensor: Tensor) -> None:
    # The library does it in a step, too late for its states, and in a chunk's step it would update a copy.
    if not tensor.is_contiguous():
        tensor.data = tensor.data.contiguous()


def _flat(state: Tensor) -> Tensor:
    """A state whose elements lie in the order of its dimensions.

    The library's CPU code goes by elements, its kernels walk memory, whatever the strides say.
    """
    if state.device.type == "cpu":
        return state.contiguous()
    return state.as_strided(state.shape, torch.empty(state.shape, device="meta").stride())


def _is_bitsandbytes(entry: dict[str, Any]) -> bool:
    return any("state1" in names for names in (entry, *(v for v in entry.values() if isinstance(v, dict))))


def numbered(saved: list[Group], groups: list[Group]) -> Iterator[tuple[Any, Group, Tensor]]:
    """Numbers that a state dict gives to parameters, with their group and themselves."""
    for saved_group, group in zip(saved, groups, strict=True):
        for number, tensor in zip(saved_group["params"], group["params"], strict=True):
            yield number, group, tensor


def _no_overrides() -> Any:
    manager = import_module("bitsandbytes.optim").GlobalOptimManager
    empty = object.__new__(manager)
    empty.initialize()
    return empty


class Flash(LowBit):
    """FlashOptim's optimizers."""

    def _step_tensor(self, group: Group, tensor: Tensor) -> None:
        self._run(group, tensor, self._state_of(group, tensor))

    def _new_state(self, group: Group, tensor: Tensor) -> None:
        self._ensure_state_initialized(tensor, hparams=group)  # type: ignore[attr-defined]


@functools.cache
def class_of(ours: type[LowBit], module: str, name: str, extra: str) -> type[LowBit]:
    """Our base and the library's class in one.

    Raises:
        ImportError: if the package is missing, naming the extra.
    """
    package = module.partition(".")[0]
    try:
        library = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(
            f"{name} needs the package {package}, which is not installed. Install it with "
            f"pip install 'lightning-sonar[{extra}]'."
        ) from error
    members = {"library": library, "made_of": (ours, module, name, extra), "__doc__": library.__doc__}
    return type(f"{ours.prefix}{name}", (ours, library), {**members, "__module__": __name__})


def _empty(ours: type[LowBit], module: str, name: str, extra: str) -> LowBit:
    """An optimizer that has yet to be given its state: the first half of unpickling and copying one."""
    return object.__new__(class_of(ours, module, name, extra))
