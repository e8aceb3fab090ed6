"""Tile sizes by rule: from a product's shape and the device, without measuring, and remembered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = ["Device", "Tiles", "device_of", "grad_tiles", "row_tiles"]

# Triton also puts an index and a reduction or two into shared memory.
_SPARE_BYTES = 1024


@dataclass(frozen=True)
class Device:
    """What the rule needs to know of a device.

    Attributes:
        backend: Triton's name: ``"cuda"``, ``"hip"``, or ``"interpreter"``.
        shared_bytes: shared memory (LDS on AMD) that one program may use.
    """

    backend: str
    shared_bytes: int


@dataclass(frozen=True)
class Tiles:
    """One program multiplies a ``[rows, depth]`` tile by a ``[depth, cols]`` tile, ``stages`` of them in flight."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


@lru_cache
def device_of(device: torch.device, interpreted: bool) -> Device:
    """The `Device` a tensor lives on."""
    if interpreted:
        return Device("interpreter", 1 << 30)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device("hip", getattr(properties, "shared_memory_per_block", 64 * 1024))
    return Device("cuda", properties.shared_memory_per_block_optin)


def _at_least(size: int, smallest: int, largest: int) -> int:
    """The power of two that covers ``size``, within bounds."""
    return min(max(1 << (max(size, 1) - 1).bit_length(), smallest), largest)


def _settle(rows: int, cols: int, depth: int, bytes_per_depth: int, device: Device) -> Tiles:
    # Eight warps from 128 x 128 on: with four, the fp32 sums alone take 128 registers of a thread.
    warps = 8 if rows * cols >= 128 * 128 else 4
    budget = device.shared_bytes - _SPARE_BYTES
    # AMD's pipeliner keeps one tile of each stage but the last in LDS; NVIDIA's keeps all.
    free = 1 if device.backend == "hip" else 0
    # From Hopper on, three stages leave room for a second program on the multiprocessor, whose loads and products fill
    # the other's prologue and epilogue. Ampere has the registers for one program only: four.
    deepest = 2 if device.backend == "hip" else 3 if device.shared_bytes > 200 * 1024 else 4
    while depth > 16 and bytes_per_depth * depth > budget:
        depth //= 2
    stages = min(deepest, budget // (bytes_per_depth * depth) + free)
    return Tiles(rows, cols, depth, warps, max(stages, 1))


@lru_cache(maxsize=4096)
def row_tiles(per_expert: int, cols: int, depth: int, a_bytes: int, w_bytes: int, device: Device) -> Tiles:
    """Tiles of the product of rows with their expert's weight.

    Args:
        per_expert: rows an expert has on average.
        cols: output columns.
        depth: the dimension summed over.
        a_bytes: bytes of an element of the rows.
        w_bytes: bytes of an element of the weight.
        device: where it runs.
    """
    if device.backend == "interpreter":
        # A program takes milliseconds whatever its size: few of them, and yet more than one in each direction.
        return Tiles(8, _at_least(cols // 2, 32, 128), _at_least(depth // 2, 32, 128), 4, 1)
    if a_bytes == 4:
        # No tensor cores: fp32 products are exact ones.
        block_rows, block_cols, block_depth = _at_least(per_expert, 16, 64), 64, 32
    else:
        # Half again the average: routing is uneven, and a second block reads the weight again.
        block_rows = _at_least(per_expert * 3 // 2, 16, 128)
        block_cols, block_depth = 128, 64
    block_cols = min(block_cols, _at_least(cols, 16, 256))
    block_depth = min(block_depth, _at_least(depth, 16, 256))
    return _settle(block_rows, block_cols, block_depth, a_bytes * block_rows + w_bytes * block_cols, device)


@lru_cache(maxsize=4096)
def grad_tiles(per_expert: int, rows: int, cols: int, item_bytes: int, device: Device) -> Tiles:
    """Tiles of the weight gradient, ``[rows, cols]`` for each expert, summed over ``per_expert`` tokens on average."""
    if device.backend == "interpreter":
        return Tiles(_at_least(rows // 2, 32, 128), _at_least(cols // 2, 32, 128), 8, 4, 1)
    most = 64 if item_bytes == 4 else 128
    block_rows, block_cols = min(most, _at_least(rows, 16, 256)), min(most, _at_least(cols, 16, 256))
    block_depth = _at_least(per_expert, 16, 32 if item_bytes == 4 else 64)
    return _settle(block_rows, block_cols, block_depth, item_bytes * (block_rows + block_cols), device)
