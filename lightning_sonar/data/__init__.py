"""Instruction data: built in, from a local file, or from the Hugging Face hub."""

from lightning_sonar.data.builtin import builtin_records
from lightning_sonar.data.chat import ChatTemplateWarning
from lightning_sonar.data.encode import IGNORED, Example, collate, encode, encode_all
from lightning_sonar.data.errors import DataError
from lightning_sonar.data.files import read_records
from lightning_sonar.data.hub import load_alpaca
from lightning_sonar.data.module import InstructionData
from lightning_sonar.data.packing import Row, check_packing, collate_packed, pack, packed_arguments, router_loss
from lightning_sonar.data.records import Chat, Record, Segment, from_alpaca, from_messages
from lightning_sonar.data.tokenizer import END_TOKEN, PAD_TOKEN, cached_tokenizer, train_tokenizer

__all__ = [
    "END_TOKEN",
    "IGNORED",
    "PAD_TOKEN",
    "Chat",
    "ChatTemplateWarning",
    "DataError",
    "Example",
    "InstructionData",
    "Record",
    "Row",
    "Segment",
    "builtin_records",
    "cached_tokenizer",
    "check_packing",
    "collate",
    "collate_packed",
    "encode",
    "encode_all",
    "from_alpaca",
    "from_messages",
    "load_alpaca",
    "pack",
    "packed_arguments",
    "read_records",
    "router_loss",
    "train_tokenizer",
]
