"""Which tensors of an optimizer are expert tensors, while model and optimizer change.

A frozen tensor is unfrozen, a parameter group is added, a layer is put in another's place: all that may happen after
the hooks went on. This file knows torch and nothing above it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_sonar.experts import ExpertTensors


class Members:
    """The expert tensors of a model and the names of its tensors.

    Hooks hold this object, and a parameter holds its hooks where no garbage collector sees them, so all references are
    weak. A bare ``id`` would not do: that of a tensor that is gone may be another one's.

    Args:
        experts: name to tensor. `ExpertTensors` know the frozen ones, too, and the model to look into later on.
        names: names of further tensors by ``id``.
    """

    def __init__(self, experts: Mapping[str, Tensor], names: Mapping[int, str]) -> None:
        self._named: dict[str, weakref.ref[Tensor]] = {}
        self._experts: dict[int, weakref.ref[Tensor]] = {}
        self._seen: dict[int, weakref.ref[Tensor]] = {}
        self._names = dict(names)
        self._asked = False
        self._source = experts.source if isinstance(experts, ExpertTensors) else None
        self._add(experts)

    @property
    def experts(self) -> dict[str, Tensor]:
        """The expert tensors that are still alive, frozen ones included, by name."""
        alive = ((name, ref()) for name, ref in self._named.items())
        return {name: tensor for name, tensor in alive if tensor is not None}

    def is_expert(self, tensor: Tensor) -> bool:
        return _is_in(self._experts, tensor)

    def name(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")

    def new(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of ``tensors`` that train and did not when this was last asked; looks into the model if there are any.

        Args:
            tensors: all tensors of the optimizer.
        """
        found = [tensor for tensor in tensors if tensor.requires_grad and not _is_in(self._seen, tensor)]
        if found and self._asked and self._source is not None:
            self._add(self._source.look_again() or {})
        self._asked = True
        self._seen.update((id(tensor), weakref.ref(tensor)) for tensor in found)
        return found

    def _add(self, experts: Mapping[str, Tensor]) -> None:
        frozen = experts.frozen if isinstance(experts, ExpertTensors) else {}
        for name, tensor in {**frozen, **experts}.items():
            self._named[name] = self._experts[id(tensor)] = weakref.ref(tensor)
            self._names[id(tensor)] = name


def _is_in(book: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> bool:
    ref = book.get(id(tensor))
    return ref is not None and ref() is tensor
