"""Instruction data: built in, from a local file, or from the Hugging Face hub."""

from .builtin import builtin_records
from .encode import IGNORED, Example, collate, encode, encode_all
from .errors import DataError
from .files import read_records
from .hub import load_alpaca
from .module import InstructionData
from .records import Record, Segment, from_alpaca, from_messages
from .tokenizer import END_TOKEN, PAD_TOKEN, cached_tokenizer, train_tokenizer

__all__ = [
    "END_TOKEN",
    "IGNORED",
    "PAD_TOKEN",
    "DataError",
    "Example",
    "InstructionData",
    "Record",
    "Segment",
    "builtin_records",
    "cached_tokenizer",
    "collate",
    "encode",
    "encode_all",
    "from_alpaca",
    "from_messages",
    "load_alpaca",
    "read_records",
    "train_tokenizer",
]
