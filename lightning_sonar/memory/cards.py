"""Which graphics card holds a plan."""

from __future__ import annotations

import re

GIB = 1 << 30

CARDS = (16, 24, 32, 40, 48, 80, 96, 141)
"""Memory of the usual cards in GiB."""

CONTEXT_BYTES = 700_000_000
"""What a CUDA process takes beside its tensors: the context, loaded kernels, library workspaces. An assumption, not a
measurement; it differs by card, driver and libraries, and every function that uses it takes another value."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20}
_UNITS |= {"gib": GIB, "tib": 1 << 40, "g": GIB}


def parse_bytes(text: str | int | float, least: int = 1) -> int:
    """``"24GiB"``, ``"24GB"`` or a plain number of bytes, as bytes. GiB is 2**30 bytes, GB is 10**9.

    Raises:
        ValueError: for anything else, or less than ``least`` bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not an amount of memory; expected one such as 24GiB (2**30 bytes each) or 24GB.")
    if isinstance(text, str) and not match[2] and float(match[1]):
        raise ValueError(f"{text!r} is not an amount of memory: it has no unit; expected one such as 24GiB or 24GB.")
    nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if nbytes < least:
        raise ValueError(f"{text!r} is not an amount of memory; expected more than nothing.")
    return nbytes


def fits(reserved_bytes: int, device_bytes: int, context_bytes: int = CONTEXT_BYTES) -> bool:
    """Whether what the allocator reserves and the process's context go on a device together."""
    return reserved_bytes + context_bytes <= device_bytes


def smallest_card(reserved_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int | None:
    """The smallest of `CARDS`, in GiB, that holds it; None if none does."""
    return next((card for card in CARDS if fits(reserved_bytes, card * GIB, context_bytes)), None)
