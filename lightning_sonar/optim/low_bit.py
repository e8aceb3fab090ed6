"""AdamW with low-bit states: bitsandbytes', torchao's and FlashOptim's.

The arithmetic and the states are the libraries' own; what is added stands in `low_bit_base` and `low_bit_torchao`.
A library is imported when an optimizer is made, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from lightning_sonar.optim.low_bit_base import BitsAndBytes, Flash, LowBit, class_of
from lightning_sonar.optim.low_bit_torchao import TorchAO, TorchAO4bit, TorchAOFp8
from lightning_sonar.optim.update_watch import UpdateWatch

__all__ = ["LowBit", "ao_adamw4bit", "ao_adamw8bit", "ao_adamw_fp8", "bnb_adamw8bit", "flash_adamw"]


def _make(kind: type[LowBit], params: ParamsT, watch_every: int, **settings: Any) -> LowBit:
    optimizer: Any = kind(params, **settings)
    optimizer.watch = UpdateWatch(watch_every)
    return optimizer


def bnb_adamw8bit(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    min_8bit_size: int = 4096,
    watch_every: int = 50,
) -> LowBit:
    """bitsandbytes' AdamW8bit: two bytes of state for each parameter, 8 bytes for each block of 256. CPU and GPU.

    Codes of a tensor are uint8 with one fp32 maximum for 256 elements; all tensors share two maps of 1 KB. Tensors of
    fewer than ``min_8bit_size`` elements keep fp32 states. No compilation; no temporaries on a GPU, but on a CPU the
    library works on fp32 copies of the tensor, which no figure of memory here counts. Resumes bitwise, and from a
    checkpoint of an AdamW, whose moments it quantises. Whole tensors only, not FSDP2's shards; those of 2**31 elements
    and more go in chunks, as its kernels count in 32 bits. Overrides through its ``GlobalOptimManager`` are not read:
    they go by position. On a GPU the library waits for the device after each tensor.

    Args:
        params: as for any torch optimizer; fp32, bf16 or fp16.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        min_8bit_size: see above.
        watch_every: in each step whose number is a multiple of it, the largest update is compared with the largest
            weight, and a warning given above 1; those steps go in chunks. 0 never does.

    Raises:
        ImportError: if bitsandbytes is not installed, naming the extra.
    """
    kind = class_of(BitsAndBytes, "bitsandbytes.optim", "AdamW8bit", "bitsandbytes")
    settings = {"eps": eps, "weight_decay": weight_decay, "min_8bit_size": min_8bit_size}
    return _make(kind, params, watch_every, lr=lr, betas=_pair(betas), **settings)


def ao_adamw8bit(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block_size: int = 256,
    bf16_stochastic_round: bool = False,
    watch_every: int = 50,
) -> LowBit:
    """torchao's AdamW8bit: two bytes of state for each parameter, 8 bytes for each block of 256. CPU and GPU.

    Tensors of fewer than 4,096 elements, or of a number that ``block_size`` does not divide, keep states in their own
    dtype. The update is compiled once for each shape (about half a minute, a few seconds from inductor's cache) and
    takes temporaries of several bytes an element, so a tensor is stepped in equal chunks along dimension 0, of at most
    2**24 elements. Where blocks would not end where chunks do, it is stepped whole, and said so once.

    Args:
        params: as for any torch optimizer; fp32 or bf16.
        lr: learning rate; kept as a tensor in the groups, as torchao wants it.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        block_size: elements that share a scale.
        bf16_stochastic_round: round bf16 weights at random. Chunks draw other numbers than the whole tensor would.
        watch_every: see `bnb_adamw8bit`.

    Raises:
        ImportError: if torchao is not installed, naming the extra.
    """
    kind = class_of(TorchAO, "torchao.optim", "AdamW8bit", "torchao")
    settings = {"eps": eps, "weight_decay": weight_decay, "bf16_stochastic_round": bf16_stochastic_round}
    return _make(kind, params, watch_every, lr=lr, betas=_pair(betas), block_size=block_size, **settings)


def ao_adamw4bit(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block_size: int = 128,
    bf16_stochastic_round: bool = False,
    watch_every: int = 50,
) -> LowBit:
    """torchao's AdamW4bit: one byte of state for each parameter, 8 bytes for each block of 128.

    Otherwise as `ao_adamw8bit`, arguments too, but chunks have at most 2**23 elements.

    Raises:
        ImportError: if torchao is not installed, naming the extra.
    """
    kind = class_of(TorchAO4bit, "torchao.optim", "AdamW4bit", "torchao")
    settings = {"eps": eps, "weight_decay": weight_decay, "bf16_stochastic_round": bf16_stochastic_round}
    return _make(kind, params, watch_every, lr=lr, betas=_pair(betas), block_size=block_size, **settings)


def ao_adamw_fp8(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    block_size: int = 256,
    bf16_stochastic_round: bool = False,
    watch_every: int = 50,
) -> LowBit:
    """torchao's AdamWFp8: two bytes (float8_e4m3fn) of state for each parameter, 8 bytes for each block of 256.

    Otherwise as `ao_adamw8bit`, arguments too.

    Raises:
        ImportError: if torchao is not installed, naming the extra.
    """
    kind = class_of(TorchAOFp8, "torchao.optim", "AdamWFp8", "torchao")
    settings = {"eps": eps, "weight_decay": weight_decay, "bf16_stochastic_round": bf16_stochastic_round}
    return _make(kind, params, watch_every, lr=lr, betas=_pair(betas), block_size=block_size, **settings)


def flash_adamw(
    params: ParamsT,
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    master_weight_bits: int | None = 24,
    **options: Any,
) -> LowBit:
    """FlashOptim's FlashAdamW: int8 moments with an fp16 scale for 32 elements, and 24-bit weights. CUDA only.

    A bf16 weight gets a correction of 8 bits beside it. Updates are not watched.

    Args:
        params: as for any torch optimizer; at least one of them bf16, unless ``master_weight_bits`` is None.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        master_weight_bits: bits of a weight and its correction: 24, 32 or None for no correction.
        options: further arguments of FlashOptim's.

    Raises:
        ImportError: if flashoptim is not installed, naming the extra.
        RuntimeError: if torch sees no CUDA device.
    """
    kind = class_of(Flash, "flashoptim", "FlashAdamW", "flashoptim")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "FlashAdamW's kernels run on CUDA devices only, and torch sees none here. Use optimizer=bnb_adamw8bit."
        )
    settings = {"eps": eps, "weight_decay": weight_decay, "master_weight_bits": master_weight_bits}
    return _make(kind, params, 0, lr=lr, betas=_pair(betas), **settings, **options)


def _pair(betas: Sequence[float]) -> tuple[float, float]:
    """Plain numbers: a configuration's list in a group could not be loaded with weights_only."""
    first, second = betas
    return float(first), float(second)
