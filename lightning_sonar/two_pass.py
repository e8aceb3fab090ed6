"""Exact clipping: one backward pass measures the true global norm, a second one over the same graph updates experts.

The norm is taken, and the gradients are scaled, by the very calls and in the dtypes of ``clip_grad_norm_``: the update
is bit for bit that of ordinary training, which keeps every gradient until the norm of all is known.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_sonar import messages
from lightning_sonar.clipping import is_nonfinite, scale_, tensor_norm, total_norm, with_gradients
from lightning_sonar.expert_clip import Attributes, Unclipped, gradient, scaling
from lightning_sonar.sharded import whole

REPEATABLE = 0.01
"""How much, of its norm, a gradient may differ between two backwards through one graph."""


class TwoPass(Unclipped):
    """The books of a step in two passes; `InBackward` runs them.

    Args:
        frees_dense: free dense gradients in the first pass too, and form them again in the second one.
        checks_gradients: look in the first pass whether each gradient is finite.

    Raises:
        RuntimeError: in the first step that clips, if the second pass forms another gradient than the first one: some
            backward has overwritten what it would need again. Only this step waits for the device.

    Attributes:
        measuring: whether the pass under way is the first of two.
        whole: whether gradients of earlier backwards were there, as under exact accumulation: then one pass adds to
            them, and the step ends as ordinary training does.
        norm: the global norm of the step under way, 0-dim, in the dtype that ``clip_grad_norm_`` gives it; None
            before it is known.
        clipped: whether dense gradients have been scaled by it.
        bad: for each gradient that was checked, whether it is not finite: float32, 0-dim, 1.0 or 0.0.
    """

    def __init__(self, frees_dense: bool, checks_gradients: bool) -> None:
        self.frees_dense = frees_dense
        self.measuring = False
        self.whole = False
        self.norm: Tensor | None = None
        self.clipped = False
        self._checks = checks_gradients
        self._norms: dict[int, Tensor] = {}
        self.bad: list[Tensor] = []
        self._freed: set[int] = set()
        self._kept: set[int] = set()
        self._compared = False

    def begin(self, tensors: Iterable[Tensor], released: Container[int]) -> bool:
        """Begin a step; returns whether it takes two passes.

        Args:
            tensors: all tensors of the optimizer.
            released: ids of those that are updated inside backward.
        """
        self.abandon()
        self._kept = {id(tensor) for tensor in with_gradients(tensors)}
        self.whole = any(key in released for key in self._kept)
        return not self.whole

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """The pass in this context measures."""
        self.measuring = True
        try:
            yield
        finally:
            self.measuring = False

    def has_measured(self, tensor: Tensor) -> bool:
        return id(tensor) in self._norms

    def measure(self, tensor: Tensor) -> None:
        """Measure a complete gradient in the first pass and free it; one that was there before the pass is kept."""
        if id(tensor) in self._kept:
            return
        self._measure(tensor)
        self._freed.add(id(tensor))
        tensor.grad = None

    def _measure(self, tensor: Tensor) -> None:
        with torch.no_grad():
            self._norms[id(tensor)] = tensor_norm(gradient(tensor))
            if self._checks:
                self.bad.append(is_nonfinite(gradient(tensor)))

    def end_first_pass(self, tensors: list[Tensor]) -> None:
        """Measure what has been kept, and know the global norm.

        Args:
            tensors: all tensors of the optimizer, in its order.
        """
        for tensor in with_gradients(tensors):
            self._measure(tensor)
        measured = [tensor for tensor in tensors if id(tensor) in self._norms]
        norms = [self._norms[id(tensor)] for tensor in measured]
        self.norm = total_norm(norms, [tensor.dtype for tensor in measured]) if norms else torch.zeros(())

    def to_form_again(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of ``tensors`` whose gradients the first pass has freed."""
        return [tensor for tensor in tensors if id(tensor) in self._freed]

    def before_update(self, tensor: Tensor, max_norm: float, optimizer: torch.optim.Optimizer) -> Attributes:
        if self.norm is None:
            raise RuntimeError("A tensor is to be updated before the global norm is known; expected a first pass.")
        if not self._compared:
            self._compare(tensor)
        return scaling(tensor, max_norm, self.norm, optimizer)

    def _compare(self, tensor: Tensor) -> None:
        first = self._norms.get(id(tensor))
        if first is None:
            return
        again = whole(tensor_norm(gradient(tensor))).float()
        first = whole(first).float()
        # Kernels that sum in any order differ in the last bits; a graph that is used up is off by much.
        if bool((again - first).abs() > REPEATABLE * first.abs()):
            raise RuntimeError(messages.not_repeatable(tuple(tensor.shape), float(first), float(again)))

    def clip_rest_(self, tensors: Iterable[Tensor], max_norm: float) -> Tensor | None:
        """Scale the gradients that are left by the same coefficient; returns the norm, None if none was taken."""
        if self.norm is None:
            return None
        rest = with_gradients(tensors)
        if rest and not self.clipped:
            scale_(rest, max_norm, self.norm)
        self.clipped = self._compared = True
        return self.norm

    def abandon(self) -> None:
        self.whole, self.norm, self.clipped = False, None, False
        self._norms, self.bad, self._freed, self._kept = {}, [], set(), set()
