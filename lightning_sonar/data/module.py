"""Instruction data as a LightningDataModule."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from lightning_sonar.data.builtin import builtin_records
from lightning_sonar.data.chat import ChatTemplate
from lightning_sonar.data.encode import Example, collate, encode_all
from lightning_sonar.data.errors import DataError
from lightning_sonar.data.files import read_records
from lightning_sonar.data.hub import load_alpaca
from lightning_sonar.data.loader import ALL, ResumableLoader, Share, ShuffledBatches, even_batches, share_out
from lightning_sonar.data.packing import Row, collate_packed, pack
from lightning_sonar.data.records import Record
from lightning_sonar.data.tokenizer import cached_tokenizer

__all__ = ["SOURCES", "InstructionData", "split"]

SOURCES = ("builtin", "json", "alpaca")

# Not an argument: runs of any seed are judged on the same records.
_HELDOUT_SEED = 20_240_903

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class InstructionData(LightningDataModule):
    """Instruction data of which only the responses count for the loss, with a held-out part.

    The held-out part is `heldout_size` records or a tenth, whichever is less, chosen by a constant seed of
    its own: runs with different `seed` hold out the same records, and differ only in the order of the others.
    Training never sees a held-out record, nor a copy of it, nor does the tokenizer that is trained here.

    Args:
        source: `builtin` (docstrings of Python's standard library), `json` (`path`, a local JSON, JSONL or
            Parquet file) or `alpaca` (`tatsu-lab/alpaca` from the hub).
        path: the file that `json` reads.
        seq_len: examples are cut to so many tokens; a record whose prompt alone fills them is dropped.
        batch_size: examples in a training batch. The last one of an epoch is dropped if it is not full.
        eval_batch_size: examples in a held-out batch.
        heldout_size: the most records to hold out.
        seed: decides the order of training examples, nothing else.
        tokenizer: the model's own; None trains a byte-level BPE of `vocab_size` tokens on the training part.
        vocab_size: how many tokens such a BPE has at most.
        pad_to_seq_len: pad every batch to `seq_len`, so that step times and memory peaks compare; otherwise
            to its longest example.
        num_workers: processes that collate batches.
        cache_dir: where records and tokenizer are kept; None is the user's cache folder.
        max_records: use only the first so many records.
        packing: put as many short training examples into a row of `seq_len` tokens as it holds, none of which sees
            another. `batch_size` then counts rows. Held-out examples keep a row each, so that their loss compares.
        chat_template: `auto` writes records in the tokenizer's chat template, if it has one; `none` in a plain form.

    After `setup`: `tokenizer`, `vocab_size`, `train_set`, `train_rows`, `heldout_set`, and how many records were too
    long for `seq_len`, `train_dropped` and `heldout_dropped`.
    """

    def __init__(
        self,
        source: str = "builtin",
        path: str | Path | None = None,
        seq_len: int = 256,
        batch_size: int = 2,
        eval_batch_size: int = 8,
        heldout_size: int = 512,
        seed: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        vocab_size: int = 4096,
        pad_to_seq_len: bool = True,
        num_workers: int = 0,
        cache_dir: str | Path | None = None,
        max_records: int | None = None,
        packing: bool = False,
        chat_template: ChatTemplate = "auto",
    ) -> None:
        super().__init__()
        if source not in SOURCES:
            raise DataError(f"source={source!r}: expected one of {', '.join(SOURCES)}")
        if source == "json" and not path:
            raise DataError("source='json' needs path: a local .json, .jsonl or .parquet file")
        if source != "json" and path:
            raise DataError(f"path={path!r} is read only with source='json', but source={source!r}")
        if chat_template not in get_args(ChatTemplate):
            raise DataError(f"chat_template={chat_template!r}: expected one of {', '.join(get_args(ChatTemplate))}")
        if not isinstance(packing, bool):
            raise DataError(f"packing={packing!r}: expected true or false")
        for name, value, least in (
            ("seq_len", seq_len, 2),
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("heldout_size", heldout_size, 1),
            ("num_workers", num_workers, 0),
            ("max_records", max_records, 2),
        ):
            if value is None and name in ("max_records", "seq_len"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise DataError(f"{name}={value!r}: expected a whole number, at least {least}")
            if value < least:
                raise DataError(f"{name}={value}: expected at least {least}")
        for name, value, kind in (("path", path, "file"), ("cache_dir", cache_dir, "folder")):
            if value is not None and not isinstance(value, (str, Path)):
                raise DataError(f"{name}={value!r} is of type {type(value).__name__}; expected the name of one {kind}")
        self.source = source
        self.path = path
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.heldout_size = heldout_size
        self.seed = seed
        self.pad_to_seq_len = pad_to_seq_len
        self.num_workers = num_workers
        self.cache_dir = cache_dir
        self.max_records = max_records
        self.packing = packing
        self.chat_template: ChatTemplate = chat_template
        self.train_dropped = 0
        self.heldout_dropped = 0
        self._given_tokenizer = tokenizer
        self._most_tokens = vocab_size
        self._records: list[Record] | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._train_set: list[Example] | None = None
        self._train_rows: list[Row] | None = None
        self._heldout_set: list[Example] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer given, or the one that `setup` trained."""
        return _after_setup(self._tokenizer, "tokenizer")

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer has, special ones included."""
        return len(_after_setup(self._tokenizer, "vocab_size"))

    @property
    def train_set(self) -> list[Example]:
        """The examples to train on, in the order of the data."""
        return _after_setup(self._train_set, "train_set")

    @property
    def train_rows(self) -> list[Row]:
        """The rows that training batches are made of: with `packing` several examples each, otherwise one."""
        return _after_setup(self._train_rows, "train_rows")

    @property
    def heldout_set(self) -> list[Example]:
        """The examples held out, in a fixed order."""
        return _after_setup(self._heldout_set, "heldout_set")

    def prepare_data(self) -> None:
        """Download or parse once, in one process; the others then find it in the cache."""
        self._load()

    def setup(self, stage: str | None = None) -> None:
        """Read, split and encode, once, whatever the stage."""
        if self._heldout_set is not None:
            return
        records = self._load()
        training, heldout = split(records, self.heldout_size)
        tokenizer = self._given_tokenizer
        if tokenizer is None:
            texts = [text for record in training for text, _ in record]
            tokenizer = cached_tokenizer(texts, self._most_tokens, self.cache_dir)
        heldout_set, heldout_dropped = encode_all(heldout, tokenizer, self.seq_len, self.chat_template)
        encoded, train_dropped = encode_all(training, tokenizer, self.seq_len, self.chat_template)
        # Records that differ only beyond seq_len are copies of one another by now.
        unseen = {tuple(example.input_ids) for example in heldout_set}
        train_set = [example for example in encoded if tuple(example.input_ids) not in unseen]
        dropped, copies = train_dropped + heldout_dropped, len(records) - len(heldout) - len(training)
        copies += len(encoded) - len(train_set)
        cut = sum(example.cut for example in (*train_set, *heldout_set))
        silent = sum(not any(text.strip() for text, learn in record if learn) for record in records)
        counts = (
            f"{len(records)} records, {len(heldout)} held out, {copies} left out as copies of these, {dropped} dropped "
            f"because their prompt fills seq_len={self.seq_len}, {cut} cut to it"
        )
        if silent:
            counts += f", {silent} with an empty response, which teach to end at once"
        if not heldout_set:
            raise DataError(f"no held-out example is left ({counts}): use a larger seq_len or more data")
        rows = pack(train_set, self.seq_len) if self.packing else [(example,) for example in train_set]
        if len(rows) < self.batch_size:
            packed = f", packed into {len(rows)} rows" if self.packing else ""
            raise DataError(
                f"batch_size={self.batch_size}, but only {len(train_set)} training examples are left{packed} "
                f"({counts}): use a smaller batch_size, a larger seq_len "
                "or more data"
            )
        # A few long prompts and empty responses are normal; a tenth of the data is worth a line.
        much = train_dropped > len(training) // 10 or silent > len(records) // 10
        level = logging.WARNING if much else logging.INFO
        _log.log(level, "%s data: %s; %d training examples", self.source, counts, len(train_set))
        if self.packing:
            tokens = sum(len(example.input_ids) for example in train_set)
            full = tokens / (len(rows) * self.seq_len)
            _log.info(
                "%d examples packed into %d rows, which they fill to %.0f%%", len(train_set), len(rows), full * 100
            )
        self._tokenizer, self._train_set, self._heldout_set = tokenizer, train_set, heldout_set
        self._train_rows = rows
        self.train_dropped, self.heldout_dropped = train_dropped, heldout_dropped
        self._records = None  # encoded now; the texts need not stay in memory

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Training batches in an order that `seed` decides, all of them full; resumable in the middle of an epoch."""
        share = self._share()
        batches = ShuffledBatches(len(self.train_rows), self.batch_size, self.seed, share)
        if not len(batches):
            what = f"rows of {len(self.train_set)} training examples" if self.packing else "training examples"
            raise DataError(
                f"batch_size={self.batch_size} on {share.ranks} ranks, but only {len(self.train_rows)} {what}: use "
                "fewer ranks, a smaller batch_size or more data"
            )
        if self.packing:
            return ResumableLoader(self.train_rows, batches, **self._loading(collate_packed))
        return ResumableLoader(self.train_set, batches, **self._loading())

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Held-out batches, always in the same order; on several ranks each example is on one of them."""
        heldout = cast("Dataset[dict[str, Tensor]]", self.heldout_set)
        share = self._share()
        if share.ranks > 1:
            batches = even_batches(len(self.heldout_set), self.eval_batch_size, share)
            loader = DataLoader(heldout, batch_sampler=batches, **self._loading())
        else:
            loader = DataLoader(heldout, batch_size=self.eval_batch_size, shuffle=False, **self._loading())
        share_out(loader, heldout, share)
        return loader

    def _share(self) -> Share:
        found = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return Share(found["rank"], found["num_replicas"], parallel=True) if found else ALL

    def _loading(self, join: Callable[..., dict[str, Tensor]] = collate) -> dict[str, Any]:
        pad_id = self.tokenizer.pad_token_id
        if not isinstance(pad_id, int):  # padding is masked everywhere, so any token will do
            pad_id = 0
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "collate_fn": partial(join, pad_id=pad_id, pad_to=self.seq_len if self.pad_to_seq_len else None),
        }

    def _load(self) -> list[Record]:
        if self._records is None:
            if self.source == "builtin":
                records = builtin_records(self.cache_dir)
            elif self.source == "alpaca":
                records = load_alpaca()
            else:
                records = read_records(Path(cast(str, self.path)))
            if len(records) < 2:
                raise DataError(
                    f"{self.path or self.source}: only {len(records)} record; "
                    "expected at least 2, one to train on and one to hold out"
                )
            self._records = records[: self.max_records]
        return self._records


def split(records: list[Record], heldout_size: int) -> tuple[list[Record], list[Record]]:
    """The training part, without copies of held-out records, and the held-out part, always the same one."""
    size = max(1, min(heldout_size, len(records) // 10))
    chosen = sorted(random.Random(_HELDOUT_SEED).sample(range(len(records)), size))
    heldout = [records[index] for index in chosen]
    unseen = set(heldout)
    return [record for record in records if record not in unseen], heldout


def _after_setup(value: _T | None, name: str) -> _T:
    if value is None:
        raise RuntimeError(f"InstructionData.{name} exists after setup(); call setup() first")
    return value
