"""Response-only cross-entropy for language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of a token that does not count for the loss."""


def shift(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pair each position's prediction with the token that follows it.

    Args:
        logits: ``[B, T, V]``.
        labels: int64 ``[B, T]``, aligned with the inputs, `IGNORED` where a token does not count.

    Returns:
        Logits ``[B, T - 1, V]`` (a view) and labels ``[B, T - 1]``.
    """
    return logits[:, :-1], labels[:, 1:]


def response_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the labelled tokens, in float32.

    Args:
        logits: ``[B, T, V]``, any floating dtype.
        labels: int64 ``[B, T]``, aligned with the inputs; `IGNORED` where a token does not count.

    Returns:
        The mean loss in nats, float32 and 0-dim, and the number of tokens it is the mean of, 0-dim. A batch without a
        labelled token has loss 0.
    """
    predicted, wanted = shift(logits, labels)
    total = F.cross_entropy(
        predicted.reshape(-1, predicted.shape[-1]).float(),
        wanted.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )
    tokens = torch.count_nonzero(wanted != IGNORED)
    return total / tokens.clamp(min=1), tokens
