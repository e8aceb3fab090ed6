"""The Alpaca data set from the Hugging Face hub."""

from collections.abc import Iterable
from typing import Any, cast

from lightning_sonar.data.errors import DataError
from lightning_sonar.data.files import record_of
from lightning_sonar.data.records import Record

__all__ = ["load_alpaca"]

_NAME = "tatsu-lab/alpaca"
_INSTEAD = "use data=builtin (needs no network) or data=json data.path=FILE with a copy of the data"


def load_alpaca() -> list[Record]:
    """The 52,002 records of `tatsu-lab/alpaca`, from the hub or from `datasets`' own cache."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{_NAME}: needs the package 'datasets': pip install datasets, or {_INSTEAD}") from error
    try:
        rows = datasets.load_dataset(_NAME, split="train")
    # The layers below raise exceptions of half a dozen packages; all mean the same to the user.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"{_NAME}: cannot be loaded from the hub ({reason}). Check the network, or {_INSTEAD}"
        ) from error
    records: list[Record] = []
    for number, row in enumerate(cast("Iterable[Any]", rows), start=1):
        try:
            records.append(record_of(row))
        except DataError as error:
            raise DataError(f"{_NAME}, record {number}: {error}. Instead {_INSTEAD}") from error
    return records
