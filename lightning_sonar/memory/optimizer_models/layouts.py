"""What each low-bit optimizer allocates for a parameter, and for the update of a chunk of it.

Sources: bitsandbytes 0.50, torchao 0.18 and flashoptim 0.1.4. torchao's temporaries are the buffers of the code that
torch 2.13's inductor writes for the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sonar.optim.low_bit_base import CHUNK, WATCHED_CHUNK
from lightning_sonar.optim.low_bit_torchao import TorchAO, TorchAO4bit, TorchAOFp8

Buffer = tuple[int, torch.dtype]
"""Number of elements, and their dtype."""


@dataclass(frozen=True)
class Layout:
    """What one optimizer allocates. Base of the three libraries' layouts.

    Attributes:
        name: the library, short, and the class; several libraries have an ``AdamW8bit``.
        block: elements that share a scale, unless the optimizer is told otherwise.
        chunk: most elements of a chunk.
    """

    name: str
    block: int
    chunk: int = CHUNK

    def shared(self) -> dict[str, Buffer]:
        """Buffers that all parameters share."""
        return {}

    def states(self, parameter: Tensor, settings: Mapping[str, Any]) -> dict[str, Buffer]:
        """Buffers of one parameter's state."""
        raise NotImplementedError

    def temporaries(self, parameter: Tensor, elements: int, settings: Mapping[str, Any]) -> list[Buffer]:
        """Buffers of the update of a chunk with this many elements, alive at once."""
        return []

    def copied(self, settings: Mapping[str, Any]) -> bool:
        """Whether a watched step keeps a copy of each chunk."""
        return settings.get("watch_every", 50) > 0


@dataclass(frozen=True)
class BitsAndBytesLayout(Layout):
    """uint8 codes, an fp32 maximum for each block, and two maps that all parameters share. No temporaries."""

    def shared(self) -> dict[str, Buffer]:
        return {"qmap1": (256, torch.float32), "qmap2": (256, torch.float32)}

    def states(self, parameter: Tensor, settings: Mapping[str, Any]) -> dict[str, Buffer]:
        count = parameter.numel()
        if count < settings.get("min_8bit_size", 4096):
            return {"state1": (count, torch.float32), "state2": (count, torch.float32)}
        blocks = -(-count // self.block)
        return {
            "state1": (count, torch.uint8),
            "state2": (count, torch.uint8),
            "absmax1": (blocks, torch.float32),
            "absmax2": (blocks, torch.float32),
        }


@dataclass(frozen=True)
class TorchAOLayout(Layout):
    """Codes, an fp32 scale for each block and (but for fp8) a map of the codes' values for each moment.

    Attributes:
        codes: dtype of the codes.
        bits: bits of a code.
        wide: temporaries of the size of the chunk: their dtypes.
    """

    codes: torch.dtype = torch.uint8
    bits: int = 8
    wide: tuple[torch.dtype, ...] = ()

    def states(self, parameter: Tensor, settings: Mapping[str, Any]) -> dict[str, Buffer]:
        count, block = parameter.numel(), settings.get("block_size", self.block)
        buffers: dict[str, Buffer] = {"step": (1, torch.float32)}
        for moment in ("exp_avg", "exp_avg_sq"):
            if not self._quantises(parameter, block):
                buffers[moment] = (count, parameter.dtype)
                continue
            buffers[f"{moment}.codes"] = (count * self.bits // 8, self.codes)
            buffers[f"{moment}.scale"] = (count // block, torch.float32)
            if self.codes == torch.uint8:
                buffers[f"{moment}.qmap"] = (2**self.bits, torch.float32)
        return buffers

    def temporaries(self, parameter: Tensor, elements: int, settings: Mapping[str, Any]) -> list[Buffer]:
        block = settings.get("block_size", self.block)
        if not self._quantises(parameter, block):
            return []
        return [*((elements, dtype) for dtype in self.wide), *(((elements // block), torch.float32),) * 2]

    def _quantises(self, parameter: Tensor, block: int) -> bool:
        return parameter.numel() >= 4096 and parameter.numel() % block == 0


@dataclass(frozen=True)
class FlashLayout(Layout):
    """int8 moments with fp16 scales, and the bits that a weight's dtype has no room for. No temporaries."""

    def states(self, parameter: Tensor, settings: Mapping[str, Any]) -> dict[str, Buffer]:
        count = parameter.numel()
        blocks = -(-count // self.block)
        buffers: dict[str, Buffer] = {
            "exp_avg": (count, torch.int8),
            "exp_avg.scales": (blocks, torch.float16),
            "exp_avg_sq": (count, torch.uint8),
            "exp_avg_sq.scales": (blocks, torch.float16),
            "step": (1, torch.int64),
        }
        missing = (settings.get("master_weight_bits", 24) or 0) // 8 - parameter.element_size()
        if missing > 0:
            buffers["error_bits"] = (count, torch.int8 if missing == 1 else torch.int16)
        return buffers

    def copied(self, settings: Mapping[str, Any]) -> bool:
        return False


BITSANDBYTES = BitsAndBytesLayout("bnb AdamW8bit", 256, WATCHED_CHUNK)
TORCHAO_8BIT = TorchAOLayout("ao AdamW8bit", 256, TorchAO.chunk, wide=TorchAO.wide)
TORCHAO_4BIT = TorchAOLayout("ao AdamW4bit", 128, TorchAO4bit.chunk, bits=4, wide=TorchAO4bit.wide)
TORCHAO_FP8 = TorchAOLayout("ao AdamWFp8", 256, TorchAOFp8.chunk, codes=torch.float8_e4m3fn, wide=TorchAOFp8.wide)
FLASH = FlashLayout("FlashAdamW", 32)
