"""What libraries' low-bit optimizers get here, so that they step one tensor inside backward.

The arithmetic and the states are the libraries' own. What is added: a tensor may be stepped in chunks, so that
temporaries stay small; states exist from the start; checkpoints hold plain tensors; the largest update is watched.
A library is imported when an optimizer is made, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_sonar.optim import quantised
from lightning_sonar.optim.step_one import Group, Part, narrowed
from lightning_sonar.optim.update_watch import UpdateWatch

__all__ = ["BitsAndBytes", "Flash", "LowBit", "TorchAO", "TorchAO4bit", "TorchAOFp8", "class_of"]

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
    watch: UpdateWatch
    part_of: Part | None = None
    chunk = WATCHED_CHUNK
    # Its temporaries are several times the tensor, so it is always stepped in chunks.
    always_chunked = False

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

    def _step_tensor(self, group: Group, tensor: Tensor) -> None:
        state, grad = self._state_of(group, tensor), tensor.grad
        watched = self.watch.wants(int(state["step"]) + 1)
        if grad is None or not (watched or self.always_chunked):
            self._run(group, tensor, state)
            return
        count = quantised.chunks_of(tensor, quantised.block_of(state), self.chunk)
        after: dict[str, Any] = {}
        for part, part_grad, part_state in quantised.chunks(tensor, grad, state, count):
            before = part.clone() if watched else None
            part.grad = part_grad
            self._run(group, part, part_state)
            after = part_state
            if before is not None:
                self.watch.take(before, part)
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

    def _new_state(self, group: Group, tensor: Tensor) -> None:
        copy = narrowed(self, group, tensor, {"mng": _no_overrides()}, self.library)
        copy.state = self.state
        copy.init_state(copy.param_groups[0], tensor, 0, 0)

    def _run(self, group: Group, tensor: Tensor, state: dict[str, Any]) -> None:
        # Overrides of its global manager go by a parameter's position, which a copy does not keep.
        copy = narrowed(self, group, tensor, {"mng": _no_overrides(), "initialized": True}, self.library)
        copy.state = {tensor: state}
        copy.step()


def _no_overrides() -> Any:
    manager = import_module("bitsandbytes.optim").GlobalOptimManager
    empty = object.__new__(manager)
    empty.initialize()
    return empty


class TorchAO(LowBit):
    """torchao's optimizers; this one is the 8-bit one.

    Attributes:
        wide: temporaries of a chunk's size that the compiled update keeps, beside a scale for each block of both
            moments; read off the code that torch 2.13's inductor writes for a CPU.
    """

    always_chunked = True
    chunk = CHUNK
    wide: tuple[torch.dtype, ...] = (torch.float32, torch.float32)

    def _new_state(self, group: Group, tensor: Tensor) -> None:
        new = self._new_buffer  # type: ignore[attr-defined]
        state = self.state[tensor]
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = new(tensor, True)
        state["exp_avg_sq"] = new(tensor, False)

    def _run(self, group: Group, tensor: Tensor, state: dict[str, Any]) -> None:
        if not isinstance(group["lr"], Tensor):  # as a user, or a checkpoint of another AdamW, may have left it
            group = {**group, "lr": torch.tensor(group["lr"], dtype=torch.float32)}
        # Compiled code cannot start under a dispatch mode, such as that of the memory tracker.
        with _disable_current_modes(), _uninitialised():
            super()._run(group, tensor, state)
        block = quantised.block_of(state)
        if block > 1:
            # Its package imports the whole of this one.
            from lightning_sonar.memory.tracker import note_hidden

            nbytes = sum(dtype.itemsize for dtype in self.wide) * tensor.numel() + 2 * 4 * (tensor.numel() // block)
            note_hidden(nbytes, f"{type(self).__name__}'s compiled update", tensor.device)

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's, with quantised tensors taken apart into plain ones: codes and scales.

        The library's own tensors do not load through a callable ``map_location``, which Lightning passes, and not
        with ``weights_only`` before torchao is imported.
        """
        saved = super().state_dict()
        state = {k: {name: quantised.packed(v) for name, v in entry.items()} for k, entry in saved["state"].items()}
        return {**saved, "state": state}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class, of torchao's or of `torch.optim.AdamW` returned.

        Float moments are quantised.

        Raises:
            ValueError: if a moment was saved with another block size or shape.
        """
        moments = ("exp_avg", "exp_avg_sq")
        plain = {
            key: {name: value for name, value in entry.items() if name not in moments}
            for key, entry in state_dict["state"].items()
        }
        # Torch would cast codes to the parameter's dtype.
        super().load_state_dict({**state_dict, "state": plain})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        for number, tensor in zip(numbers, tensors, strict=True):
            for name, signed in zip(moments, (True, False), strict=True):
                if number in state_dict["state"]:
                    new = self._new_buffer(tensor, signed)  # type: ignore[attr-defined]
                    quantised.fill(new, state_dict["state"][number][name], f"{name} of parameter {number}")
                    self.state[tensor][name] = new


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Deterministic algorithms fill new memory, by an operator that torchao's tensors have not; it is all written."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    if before:
        settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        if before:
            settings.fill_uninitialized_memory = True


class TorchAO4bit(TorchAO):
    """torchao's 4-bit optimizer, whose temporaries are 26 bytes an element."""

    chunk = CHUNK // 2
    wide = (torch.uint8, torch.uint8, torch.float32, torch.float32, torch.int64, torch.int64)


class TorchAOFp8(TorchAO):
    """torchao's float8 optimizer, whose temporaries are a scale for each block."""

    wide = ()


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
    return type(name, (ours, library), {"library": library, "__module__": __name__, "__doc__": library.__doc__})
