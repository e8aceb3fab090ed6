"""torchao's low-bit optimizers, as this package steps and saves them; see `low_bit_base`."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_sonar.optim import quantised
from lightning_sonar.optim.low_bit_base import CHUNK, LowBit, numbered
from lightning_sonar.optim.saved import MOMENTS, check_groups, check_moments
from lightning_sonar.optim.step_one import Group

__all__ = ["TorchAO", "TorchAO4bit", "TorchAOFp8"]


class TorchAO(LowBit):
    """torchao's optimizers; this one is the 8-bit one.

    Attributes:
        wide: temporaries of a chunk's size that the compiled update keeps, beside a scale for each block of both
            moments; read off the code that torch 2.13's inductor writes for a CPU.
    """

    always_chunked = True
    prefix = "TorchAO"
    chunk = CHUNK
    wide: tuple[torch.dtype, ...] = (torch.float32, torch.float32)
    constants: dict[int, tuple[Any, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.constants = {}

    def _new_state(self, group: Group, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            raise RuntimeError(
                f"{type(self).__name__} does not run on fake tensors, on which memory is planned: it compiles its "
                "update. plan_memory models it where it is told the optimizer: plan_memory('olmoe', optimizer=...). "
                "Plan a module of your own with another optimizer, such as FusedAdamW."
            )
        new = self._new_buffer  # type: ignore[attr-defined]
        state = self.state[tensor]
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = new(tensor, True)
        state["exp_avg_sq"] = new(tensor, False)

    def _step_tensor(self, group: Group, tensor: Tensor) -> None:
        state = self._state_of(group, tensor)
        # Lightning moves loaded states to the device, where reading the count would wait for it at each step.
        state["step"] = state["step"].cpu()
        self._look_at_constants(group, tensor)
        super()._step_tensor(group, tensor)

    def _look_at_constants(self, group: Group, tensor: Tensor) -> None:
        """Warn once if what the compiled update takes as constants has changed since the tensor's last step."""
        now = tuple(group["betas"]), group["eps"], group["weight_decay"]
        before = self.constants.setdefault(id(tensor), now)
        if before == now:
            return
        if 0 not in self.constants:  # which is no tensor's
            self.constants[0] = ()
            warnings.warn(
                f"betas, eps or weight_decay have changed from {before} to {now}. {type(self).__name__} compiles its "
                "update anew for each value and shape, half a minute each time. Keep them as they are: OneCycleLR and "
                "CyclicLR do with cycle_momentum=False.",
                stacklevel=2,
            )
        self.constants[id(tensor)] = now

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

    def __getstate__(self) -> dict[str, Any]:
        # The library's tensors can be neither copied nor pickled.
        kept = super().__getstate__()
        packed = {key: {k: _pickled(v) for k, v in entry.items()} for key, entry in kept["state"].items()}
        return {**kept, "state": packed}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `LowBit`."""
        super().__setstate__(state)
        if "watch" in state:
            self.constants = {}
            self.state = defaultdict(dict, {key: self._unpacked(key, entry) for key, entry in self.state.items()})

    def _unpacked(self, tensor: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
        unpacked = dict(entry)
        for name, value in entry.items():
            if isinstance(value, dict):
                parts = {"codes": value["codes"].view(value["dtype"]), "scale": value["scale"]}
                unpacked[name] = self._moment(tensor, name, parts, name)
        return unpacked

    def _moment(self, tensor: Tensor, name: str, saved: Any, what: str) -> Tensor:
        """A moment of a parameter, filled with a saved one; only the first one has a sign."""
        new = self._new_buffer(tensor, name == MOMENTS[0])  # type: ignore[attr-defined]
        quantised.fill(new, saved, what)
        return new

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
            ValueError: if it has other groups or other moments, or one was saved with another block size or shape.
        """
        check_groups(self, state_dict["param_groups"])
        check_moments(self, state_dict["state"], packed=True)
        new: dict[Tensor, dict[str, Tensor]] = {}
        for number, _, tensor in numbered(state_dict["param_groups"], self.param_groups):
            entry = state_dict["state"].get(number)
            if entry:
                new[tensor] = {
                    name: self._moment(tensor, name, entry[name], f"{name} of parameter {number}") for name in MOMENTS
                }
        plain = {
            key: {name: value for name, value in entry.items() if name not in MOMENTS}
            for key, entry in state_dict["state"].items()
        }
        # Torch would cast codes to the parameter's dtype.
        super().load_state_dict({**state_dict, "state": plain})
        for tensor, moments in new.items():
            self.state[tensor].update(moments)


def _pickled(value: Any) -> Any:
    """A quantised tensor as plain ones that pickle knows; float8 is unknown to it."""
    if not quantised.is_quantised(value):
        return value
    return {"codes": value.codes.view(torch.uint8), "scale": value.scale, "dtype": value.codes.dtype}


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
