"""Optimizer states that live in host memory and visit the device for their tensor's update."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_sonar.host import host_empty_like, is_host
from lightning_sonar.modes import Mode, mode_name
from lightning_sonar.optim.adamw import FusedAdamW
from lightning_sonar.optim.step_one import is_element_wise
from lightning_sonar.sharded import is_sharded, local


def check_state_device(mode: Mode, device: str | None) -> None:
    """Refuse states in host memory where nothing streams them.

    Raises:
        ValueError: saying how to go on.
    """
    if device not in (None, "cpu"):
        raise ValueError(
            f"expert_state_device={device!r}: expected 'cpu', or None to keep states where their parameters are."
        )
    if device is not None and not mode.steps_in_backward(True):
        raise ValueError(
            f"expert_state_device={device!r} with mode {mode_name(mode)!r}: states are streamed, one tensor's at a "
            "time, around updates inside backward, and this mode updates no expert there. Use mode='sonar', or leave "
            "expert_state_device out."
        )


def check_streamable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state is not known to be of its parameter's shape, or that is made of several.

    Raises:
        ValueError: naming it.
    """
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        raise ValueError(
            f"expert_state_device='cpu': {type(optimizer).__name__} is made of several optimizers, which load their "
            "states on their own, onto the device. Use one FusedAdamW or torch.optim.AdamW, or leave "
            "expert_state_device out."
        )
    if not is_element_wise(optimizer):
        raise ValueError(
            f"expert_state_device='cpu' moves states that are shaped like their parameter, as element-wise optimizers "
            f"keep them; {type(optimizer).__name__} is not known to be one. Use FusedAdamW or torch.optim.AdamW, leave "
            "expert_state_device out, or set `element_wise = True` on the optimizer if it is."
        )


class _Copies(NamedTuple):
    """Device copies of one tensor's states, and when they are complete; None on a CPU, where they are at once."""

    tensors: dict[str, Tensor]
    ready: Any


class HostStates:
    """Keeps the states of some tensors in host memory, under their own keys in ``optimizer.state``.

    What is shaped like the parameter is moved; the rest (step counts) stays. `fetch` puts device copies in the place
    of a tensor's states and `put_back` copies them to the host again, so the optimizer's own step runs in between and
    gives the same bits. `fetch` also begins to fetch the states of the tensor that came next in the last backward:
    two tensors' states are on the device at most.

    On CUDA host memory is pinned and all copies run on one side stream, from whose memory the device copies are taken:
    what is fetched next cannot overtake what is put back, and the host waits for neither. ``optimizer.state_dict()``
    waits; whoever reads ``optimizer.state`` by hand calls `wait` first. PyTorch rounds pinned memory up to powers of
    two. On a CPU the copies are real too.

    Args:
        tensors: parameters of the optimizer, plain or sharded along a mesh.
        optimizer: an element-wise one.

    Attributes:
        watchers: told of device copies when they are made; they must not keep them.
    """

    def __init__(self, tensors: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
        # Weak: hooks hold this object, and a parameter holds its hooks where no garbage collector sees them.
        self._optimizer = weakref.ref(optimizer)
        self._tensors = {id(tensor): weakref.ref(tensor) for tensor in tensors}
        self._home: dict[int, dict[str, Tensor]] = {}
        self._ahead: tuple[int, _Copies] | None = None
        self._next: dict[int, int] = {}
        self._previous: int | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._loading: dict[int, dict[str, Any]] = {}
        self._aside: dict[int, dict[str, Any]] = {}
        self.watchers: list[Callable[[Iterable[Tensor]], None]] = []
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self.wait()),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def keeps(self, tensor: Tensor) -> bool:
        """Whether the states of this tensor are kept in host memory."""
        return id(tensor) in self._tensors

    def keep(self, tensor: Tensor) -> None:
        """Keep the states of this tensor, too, in host memory: those there are go there at its next update."""
        self._tensors[id(tensor)] = weakref.ref(tensor)

    @torch.no_grad()
    def init(self) -> None:
        """Move the states there are to the host, and make those that `FusedAdamW` would make, one tensor at a time."""
        optimizer = self._live()
        for ref in self._tensors.values():
            tensor = ref()
            if tensor is None:
                continue
            if isinstance(optimizer, FusedAdamW):
                optimizer.init_state([tensor])
            if optimizer.state.get(tensor):
                self.put_back(tensor)
                self.wait()  # or the device would hold the next one's before this one's are gone

    @torch.no_grad()
    def fetch(self, tensor: Tensor) -> None:
        """Put the states of ``tensor`` on its device, and begin with those of the tensor expected next."""
        key = id(tensor)
        ahead, self._ahead = self._ahead, None
        if self._state_of(tensor):
            copies = ahead[1] if ahead is not None and ahead[0] == key else None
            # What was fetched for another tensor gives its room back first.
            ahead = None
            self._use(tensor, self._copies(tensor) if copies is None else copies)
        if self._previous is not None:
            self._next[self._previous] = key
        self._previous = key
        ref = self._tensors.get(self._next.get(key, 0))
        following = None if ref is None else ref()
        if following is not None and following is not tensor and id(following) not in self._home:
            self._ahead = (id(following), self._copies(following))

    @torch.no_grad()
    def put_back(self, tensor: Tensor) -> None:
        """Copy the states of ``tensor`` to the host, and free what they took on the device.

        Raises:
            TypeError: for a state of a tensor subclass, which is more than its elements.
        """
        home = self._home.pop(id(tensor), {})
        state = self._state_of(tensor)
        for key, value in state.items():
            if not _is_shaped(value, tensor) or _is_kept(value, tensor):
                continue
            if type(local(value)) not in (Tensor, torch.nn.Parameter) and not _is_fake(local(value)):
                raise TypeError(
                    f"expert_state_device='cpu': {type(self._live()).__name__} keeps {key} as a "
                    f"{type(value).__name__}, which cannot be moved element by element. Leave expert_state_device out."
                )
            target = home.get(key)
            if target is None or target.dtype != value.dtype:
                target = _host_like(value)
            self._copy(local(target), local(value))
            state[key] = target

    def end_step(self) -> None:
        """The optimizer has stepped: nothing more is expected before the next backward."""
        self._previous, self._ahead = None, None

    def abandon(self) -> None:
        """Put back what an exception left on the device."""
        for key in list(self._home):
            tensor = self._tensors[key]()
            if tensor is not None:
                self.put_back(tensor)
        self._home.clear()
        self.end_step()

    def wait(self) -> None:
        """Wait until the host's copies are whole."""
        for stream in self._streams.values():
            stream.synchronize()

    def remove(self) -> None:
        """Let go of the optimizer. Its states stay in host memory, in ordinary instead of pinned memory."""
        self.abandon()
        self.wait()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        optimizer = self._optimizer()
        for ref in self._tensors.values():
            tensor = ref()
            if optimizer is None or tensor is None or tensor not in optimizer.state:
                continue
            state = optimizer.state[tensor]
            for key, value in state.items():
                if _is_shaped(value, tensor) and local(value).device.type == "cpu" and local(value).is_pinned():
                    state[key] = _wrapped(value, torch.empty_like(local(value)).copy_(local(value)))

    def set_aside(self) -> None:
        """Take the states in host memory out of the optimizer, so that nobody moves them; until `take_again`."""
        for key, ref in self._tensors.items():
            tensor = ref()
            state = {} if tensor is None else self._state_of(tensor)
            away = {name: value for name, value in state.items() if tensor is not None and _is_kept(value, tensor)}
            for name in away:
                del state[name]
            self._aside[key] = away

    def take_again(self) -> None:
        """Undo `set_aside`."""
        for key, away in self._aside.items():
            tensor = self._tensors[key]()
            if tensor is not None:
                self._state_of(tensor).update(away)
        self._aside.clear()

    def move_others(self, device: torch.device) -> None:
        """Move all states that are not kept in host memory to ``device``, as Lightning does with all states."""
        for state in self._live().state.values():
            for key, value in state.items():
                # Step counts are where the optimizer wants them.
                if isinstance(value, Tensor) and key != "step" and not is_host(local(value).untyped_storage()):
                    state[key] = value.to(device)

    # Inside.

    def _live(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("The optimizer whose states are kept in host memory is gone; keep it alive.")
        return optimizer

    def _state_of(self, tensor: Tensor) -> dict[str, Any]:
        return self._live().state.get(tensor, {})

    def _use(self, tensor: Tensor, copies: _Copies) -> None:
        if copies.ready is not None:
            torch.cuda.current_stream(local(tensor).device).wait_event(copies.ready)
        state = self._state_of(tensor)
        self._home[id(tensor)] = {key: state[key] for key in copies.tensors}
        state.update(copies.tensors)

    def _copies(self, tensor: Tensor) -> _Copies:
        stream, device = self._stream(tensor), local(tensor).device
        copies: dict[str, Tensor] = {}
        with torch.cuda.stream(stream):
            for key, value in self._state_of(tensor).items():
                if _is_shaped(value, tensor) and _is_away(value, device):
                    part = local(value)
                    copy = torch.empty_like(part, device=device).copy_(part, non_blocking=True)
                    copies[key] = _wrapped(value, copy)
        for watch in self.watchers:
            watch(copies.values())
        return _Copies(copies, None if stream is None else stream.record_event())

    def _copy(self, target: Tensor, value: Tensor) -> None:
        stream = self._stream(value)
        if stream is None:
            target.copy_(value)
            return
        # The next use of this memory is on the side stream, or must wait if it was not taken from there.
        stream.wait_stream(torch.cuda.current_stream(value.device))
        value.record_stream(stream)
        with torch.cuda.stream(stream):
            target.copy_(value, non_blocking=True)

    def _stream(self, tensor: Tensor) -> torch.cuda.Stream | None:
        device = local(tensor).device
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _before_load(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """Take aside what is to stay in host memory: the optimizer would put all of it on the device."""
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        indices = [index for group in given["param_groups"] for index in group["params"]]
        rest = dict(given["state"])
        self.wait()
        self.end_step()
        self._loading = {}
        for index, tensor in zip(indices, tensors, strict=False):
            saved = rest.get(index)
            if not self.keeps(tensor) or not isinstance(saved, Mapping):
                continue
            shaped = {key: value for key, value in saved.items() if key != "step" and _is_shaped(value, tensor)}
            rest[index] = {key: value for key, value in saved.items() if key not in shaped}
            self._loading[id(tensor)] = {"state": shaped, "order": list(saved), "live": dict(self._state_of(tensor))}
        return {**given, "state": rest}

    @torch.no_grad()
    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        loading, self._loading = self._loading, {}
        for key, entry in loading.items():
            tensor = self._tensors[key]()
            if tensor is None:
                continue
            state = dict(optimizer.state[tensor])
            for name, value in entry["state"].items():
                # As Optimizer.load_state_dict casts.
                dtype = tensor.dtype if tensor.is_floating_point() else value.dtype
                live = entry["live"].get(name)
                if not isinstance(live, Tensor) or live.dtype != dtype or not _is_kept(live, tensor):
                    live = _wrapped(tensor, host_empty_like(local(tensor), dtype=dtype))
                local(live).copy_(local(value))
                state[name] = live
            optimizer.state[tensor] = {name: state[name] for name in entry["order"]}


def _is_shaped(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == tensor.shape


def _is_kept(value: Any, tensor: Tensor) -> bool:
    return _is_shaped(value, tensor) and is_host(local(value).untyped_storage())


def _is_away(value: Tensor, device: torch.device) -> bool:
    part = local(value)
    return is_host(part.untyped_storage()) or part.device != device


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"


def _host_like(value: Tensor) -> Tensor:
    return _wrapped(value, host_empty_like(local(value)))


def _wrapped(like: Tensor, part: Tensor) -> Tensor:
    """``part`` as this rank's shard of a DTensor placed like ``like``; itself for a plain tensor."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    placed = cast(Any, like)
    # DTensor.from_local would move it to the mesh's device.
    return cast(Any, DTensor)(part, placed._spec, requires_grad=False)
