"""The one exception that data reading raises."""

__all__ = ["DataError"]


class DataError(ValueError):
    """The data cannot be used as it is; the message says where, what was expected and what to do."""
