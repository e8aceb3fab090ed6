"""Norms and checks of gradients that may be sharded over ranks; plain tensors pass through unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor. Asked by duck typing: importing DTensor is slow, and pointless where there is none."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, any other tensor itself."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def stored(tensor: Tensor) -> Tensor:
    """The elements a gradient consists of: of this rank's shard; of a sparse tensor those that are there."""
    tensor = local(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's whole value, on every rank; any other tensor itself. A collective for DTensors."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def norm_part(grad: Tensor) -> Tensor:
    """What `settle` makes the norm of a gradient from, float32 and 0-dim. No collective.

    Of a plain tensor its 2-norm; of a DTensor its squared norm, still to be summed over the ranks.
    """
    norm = torch.linalg.vector_norm(stored(grad), dtype=torch.float32)
    if not is_sharded(grad):
        return norm
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placed = cast(Any, grad)
    placements = [placement if isinstance(placement, Replicate) else Partial() for placement in placed.placements]
    return DTensor.from_local(norm.square(), placed.device_mesh, placements, run_check=False)


def settle(parts: Iterable[Tensor]) -> list[Tensor]:
    """Norms from `norm_part`: of plain tensors as they are, then one more for each mesh. One collective a mesh."""
    plain: list[Tensor] = []
    sums: dict[Any, Tensor] = {}
    for part in parts:
        if not is_sharded(part):
            plain.append(part)
            continue
        key = (cast(Any, part).device_mesh, tuple(map(str, cast(Any, part).placements)))
        sums[key] = sums[key] + part if key in sums else part
    return plain + [whole(part).sqrt() for part in sums.values()]


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups that one operator may take together: each mesh's, and the plain ones. Order is kept."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None) if is_sharded(tensor) else None, []).append(tensor)
    return list(groups.values())
