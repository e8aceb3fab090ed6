"""Stochastic rounding of weights to bfloat16, with random bits that depend on nothing but where an element is.

bfloat16 keeps 8 bits: a weight of 1 moves by 2**-8 or not at all, so at fine-tuning learning rates rounding to
nearest throws every update away. Rounding up with the probability of the part that is cut off keeps updates on
average. The bits come from Philox keyed by the seed, with the element's place, its parameter and the step as
counter: they are the same whether a tensor is updated whole, expert by expert, shard by shard, or in another order.
`kernels.py` computes the same bits on a GPU.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import Tensor

__all__ = ["StochasticRounding", "checked_seed", "global_offset", "philox", "round_to_bf16"]

_WORD = 0xFFFFFFFF
_EXPONENT = 0x7F800000
_QUIET = 0x400000

# Elements that share one call of Philox: 4 words of 32 bits are 8 times 16 bits.
LANES = 8


@dataclasses.dataclass(frozen=True)
class StochasticRounding:
    """What the random bits of one tensor's update depend on, besides the step.

    Attributes:
        seed: from 0 to 2**63 - 1.
        position: the parameter's place among all parameters of its optimizer, counted over the groups.
        offset: in elements: how far into the parameter's memory the tensor begins, which is more than 0 for a slice
            or a shard.
    """

    seed: int
    position: int
    offset: int = 0

    def bits_for(self, tensor: Tensor, step: Tensor) -> Tensor:
        """16 random bits for each element of `tensor`.

        Args:
            tensor: any shape; its strides say where each element lies.
            step: scalar, the number of the update, counted from 1.

        Returns:
            int64 from 0 to 65535, the shape of `tensor`.
        """
        if tensor.is_contiguous():
            first, count = self.offset, tensor.numel()
            groups = torch.arange(first // LANES, -(-(first + count) // LANES), device=tensor.device)
            start = first % LANES
            return self._lanes(groups, step).reshape(-1)[start : start + count].view(tensor.shape)
        places = torch.full(tensor.shape, self.offset, dtype=torch.int64, device=tensor.device)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            along = torch.arange(size, device=tensor.device) * stride
            places += along.view([-1 if d == dim else 1 for d in range(tensor.dim())])
        return self._lanes(places // LANES, step).gather(-1, (places % LANES).unsqueeze(-1)).squeeze(-1)

    def _lanes(self, groups: Tensor, step: Tensor) -> Tensor:
        """The bits of the eight elements of each group, `[..., 8]`: each word's low half, then its high half."""
        counter = (groups & _WORD, groups >> 32, torch.full_like(groups, self.position), step.long().expand_as(groups))
        words = torch.stack(philox(self.seed, *counter), dim=-1)  # [..., 4]
        return torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-2)


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 with 10 rounds, as `triton.language.philox` computes it.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Args:
        seed: the 64-bit key.
        c0: int64 from 0 to 2**32 - 1, any shape; likewise the other three words of the counter.
        c1: see `c0`.
        c2: see `c0`.
        c3: see `c0`.

    Returns:
        Four int64 tensors from 0 to 2**32 - 1.
    """
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # A product of two words fills 64 bits. int64 holds them all; only their sign means nothing.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (odd >> 32 & _WORD) ^ c1 ^ low, (even >> 32 & _WORD) ^ c3 ^ high
        c1, c3 = odd & _WORD, even & _WORD
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def round_to_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """`value` to bfloat16, away from zero with the probability of what truncation would cut off.

    Values that bfloat16 holds exactly stay as they are, infinities and NaNs too.

    Args:
        value: fp32, any shape.
        bits: int64, 16 random bits an element, from `StochasticRounding.bits_for`.

    Returns:
        bf16, the shape of `value`.
    """
    pattern = value.view(torch.int32)
    finite = (pattern & _EXPONENT) != _EXPONENT
    # A NaN whose mantissa lies in the lower bits alone would be cut to an infinity.
    special = torch.where(value.isnan(), pattern | _QUIET, pattern)
    # No carry can pass the sign: the largest finite pattern has room for 16 bits before it.
    rounded = torch.where(finite, pattern + bits.to(torch.int32), special)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


def checked_seed(seed: Any) -> int:
    """`seed` as an int.

    Raises:
        ValueError: it is no whole number from 0 to 2**63 - 1.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise ValueError(f"seed={seed!r}: expected a whole number from 0 to 2**63 - 1, for stochastic rounding.")
    return number


def global_offset(tensor: Tensor) -> int:
    """How many elements of the whole tensor lie before this rank's shard of it; 0 for a tensor that is no DTensor.

    Raises:
        NotImplementedError: a sharding in which a shard is not one run of the whole tensor's memory.
    """
    placements: Any = getattr(tensor, "placements", None)
    if placements is None:
        return 0
    from torch.distributed.tensor import Replicate, Shard

    whole: Any = tensor
    sharded = [(dim, placement) for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if not sharded:
        return 0
    dim, placement = sharded[0]
    # By type, not isinstance: the strided shard of FSDP over tensor parallelism is not one run.
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0 or not whole.is_contiguous():
        raise NotImplementedError(
            f"stochastic rounding needs to know where each shard lies in the whole tensor, which it does for "
            f"contiguous tensors sharded once, along dimension 0; this one is sharded as {tuple(placements)} with "
            f"strides {tuple(whole.stride())}. Shard with Shard(0), or set stochastic_rounding=False in its group."
        )
    rows = -(-whole.shape[0] // whole.device_mesh.size(dim))
    first = min(whole.device_mesh.get_coordinate()[dim] * rows, whole.shape[0])
    return first * whole.stride(0)
