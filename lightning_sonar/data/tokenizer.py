"""A byte-level BPE tokenizer trained on the data itself, for models small enough to train from scratch."""

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_sonar.data.cache import cache_folder, read_cached, write_cached
from lightning_sonar.data.errors import DataError

__all__ = ["END_TOKEN", "PAD_TOKEN", "cached_tokenizer", "single_threaded", "train_tokenizer"]

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
_SPECIAL = [PAD_TOKEN, END_TOKEN]
_MIN_VOCAB = 256 + len(_SPECIAL)
_LONG_WORD = re.compile(r"\S{512}|\s{512}")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens; any text survives encoding and decoding unchanged.

    The same texts always give the same tokenizer. Few texts may give fewer tokens than asked for.
    """
    return _wrap(_train(texts, vocab_size))


def cached_tokenizer(
    texts: Sequence[str], vocab_size: int = 4096, cache_dir: str | Path | None = None
) -> PreTrainedTokenizerFast:
    """`train_tokenizer`, kept in `cache_dir` (by default the user's cache folder) for these very texts."""
    folder = cache_folder(cache_dir)
    if folder is None:
        return train_tokenizer(texts, vocab_size)
    path = folder / f"tokenizer-{vocab_size}-{_key(texts, vocab_size)}.json"
    stored = read_cached(path)
    if stored is not None:
        # tokenizers raises nothing narrower than Exception for a file that it cannot take.
        with contextlib.suppress(Exception):
            return _wrap(tokenizers.Tokenizer.from_str(stored))
    trained = _train(texts, vocab_size)
    write_cached(path, trained.to_str())
    return _wrap(trained)


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Keep tokenizers from starting threads, unless the user has set TOKENIZERS_PARALLELISM.

    Having used threads, its older versions warn at every later fork, as when a data loader starts workers.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _train(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    if vocab_size < _MIN_VOCAB:
        raise DataError(
            f"vocab_size={vocab_size}: expected at least {_MIN_VOCAB}, "
            f"the 256 bytes and the special tokens {', '.join(_SPECIAL)}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        # All bytes, seen or not, or text outside the training part could not be written.
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with single_threaded():
        tokenizer.train_from_iterator((piece for text in texts for piece in _pieces(text)), trainer)
    return tokenizer


def _pieces(text: str) -> Iterator[str]:
    """The text, cut within words of more than 512 characters: the time to train grows with the square of a word."""
    start = 0
    for word in _LONG_WORD.finditer(text):
        yield text[start : word.end()]
        start = word.end()
    yield text[start:]


def _wrap(tokenizer: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        padding_side="right",
        clean_up_tokenization_spaces=False,  # would join "word ." to "word." when decoding
    )


def _key(texts: Iterable[str], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{vocab_size} {tokenizers.__version__} {platform.python_version()} {_SPECIAL}\n".encode())
    for text in texts:
        data = text.encode()
        digest.update(b"%d\n" % len(data))  # the length too, so that moved borders between texts show
        digest.update(data)
    return digest.hexdigest()[:16]
