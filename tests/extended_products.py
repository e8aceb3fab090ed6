"""Finds, in the code that Triton first makes of a kernel, products that were taken in 32 bits and widened too late."""

from __future__ import annotations

import re

# What hands its operand's numbers on.
_PASSING = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape")


def extended_products(ttir: str, in_sums: bool = True) -> list[str]:
    """Names of values widened to 64 bits that are 32-bit products, or sums with one.

    Args:
        ttir: the code.
        in_sums: look into sums too; not where products in them are known to be small.
    """
    passing = (*_PASSING, "arith.addi") if in_sums else _PASSING
    made = {}
    for line in ttir.splitlines():
        found = re.match(r"\s*(%\w+) = (\S+) (.*)", line)
        if found:
            made[found[1]] = found[2], re.findall(r"%\w+", found[3].split(" loc(")[0])

    def is_product(name: str) -> bool:
        kind, operands = made.get(name, ("", []))
        return kind == "arith.muli" or (kind in passing and any(map(is_product, operands)))

    widened = [(name, operands) for name, (kind, operands) in made.items() if kind == "arith.extsi"]
    return sorted(name for name, operands in widened if any(map(is_product, operands)))
