"""What PyTorch's CUDA caching allocator would reserve for a book of storages: an estimate by its published rules.

The rules (torch ``c10/cuda/CUDACachingAllocator``, default settings): requests up to 1 MiB come from segments of 2 MiB,
requests below 10 MiB from segments of 20 MiB, larger ones from a segment of their own rounded up to 2 MiB. The smallest
free block that is large enough is taken and split when the rest is worth keeping; freed neighbours are joined; segments
stay.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from lightning_sonar.memory.ledger import Ledger

_MIB = 1 << 20
_SMALL_REQUEST = _MIB
_SMALL_SEGMENT = 2 * _MIB
_MIDDLE_REQUEST = 10 * _MIB
_MIDDLE_SEGMENT = 20 * _MIB
_ROUNDING = 512


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    pool: _Pool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks, smallest first."""

    small: bool
    sizes: list[int] = field(default_factory=list)
    blocks: list[_Block] = field(default_factory=list)

    def put(self, block: _Block) -> None:
        place = bisect.bisect_left(self.sizes, block.size)
        self.sizes.insert(place, block.size)
        self.blocks.insert(place, block)
        block.free = True

    def remove(self, block: _Block) -> None:
        place = bisect.bisect_left(self.sizes, block.size)
        while self.blocks[place] is not block:
            place += 1
        del self.sizes[place], self.blocks[place]
        block.free = False

    def smallest(self, size: int) -> _Block | None:
        place = bisect.bisect_left(self.sizes, size)
        return self.blocks[place] if place < len(self.blocks) else None


class CachingAllocator:
    """Hands out and takes back blocks, and counts the bytes of the segments behind them.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)

    def allocate(self, nbytes: int) -> _Block:
        size = max(_ROUNDING, -(-nbytes // _ROUNDING) * _ROUNDING)
        pool = self._small if size <= _SMALL_REQUEST else self._large
        block = pool.smallest(size)
        if block is None:
            if pool.small:
                segment = _SMALL_SEGMENT
            elif size < _MIDDLE_REQUEST:
                segment = _MIDDLE_SEGMENT
            else:
                segment = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
            self.reserved += segment
            block = _Block(segment, pool)
        else:
            pool.remove(block)
        rest = block.size - size
        # A large block is split only if more than a small request's worth is left over.
        if rest >= _ROUNDING if pool.small else rest > _SMALL_REQUEST:
            tail = _Block(rest, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, size
            pool.put(tail)
        return block

    def release(self, block: _Block) -> None:
        pool = block.pool
        for other, after in ((block.before, False), (block.after, True)):
            if other is None or not other.free:
                continue
            pool.remove(other)
            block.size += other.size
            if after:
                block.after = other.after
                if other.after is not None:
                    other.after.before = block
            else:
                block.before = other.before
                if other.before is not None:
                    other.before.after = block
        pool.put(block)


def reserved_bytes(ledger: Ledger, repeat: int = 2) -> int:
    """Bytes that the caching allocator would reserve over the steps that a book tells of.

    What was there before the first phase is allocated first, in its order; then the step is replayed.

    Args:
        ledger: the book of one step.
        repeat: how many times the step is replayed, as fragments of one step meet the next.
    """
    allocator = CachingAllocator()
    blocks: dict[int, _Block] = {}
    before, step = ledger.replay()
    for key, nbytes in before:
        if nbytes > 0:
            blocks[key] = allocator.allocate(nbytes)
    for _ in range(repeat):
        born: list[int] = []
        for key, nbytes in step:
            held = blocks.pop(key, None)
            if held is not None:
                allocator.release(held)
            if nbytes > 0:
                blocks[key] = allocator.allocate(nbytes)
                born.append(key)
        for key in born:  # what outlives the step takes the place of what the step before left
            if key in blocks:
                allocator.release(blocks.pop(key))
    return allocator.reserved
