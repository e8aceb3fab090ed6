"""Several short records in one row, none of which sees another.

A packed batch carries ``position_ids`` that begin anew with every record. transformers builds the attention mask from
them when it gets no ``attention_mask``: a token attends to earlier tokens of its own record only. The padding at a
row's end counts as one more record.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_sonar.data.encode import IGNORED, Example
from lightning_sonar.data.errors import DataError

__all__ = ["Row", "check_packing", "collate_packed", "pack", "packed_arguments", "router_loss"]

Row = tuple[Example, ...]
"""The records that one row of a batch holds."""

# Layers that see other tokens through the attention mask only. A convolution or a recurrent state ignores it.
_BY_MASK = {"full_attention", "sliding_attention", "chunked_attention"}
_FIRST, _SECOND = 6, 5  # tokens of the two records that `check_packing` runs
_REMEDY = "Use data.packing=false."


def pack(examples: Sequence[Example], seq_len: int) -> list[Row]:
    """Put examples together in rows of at most `seq_len` tokens: the longest first, each where the least room is left.

    The same examples always give the same rows; every example is in one of them.

    Args:
        examples: each at most `seq_len` tokens long.
        seq_len: tokens a row can hold.

    Raises:
        DataError: if an example is longer than a row.
    """
    order = sorted(range(len(examples)), key=lambda index: (-len(examples[index].input_ids), index))
    rows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # tokens left and number of the row, sorted
    for index in order:
        size = len(examples[index].input_ids)
        if size > seq_len:
            raise DataError(f"an example has {size} tokens, but a row holds {seq_len}; encode with seq_len={seq_len}")
        at = bisect.bisect_left(room, (size, -1))
        if at == len(room):
            rows.append([])
            left, row = seq_len, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(examples[index])
        bisect.insort(room, (left - size, row))
    return [tuple(row) for row in rows]


def collate_packed(rows: Sequence[Row], pad_id: int, pad_to: int | None = None) -> dict[str, Tensor]:
    """A batch of int64 tensors [B, T], padded on the right to `pad_to`, else to the longest row.

    ``position_ids`` begin at 0 with every record and with the padding. ``attention_mask`` is 1 where there is a token;
    it tells padding apart and is no mask between records. No label stands at a record's first token, which would be
    predicted from the record before.
    """
    longest = max(sum(len(example.input_ids) for example in row) for row in rows)
    length = longest if pad_to is None else pad_to
    if longest > length:
        raise DataError(f"pad_to={pad_to}, but a row has {longest} tokens; pack with seq_len={pad_to}")
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    position_ids = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for number, row in enumerate(rows):
        start = 0
        for example in row:
            end = start + len(example.input_ids)
            input_ids[number, start:end] = torch.tensor(example.input_ids, dtype=torch.int64)
            labels[number, start + 1 : end] = torch.tensor(example.labels[1:], dtype=torch.int64)
            position_ids[number, start:end] = torch.arange(end - start)
            start = end
        attention_mask[number, :start] = 1
        position_ids[number, start:] = torch.arange(length - start)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "labels": labels,
    }


def packed_arguments(batch: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """What a transformers model is called with, beside ``input_ids``, for a batch that may be packed.

    transformers looks for records in ``position_ids`` only if there is no ``attention_mask``.
    """
    if "position_ids" in batch:
        return {"attention_mask": None, "position_ids": batch["position_ids"]}
    return {"attention_mask": batch["attention_mask"]}


def router_loss(model: nn.Module, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The router's load-balancing loss of a forward with ``output_router_logits=True``, 0-dim, without the padding.

    Of a packed batch the model saw no ``attention_mask``, so that its own ``aux_loss`` counts padding as tokens. It is
    computed once more by the same function of transformers; a model that has none keeps its own.
    """
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    function = next((f for f in (getattr(m, "load_balancing_loss_func", None) for m in modules) if f), None)
    num_experts, top_k = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    logits = getattr(output, "router_logits", None)
    if "position_ids" not in batch or function is None or not logits or num_experts is None or top_k is None:
        return output.aux_loss
    return function(logits, num_experts, top_k, batch["attention_mask"])


def check_packing(model: nn.Module, rows: int) -> None:
    """Check that a transformers model keeps the records of a packed row apart.

    Layers other than attention are refused by their kind. Then two records of a few tokens run in one row, and no
    gradient of the second may reach the first: some models of transformers do not look at ``position_ids`` for their
    mask. Parameters, their gradients, random state and training mode are left as they were. Models sharded over ranks
    and fake ones are judged by their kind of layers only.

    Args:
        model: a Hugging Face causal language model.
        rows: rows in a batch.

    Raises:
        DataError: naming the model's class and what lets records see one another.
    """
    config: Any = getattr(model, "config", None)
    kernel = str(getattr(config, "_attn_implementation", "sdpa"))
    if "flash" in kernel and rows > 1:
        raise DataError(
            f"data.packing=true with model.attn_implementation={kernel}: for this kernel transformers finds the "
            f"records of a packed row only in batches of one row, and this batch has {rows}. Use data.batch_size=1 "
            "(and trainer.accumulate_grad_batches), or model.attn_implementation=sdpa."
        )
    text = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    kinds = getattr(text, "layer_types", None) or []
    other = sorted({str(kind) for kind in kinds} - _BY_MASK)
    other += sorted({type(module).__name__ for module in model.modules() if isinstance(module, nn.Conv1d)})
    if other:
        raise DataError(
            f"data.packing=true: {type(model).__name__} has {', '.join(other)}, which would let a record see the one "
            f"before it in its row. {_REMEDY}"
        )
    weights = list(model.parameters())
    if any(isinstance(weight, FakeTensor) or weight.is_meta or hasattr(weight, "device_mesh") for weight in weights):
        return
    if not _keeps_apart(model):
        raise DataError(
            f"data.packing=true: the attention of {type(model).__name__} does not keep to the records of a packed row; "
            f"a record sees the one before it. {_REMEDY}"
        )


def _keeps_apart(model: nn.Module) -> bool:
    """Whether no gradient of a packed row's second record reaches its first one."""
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    weight: Tensor = embeddings.weight  # type: ignore[assignment]
    tokens = [(token + 1) % len(weight) for token in range(_FIRST + _SECOND)]
    row = tuple(Example(ids, ids) for ids in (tokens[:_FIRST], tokens[_FIRST:]))
    batch = {name: values.to(weight.device) for name, values in collate_packed([row], pad_id=0).items()}
    made: list[Tensor] = []

    def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        made.append(output.detach().requires_grad_())
        return made[0]

    modes = {module: module.training for module in model.modules()}
    handle = embeddings.register_forward_hook(begin)
    try:
        # Evaluation: dropout and a router's noise say nothing here, and statistics must not move.
        model.eval()
        devices = [weight.device] if weight.is_cuda else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            logits = model(input_ids=batch["input_ids"], use_cache=False, **packed_arguments(batch)).logits
            # Not backward(): that would fill the parameters' gradients and set off their hooks.
            (reached,) = torch.autograd.grad(logits[:, _FIRST:].float().logsumexp(-1).sum(), made[0])
    finally:
        handle.remove()
        for module, training in modes.items():
            module.training = training
    return not bool(reached[:, :_FIRST].any())
