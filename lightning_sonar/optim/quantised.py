"""Quantised optimizer states: cut into chunks of a tensor, taken apart, and filled again.

A state belongs to a parameter ``[D, ...]`` and holds codes in the parameter's order, with one scale for each block of
elements that lie side by side. A chunk ``[D / n, ...]`` equals that part of the whole where blocks end where chunks do.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

State = dict[str, Any]

_SHARED = ("qmap1", "qmap2")  # bitsandbytes' maps from codes to values


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors that a state's value consists of; FlashOptim holds its own in an object."""
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "is_quantized"):
        yield from (part for part in vars(value).values() if isinstance(part, Tensor))


def is_quantised(value: Any) -> bool:
    """Whether a value is one of torchao's quantised tensors."""
    return isinstance(value, Tensor) and hasattr(value, "codes") and hasattr(value, "scale")


def block_of(state: State) -> int:
    """Elements that share a scale in the state of a tensor; 1 if nothing is quantised."""
    block = 1
    for name, value in state.items():
        if is_quantised(value):
            block = math.lcm(block, value.block_size)
        elif name.startswith("absmax"):
            # The last block may be shorter.
            block = math.lcm(block, 256)
    return block


def chunks_of(tensor: Tensor, block: int, largest: int) -> int:
    """Into how many equal chunks along dimension 0 a tensor is cut, so that each has at most ``largest`` elements.

    Where the slices of dimension 0 are larger, chunks are as small as can be. Blocks of ``block`` elements have to end
    where chunks do; if they never do, the tensor is stepped whole, with a warning.
    """
    if tensor.numel() <= largest or isinstance(tensor, DTensor):
        return 1
    rows = tensor.shape[0] if tensor.ndim else 1
    wanted = -(-tensor.numel() // largest)
    counts = [n for n in range(2, rows + 1) if rows % n == 0 and (tensor.numel() // n) % block == 0]
    if not counts:
        warnings.warn(
            f"A tensor of shape {list(tensor.shape)} is updated whole, not in chunks of at most {largest:,} elements: "
            f"dimension 0 cannot be cut into equal parts of whole blocks of {block} elements. What the update takes "
            "beside the tensor is then as large as for all of it.",
            stacklevel=2,
        )
        return 1
    return min((n for n in counts if n >= wanted), default=counts[-1])


def chunks(tensor: Tensor, grad: Tensor, state: State, count: int) -> Iterator[tuple[Tensor, Tensor, State]]:
    """Chunks of a parameter, its gradient and its state: views, but each has a count of steps for itself."""
    if count == 1:
        yield tensor.detach(), grad, state
        return
    rows = tensor.shape[0] // count
    for index in range(count):
        start, end = index * rows, (index + 1) * rows
        part = {name: _slice(name, value, tensor, start, end) for name, value in state.items()}
        yield tensor.detach()[start:end], grad[start:end], part


def _slice(name: str, value: Any, tensor: Tensor, start: int, end: int) -> Any:
    if name == "step":
        return value.clone() if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor) or name in _SHARED:
        return value
    if name.startswith("absmax"):
        width = tensor[0].numel()
        return value[start * width // 256 : end * width // 256]
    part: Any = value[start:end]
    if not is_quantised(value):
        return part
    # The library's slice says that it is a view of another dtype, which the compiler cannot follow; and it copies the
    # map of values.
    names, meta = part.__tensor_flatten__()
    inner = {key: getattr(value if key == "qmap" else part, key) for key in names}
    return type(part).__tensor_unflatten__(inner, [*meta[:-1], value.dtype])


def encode_(codes: Tensor, absmax: Tensor, values: Tensor, qmap: Tensor, block: int = 256) -> None:
    """Fill codes with those nearest to given values, as bitsandbytes reads them; what is above zero stays above it.

    Args:
        codes: uint8, in any shape.
        absmax: fp32 ``[ceil(n / block)]``, filled with the largest magnitude of each block.
        values: floats, in the shape of the codes.
        qmap: fp32 ``[256]``, ascending: the value of each code, of which the magnitude is at most 1.
        block: elements that share a maximum.

    Raises:
        ValueError: if the shapes differ.
    """
    if values.shape != codes.shape:
        raise ValueError(
            f"A saved moment has shape {list(values.shape)}; expected {list(codes.shape)}. It belongs to another model."
        )
    between = (qmap[1:] + qmap[:-1]) / 2
    # Searching takes several times the memory of its part.
    part = block * 2**14
    flat, out = values.reshape(-1), torch.empty(codes.numel(), dtype=torch.uint8, device=codes.device)
    for start in range(0, flat.numel(), part):
        piece = flat[start : start + part].float()
        rows = torch.nn.functional.pad(piece, (0, -piece.numel() % block)).view(-1, block)
        largest = rows.abs().amax(dim=1)
        absmax[start // block : start // block + len(largest)] = largest
        found = torch.bucketize(rows / torch.where(largest == 0, 1.0, largest)[:, None], between, out_int32=True)
        # A second moment that becomes zero would blow up the update. Only a map without signs begins with zero.
        found = torch.where((found == 0) & (rows > 0), 1, found)
        out[start : start + part] = found.view(-1)[: piece.numel()]
    codes.copy_(out.view(codes.shape))


def packed(value: Any) -> Any:
    """A quantised tensor as a dictionary of plain ones; anything else as it is."""
    return {"codes": value.codes, "scale": value.scale} if is_quantised(value) else value


def fill(new: Tensor, saved: Any, name: str) -> None:
    """Fill a fresh state with what `packed` returned, a quantised tensor, or plain values, which are quantised.

    Raises:
        ValueError: if shapes or the codes' dtypes differ.
    """
    if is_quantised(saved):
        saved = packed(saved)
    if not isinstance(saved, Mapping):
        new.copy_(saved.to(new.device, torch.float32) if is_quantised(new) else saved)
        return
    target: Any = new
    expected = [list(target.codes.shape), list(target.scale.shape)] if is_quantised(new) else list(new.shape)
    found = [list(saved["codes"].shape), list(saved["scale"].shape)]
    if found != expected:
        raise ValueError(
            f"The saved state of {name} has codes and scales of shapes {found}; expected {expected}. It was written "
            "with another block_size or another optimizer; resume with that one."
        )
    if saved["codes"].dtype != target.codes.dtype:
        raise ValueError(
            f"The saved state of {name} has codes of {saved['codes'].dtype}; expected {target.codes.dtype}. It was "
            "written by another optimizer; resume with that one."
        )
    target.codes.copy_(saved["codes"])
    target.scale.copy_(saved["scale"])
