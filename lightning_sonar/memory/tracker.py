"""Which tensor storages are alive: a dispatch mode that sees every storage born while it is on.

Torch only, and nothing here knows about training: `MemoryProfiler` watches real steps with it, and it counts
the same under ``FakeTensorMode``, where no memory is allocated at all (enter the fake mode first, then this).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sonar.host import is_host
from lightning_sonar.memory.ledger import OTHER, Ledger, Record

_running: list[StorageTracker] = []
_plain_resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all tensor storages born while it is on, and of those it is told of.

    Storages are held by weak reference, so tracking keeps nothing alive, and a storage counts once however
    many tensors view it. An address that is used again belongs to a new storage, because the old one's death
    has been written down by then. Deaths are seen while the tracker is stopped, too, and in any thread.
    Storages in host memory (see `lightning_sonar.host`) have a book of their own, ``ledger.host``, and are in none of
    the device's figures.

    What it cannot see: memory that a kernel takes and gives back inside one operation, tensors made without
    an operator (a random generator's state: 5,056 bytes for each checkpointed region on a CPU), and storages
    that existed before and were not given to `track`. With any dispatch mode on, the autograd engine adds up
    gradients of a tensor used several times out of place where it would add in place otherwise; the book
    counts what happens without the tracker. Regions under ``torch.compile`` run as
    compiled as ever, but what their generated code allocates is not seen.

    Args:
        rounding: sizes are rounded up to a multiple of this many bytes: 1 (exact, as on a CPU), or 512 as
            PyTorch's CUDA caching allocator does.
        device: count storages on this device only (``"cuda"`` means all CUDA devices); None counts all.

    Example::

        with StorageTracker() as tracker:
            tracker.track(model.parameters(), "parameters")
            tracker.mark("forward")
            loss = model(batch)
            tracker.mark("backward")
            loss.backward()
        tracker.ledger.peak_bytes, tracker.ledger.peak_phase
    """

    # Without this, every higher-order operator (torch.cond, for instance) raises under the mode.
    supports_higher_order_operators = True

    def __init__(self, rounding: int = 1, device: torch.device | str | None = None) -> None:
        if rounding < 1:
            raise ValueError(
                f"StorageTracker(rounding={rounding}): expected a whole number of bytes from 1 up; "
                "pass 1 for exact sizes or 512 for what the CUDA allocator takes."
            )
        super().__init__()
        self.ledger = Ledger()
        self.rounding = rounding
        self.device = None if device is None else torch.device(device)
        # Keyed by the storage's address. The weak reference beside the record tells whether the storage
        # at that address is still the one meant, and its callback writes down the death.
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Record, Ledger]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled: otherwise it falls back to eager, or (flex_attention) raises."""
        return True

    # -- on and off --------------------------------------------------------------------------------------

    def __enter__(self) -> StorageTracker:
        if self in _running:
            raise RuntimeError(
                "StorageTracker is on already, expected it to be off; call stop() first, or make a second tracker."
            )
        super().__enter__()
        if not _running:
            # Resizing a storage is no operator, so no dispatch mode sees it, and FSDP frees memory that way.
            setattr(torch.UntypedStorage, "resize_", _watched_resize)  # noqa: B010
        _running.append(self)
        self.ledger.resume()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if self not in _running:
            return
        _running.remove(self)
        if not _running and torch.UntypedStorage.__dict__.get("resize_") is _watched_resize:
            del torch.UntypedStorage.resize_
        self.ledger.pause()
        self._leave_stack(exc_type, exc_val, exc_tb)

    def _leave_stack(self, *exc: Any) -> None:
        # A mode leaves the stack by popping whatever is on top, so modes that somebody entered after this
        # one and did not leave (an exception passed by) are lifted off first and put back.
        above: list[TorchDispatchMode] = []
        while (top := _python_dispatch._get_current_dispatch_mode()) is not self and top is not None:
            _python_dispatch._pop_mode()
            above.append(top)
        if top is self:
            super().__exit__(*exc)
        for mode in reversed(above):
            _python_dispatch._push_mode(mode)

    def start(self) -> StorageTracker:
        """Switch on; nothing happens if it is on. The same tracker may be started and stopped many times."""
        return self if self.running else self.__enter__()

    def stop(self) -> None:
        """Switch off; nothing happens if it is off. Storages that die afterwards are still written down."""
        self.__exit__(None, None, None)

    def close(self) -> None:
        """Stop for good and let go of every storage; the ledger stays readable."""
        self.stop()
        self._known.clear()

    @property
    def running(self) -> bool:
        """Whether it is on."""
        return self in _running

    # -- labels ------------------------------------------------------------------------------------------

    def track(self, tensors: Iterable[Tensor], label: str = OTHER) -> None:
        """Count the storages behind ``tensors``, which may exist already, under ``label``.

        A storage that is known already gets the label, for the whole of its life.
        """
        for tensor in tensors:
            self.label(tensor, label)

    def label(self, tensor: Tensor, label: str) -> None:
        """Say what the storage behind ``tensor`` holds; the label counts for the whole of its life."""
        for part in _parts(tensor):
            if self._counts(part):
                storage = part.untyped_storage()
                record = self._record_of(storage)
                if record is None:
                    self._register(storage, label, "existing")
                else:
                    record.label = label

    def mark(self, phase: str) -> None:
        """Begin a phase: what is written from here on belongs to it."""
        self.ledger.mark(phase)

    # -- what the mode sees ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A wrapper such as DTensor owns no memory. Let it take itself apart: the operations it then runs on
        # the tensors inside come back here.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        reused = args[0].untyped_storage() if _adds_in_place(func, args) else None
        result = func(*args, **(kwargs or {}))
        if reused is not None:
            self._retire(reused)
        for tensor in _flatten(result):
            self._saw(tensor, func, args, kwargs)
        return result

    def _saw(self, tensor: Tensor, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        for part in _parts(tensor):
            if not self._counts(part):
                continue
            storage = part.untyped_storage()
            record = self._record_of(storage)
            if record is not None:
                self._known[storage._cdata][2].resized(record, self._rounded(storage), str(func))
            elif not self._is_input(storage, args, kwargs):
                self._register(storage, OTHER, str(func))

    def _retire(self, storage: torch.UntypedStorage) -> None:
        """Write a storage off now: without a tracker, what was just made would have been written into it."""
        record = self._record_of(storage)
        if record is not None:
            self._known.pop(storage._cdata)[2].died(record)

    def _is_input(self, storage: torch.UntypedStorage, args: Any, kwargs: Any) -> bool:
        # A view of a tensor that was there before and that nobody asked us to track is not a birth.
        address = storage._cdata
        for value in _flatten((args, kwargs)):
            for part in _parts(value):
                if part.untyped_storage()._cdata == address:
                    return True
        return False

    def _counts(self, tensor: Tensor) -> bool:
        want = self.device
        if want is None:
            return True
        have = tensor.device
        if have.type == "cpu" and want.type != "cpu":
            return is_host(tensor.untyped_storage())
        return have.type == want.type and (want.index is None or have.index in (None, want.index))

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self.rounding) * self.rounding

    def _record_of(self, storage: torch.UntypedStorage) -> Record | None:
        entry = self._known.get(storage._cdata)
        return entry[1] if entry is not None and entry[0]() is storage else None

    def _register(self, storage: torch.UntypedStorage, label: str, op: str) -> None:
        known, ledger, address = self._known, self._book_of(storage), storage._cdata
        record = ledger.born(self._rounded(storage), label, op)

        def on_death(ref: weakref.ref[torch.UntypedStorage]) -> None:
            # Runs before the memory is given back, so the address cannot have a new owner yet.
            entry = known.get(address)
            if entry is not None and entry[0] is ref:
                del known[address]
            ledger.died(record)

        known[address] = (weakref.ref(storage, on_death), record, ledger)

    def _book_of(self, storage: torch.UntypedStorage) -> Ledger:
        if not is_host(storage):
            return self.ledger
        if self.ledger.host is None:
            self.ledger.host = Ledger()
        return self.ledger.host


def note_hidden(nbytes: int, op: str, device: torch.device) -> None:
    """Write down, in every tracker that is on, memory that is taken and given back where no dispatch mode can look.

    Args:
        nbytes: bytes that are alive at once.
        op: what takes them.
        device: where.
    """
    for tracker in _running:
        if tracker.device is None or tracker.device.type == device.type:
            tracker.ledger.died(tracker.ledger.born(nbytes, OTHER, op))


def _adds_in_place(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether this is the engine adding up gradients out of place, where it would add in place without a mode.

    It would where it holds the only reference to the sum so far. An addition of the engine's own has no Python
    function between the dispatch and the call that runs backward, or the beginning of the engine's thread.
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None and frame.f_code.co_name in ("inner", "_fn"):  # what keeps compilers out of a mode
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name != "_engine_run_backward":
        return False
    # Two: the tensor's own, and that of the Python object just made for it.
    return torch._C._storage_Use_Count(args[0].untyped_storage()._cdata) == 2


def _watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _plain_resize(storage, size)
    for tracker in _running:
        record = tracker._record_of(storage)
        if record is not None:
            book = tracker._known[storage._cdata][2]
            book.resized(record, tracker._rounded(storage), "UntypedStorage.resize_")
    return result


def _flatten(value: Any) -> Iterator[Tensor]:
    """The tensors in what an operator takes or gives: tensors, lists, tuples, dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        yield from _flatten(tuple(value.values()))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with a storage of their own that a tensor is made of: itself, in the ordinary case."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        # A DTensor names its mesh among them.
        inner = [getattr(tensor, name) for name in flatten()[0]]
        return [part for value in inner if isinstance(value, Tensor) for part in _parts(value)]
    if tensor.layout is torch.strided:
        return [tensor]
    # Taking a sparse tensor apart is an operation itself, which no tracker needs to see.
    with _python_dispatch._disable_current_modes():
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
