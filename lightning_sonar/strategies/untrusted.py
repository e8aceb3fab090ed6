"""The folder of a sharded checkpoint read without running what may hide in it; torch unpickles parts of it freely."""

from __future__ import annotations

import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"
"""File in the folder of a sharded checkpoint that says where everything is; written last."""


class ForeignObjectError(pickle.UnpicklingError):
    """What a sharded checkpoint has no business to hold, named; loading it could run code."""


_CHECKPOINT = "torch.distributed.checkpoint"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_ALLOWED = {
    *((f"{_CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_CHECKPOINT}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes")),
    *((f"{_CHECKPOINT}.metadata", name) for name in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


class _Metadata(pickle.Unpickler):
    """Makes only what torch writes into the metadata of a checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return getattr(importlib.import_module(module), name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ForeignObjectError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


def read_metadata(folder: Path) -> Any:
    """The metadata of a sharded checkpoint, as torch's own reader gives them; nothing in them is run.

    Raises:
        ForeignObjectError: if they hold anything else than metadata. Damaged ones may raise anything.
        OSError: if they cannot be read.
    """
    with (folder / METADATA).open("rb") as file:
        return _Metadata(file).load()


def check_plain(folder: Path) -> None:
    """Check that a sharded checkpoint holds tensors and plain values only; for a tensor torch sees to that itself.

    Raises:
        pickle.UnpicklingError: if it holds an object that could run code, or names a file outside of its folder.
        OSError: if a file cannot be read.
    """
    metadata = read_metadata(folder)
    values = {
        key for key, kind in metadata.state_dict_metadata.items() if type(kind).__name__ == "BytesStorageMetadata"
    }
    for index, part in metadata.storage_data.items():
        path = folder / part.relative_path
        if folder.resolve() not in path.resolve().parents:
            raise ForeignObjectError(f"it names {part.relative_path}, a file outside of its folder")
        if index.fqn not in values:
            continue
        if getattr(part, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{index.fqn} is written in a form that cannot be looked into")
        with path.open("rb") as file:
            file.seek(part.offset)
            torch.load(io.BytesIO(file.read(part.length)), map_location="cpu", weights_only=True)
