"""From records to token ids and labels, and from those to batches of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_sonar.data.chat import ChatTemplate, has_template, special_tokens, templated
from lightning_sonar.data.errors import DataError
from lightning_sonar.data.records import Record, Segment
from lightning_sonar.data.tokenizer import single_threaded

__all__ = ["IGNORED", "Example", "collate", "encode", "encode_all"]

IGNORED = -100
"""The label of a token that does not count for the loss, as in torch's cross entropy."""

# How many records are tokenized at once: enough to amortize the call, few enough to bound its memory.
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized record. `labels` stand at the positions of `input_ids`; the loss shifts them.

    `cut`: whether the record had more tokens, so that it ends without its end token.
    """

    input_ids: list[int]
    labels: list[int]
    cut: bool = field(default=False, compare=False)

    @property
    def learns(self) -> bool:
        """Whether any token counts for the loss; the first one has nothing to be predicted from."""
        return any(label != IGNORED for label in self.labels[1:])


def encode(
    record: Record, tokenizer: PreTrainedTokenizerBase, seq_len: int, chat_template: ChatTemplate = "auto"
) -> Example:
    """One record's tokens, cut to `seq_len`: the response and the end token after it count for the loss.

    If the prompt alone fills `seq_len`, no token does (`Example.learns` is False).

    Args:
        record: from `from_alpaca`, `from_messages` or plain segments.
        tokenizer: the model's.
        seq_len: the most tokens.
        chat_template: ``"auto"`` writes the record in the tokenizer's chat template, if it has one; ``"none"`` in the
            plain form with headings.
    """
    return encode_all([record], tokenizer, seq_len, chat_template, keep=True)[0][0]


def encode_all(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    chat_template: ChatTemplate = "auto",
    keep: bool = False,
) -> tuple[list[Example], int]:
    """All examples that hold some of their response, and how many records were dropped for holding none.

    Args:
        records: see `encode`, as for the other arguments.
        tokenizer: the model's.
        seq_len: the most tokens.
        chat_template: ``"auto"`` or ``"none"``.
        keep: keep those that hold none as well.
    """
    in_template: Sequence[tuple[Segment, ...] | None] = [None] * len(records)
    if chat_template == "auto" and has_template(tokenizer):
        in_template = templated(records, tokenizer)
    examples: list[Example] = []
    for start in range(0, len(records), _CHUNK):
        end = start + _CHUNK
        chunk = _encode_chunk(records[start:end], in_template[start:end], tokenizer, seq_len)
        examples += [example for example in chunk if keep or example.learns]
    return examples, len(records) - len(examples)


def _encode_chunk(
    records: Sequence[Record],
    in_template: Sequence[tuple[Segment, ...] | None],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
) -> list[Example]:
    end_id = tokenizer.eos_token_id
    if not isinstance(end_id, int):
        raise DataError("the tokenizer has no end token; set tokenizer.eos_token, which ends every response")
    with single_threaded():
        start = _start_ids(tokenizer)
        # Segment by segment, so that no token straddles the border between prompt and response; special
        # tokens spelled out in the data are plain text, or a record could end its own response early.
        plain = _tokenize([r for r, other in zip(records, in_template, strict=True) if other is None], tokenizer, True)
        # The template's own special tokens are meant, and `templated` lets no data with such tokens through.
        special = _tokenize([segments for segments in in_template if segments is not None], tokenizer, False)
    specials = set(special_tokens(tokenizer).values())
    examples = []
    for record, segments in zip(records, in_template, strict=True):
        # A template writes its own start and end.
        input_ids = list(start) if segments is None else []
        labels = [IGNORED] * len(input_ids)
        for _, counts in record if segments is None else segments:
            ids = next(plain if segments is None else special)
            if counts and (segments is None or not specials.intersection(ids[-1:])):
                ids = [*ids, end_id]
            input_ids += ids
            labels += ids if counts else [IGNORED] * len(ids)
        examples.append(Example(input_ids[:seq_len], labels[:seq_len], cut=len(input_ids) > seq_len))
    return examples


def _tokenize(
    records: Sequence[tuple[Segment, ...]], tokenizer: PreTrainedTokenizerBase, split_special: bool
) -> Iterator[list[int]]:
    """The token ids of all segments of all records, in their order."""
    texts = [text for record in records for text, _ in record]
    if not texts:
        return iter(())
    found = tokenizer(texts, add_special_tokens=False, split_special_tokens=split_special, verbose=False)
    return iter(found["input_ids"])  # type: ignore[arg-type]


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that this tokenizer's model expects at the start of every sequence, if there is one."""
    bos_id = tokenizer.bos_token_id
    # Many tokenizers name such a token and yet never write it, so ask what is written.
    return [bos_id] if isinstance(bos_id, int) and tokenizer("")["input_ids"][:1] == [bos_id] else []


def collate(examples: Sequence[Example], pad_id: int, pad_to: int | None = None) -> dict[str, Tensor]:
    """A batch of int64 tensors [B, T], padded on the right to `pad_to`, else to the longest example.

    A fixed length keeps shapes constant from step to step, so that step times and peaks compare.
    """
    longest = max(len(example.input_ids) for example in examples)
    length = longest if pad_to is None else pad_to
    if longest > length:
        raise DataError(f"pad_to={pad_to}, but an example has {longest} tokens; encode with seq_len={pad_to}")
    input_ids = torch.full((len(examples), length), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for row, example in enumerate(examples):
        size = len(example.input_ids)
        input_ids[row, :size] = torch.tensor(example.input_ids, dtype=torch.int64)
        attention_mask[row, :size] = 1
        labels[row, :size] = torch.tensor(example.labels, dtype=torch.int64)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
