"""Cross-entropy from hidden states: the whole logits ``[B, T, V]`` never exist, forward or backward.

The vocabulary is cut into chunks, not the tokens. Forward keeps a running logsumexp per token. Backward makes each
chunk's logits again; with the logsumexp known, a chunk's gradient needs no other chunk. So each row of the weight's
gradient is one product over all tokens, written once in the weight's own dtype: nothing of the weight's size is summed
over chunks, which would either round at every chunk (bfloat16) or take twice the memory (float32). What is summed over
chunks is the gradient of the hidden states, in float32, and that is small. No gradient is made in the forward: it would
stay alive until backward begins, which is where a step's memory peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from lightning_sonar.liger import liger_cross_entropy, liger_takes
from lightning_sonar.losses import IGNORED

Kernel = Literal["auto", "torch", "liger"]

# A chunk's logits: about this many numbers, so that small batches do not launch hundreds of small products.
_CHUNK_NUMEL = 2**21
# Never fewer chunks than this, or the "chunk" of a small model would be the whole logits.
_LEAST_CHUNKS = 8


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    kernel: Kernel = "auto",
) -> tuple[Tensor, Tensor]:
    """`response_cross_entropy` of ``softcap(scale * (hidden @ weight.T + bias))``, without the whole logits.

    Beyond its inputs it takes, in the forward, some buffers of ``B * T * chunk`` numbers; in the backward these, the
    gradient of ``weight`` in its own dtype and that of ``hidden`` in float32. Backward may run several times over one
    graph (``retain_graph=True``), and makes only the gradients that are asked for. Results are the same bits at every
    run. Under autocast the products run in autocast's dtype, as a linear layer's would. Shapes never depend on data, so
    it runs under ``FakeTensorMode``.

    Args:
        hidden: ``[B, T, H]``, any floating dtype: what the output head would get.
        weight: ``[V, H]``, the output head's; it may be the embedding, too. A whole tensor: under FSDP2, call this
            while the unit that holds the head is gathered, inside that unit's forward.
        labels: int64 ``[B, T]``, aligned with the inputs; `IGNORED` where a token does not count.
        bias: ``[V]`` or ``None``.
        scale: factor on the logits.
        softcap: ``c`` in ``c * tanh(logits / c)``, applied after ``scale``; ``None`` for no cap.
        chunk: vocabulary entries a chunk; by default so many that its logits are about as large as ``hidden``, or
            2**21 numbers if that is more, and an eighth of the vocabulary at most.
        kernel: ``"auto"``: liger-kernel's fused one where it is installed and the tensors are on a CUDA device, else
            plain torch; ``"torch"`` and ``"liger"`` force one. Liger's chooses its chunks itself.

    Returns:
        The mean loss in nats, float32 and 0-dim, and the number of tokens it is the mean of, 0-dim. A batch without a
        labelled token has loss 0.

    Raises:
        ValueError: for shapes that do not fit, a label outside the vocabulary (on a GPU: a device-side assertion), a
            sharded weight, or a ``kernel`` that cannot run.
    """
    _check(hidden, weight, labels, bias, chunk, kernel)
    rows = hidden.reshape(-1, hidden.shape[-1])  # [N, H]
    # The hidden states are used whole and the labels move: a slice of the hidden states would be a copy of them.
    wanted = F.pad(labels[:, 1:], (0, 1), value=IGNORED).reshape(-1)  # [N]
    tokens = torch.count_nonzero(wanted != IGNORED)
    _check_labels(wanted, weight.shape[0])
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        if kernel == "liger" or (kernel == "auto" and not isinstance(hidden, FakeTensor) and liger_takes(hidden)):
            return liger_cross_entropy(rows, weight, bias, wanted, dtype, scale, softcap), tokens
        size = chunk or _chunk_size(rows.shape[0], *weight.shape)
        total = _ChunkedCrossEntropy.apply(rows, weight, bias, wanted, dtype, scale, softcap, size)
    return total / tokens.clamp(min=1), tokens


def _chunk_size(tokens: int, vocabulary: int, width: int) -> int:
    return min(max(width, _CHUNK_NUMEL // tokens, 1), -(-vocabulary // _LEAST_CHUNKS))


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int | None, kernel: Kernel
) -> None:
    if hidden.ndim != 3 or labels.shape != hidden.shape[:2] or not labels.numel():
        raise ValueError(
            f"chunked_cross_entropy: hidden {list(hidden.shape)} with labels {list(labels.shape)}; expected [B, T, H] "
            "with [B, T], neither empty."
        )
    if getattr(weight, "placements", None) is not None:
        raise ValueError(
            "chunked_cross_entropy: the weight is a DTensor, of which this rank holds a part; expected the whole one. "
            "Call it inside the forward of the FSDP unit that holds the output head."
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or (bias is not None and bias.shape != weight.shape[:1]):
        extra = "" if bias is None else f" and bias {list(bias.shape)}"
        raise ValueError(
            f"chunked_cross_entropy: weight {list(weight.shape)}{extra} for hidden {list(hidden.shape)}; expected "
            "weight [V, H] and bias [V]."
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunked_cross_entropy(chunk={chunk}): expected at least 1, or None for the default.")
    if kernel not in get_args(Kernel):
        raise ValueError(f"chunked_cross_entropy(kernel={kernel!r}): expected one of {', '.join(get_args(Kernel))}.")
    if kernel == "liger" and not liger_takes(hidden):
        raise ValueError(
            f"chunked_cross_entropy(kernel='liger'): expected a CUDA device and liger-kernel 0.6.4 or newer, with "
            f"hidden on {hidden.device}. Install lightning-sonar[liger], or take kernel='auto'."
        )


def _check_labels(wanted: Tensor, vocabulary: int) -> None:
    # A gather checks its index without a device sync: on a CPU it raises, on a GPU it asserts on the device.
    try:
        torch.empty(vocabulary, dtype=torch.bool, device=wanted.device).gather(
            0, wanted.where(wanted != IGNORED, torch.zeros_like(wanted))
        )
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"chunked_cross_entropy: a label is no token of a vocabulary of {vocabulary} ({error}). Expected 0 to "
            f"{vocabulary - 1}, or {IGNORED} for a token that does not count; does the tokenizer fit the model?"
        ) from error


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The summed loss, float32 and 0-dim, of ``hidden [N, H]`` and ``wanted [N]``; runs with autocast off."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Tensor,
        dtype: torch.dtype,
        scale: float,
        softcap: float | None,
        size: int,
    ) -> Tensor:
        cast = hidden.to(dtype)
        # The smallest finite number instead of -inf: -inf minus -inf would be NaN.
        top = torch.full_like(wanted, torch.finfo(torch.float32).min, dtype=torch.float32)  # [N]
        mass = torch.zeros_like(top)
        hit = torch.zeros_like(top)
        for start, stop in _chunks(weight, size):
            logits = _cap(_logits(cast, weight, bias, start, stop, scale), softcap)  # float32 [N, C]
            column, inside = _columns(wanted, start, stop)
            hit = torch.where(inside, logits.gather(1, column).squeeze(1), hit)
            higher = torch.maximum(top, logits.amax(1))
            mass = mass * (top - higher).exp_() + logits.sub_(higher[:, None]).exp_().sum(1)
            top = higher
            del logits  # before the next chunk's are made
        norm = top + mass.log()  # logsumexp, [N]
        ctx.save_for_backward(hidden, weight, bias, wanted, norm)
        ctx.settings = dtype, scale, softcap, size
        return torch.where(wanted != IGNORED, norm - hit, torch.zeros_like(norm)).sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator makes ctx positional
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, wanted, norm = ctx.saved_tensors
        (grad,) = grad_outputs
        dtype, scale, softcap, size = ctx.settings
        # The engine enters with the forward's autocast state.
        with torch.autocast(hidden.device.type, enabled=False):
            made = _gradients(hidden, weight, bias, wanted, norm, grad, dtype, scale, softcap, size, _asked_for(ctx))
        return (*made, None, None, None, None, None)


def _asked_for(ctx: Any) -> tuple[bool, bool, bool]:
    """Which gradients, of hidden, weight and bias, this backward leads to.

    `needs_input_grad` does not know of ``backward(inputs=...)``; the engine does, except under ``torch.autograd.grad``.
    """
    runs = getattr(torch._C, "_will_engine_execute_node", None)
    nodes = [node for node, _ in ctx.next_functions]

    def asked(position: int) -> bool:
        node = nodes[position] if ctx.needs_input_grad[position] else None
        if node is None or runs is None:
            return node is not None
        try:
            return runs(node)
        except RuntimeError:  # it cannot tell
            return True

    return asked(0), asked(1), asked(2)


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Tensor,
    norm: Tensor,
    grad: Tensor,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
    size: int,
    asked: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    cast = hidden.to(dtype)
    share = torch.where(wanted != IGNORED, grad, torch.zeros_like(grad))[:, None]  # [N, 1]
    rows = torch.arange(wanted.shape[0], device=wanted.device)
    for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if asked[0] else None
    for_weight = torch.empty_like(weight) if asked[1] else None
    for_bias = torch.empty_like(bias) if asked[2] and bias is not None else None
    for start, stop in _chunks(weight, size):
        logits = _logits(cast, weight, bias, start, stop, scale)  # float32 [N, C]
        slope = None
        if softcap is not None:
            logits = _cap(logits, softcap)
            slope = (logits / softcap).square_().neg_().add_(1)  # of the cap
        delta = logits.sub_(norm[:, None]).exp_()  # probabilities, then the logits' gradient
        column, inside = _columns(wanted, start, stop)
        at = column.squeeze(1)
        delta[rows, at] = delta[rows, at] - inside.float()
        delta.mul_(share)
        if slope is not None:
            delta.mul_(slope)
        if scale != 1.0:
            delta.mul_(scale)
        if for_bias is not None:
            for_bias[start:stop] = delta.sum(0)
        rounded = delta.to(dtype)
        del logits, delta, slope
        if for_weight is not None:
            for_weight[start:stop] = rounded.t() @ cast
        if for_hidden is not None:
            _add_product(for_hidden, rounded, weight[start:stop].to(dtype))
        del rounded
    return None if for_hidden is None else for_hidden.to(hidden.dtype), for_weight, for_bias


def _chunks(weight: Tensor, size: int) -> Iterator[tuple[int, int]]:
    vocabulary = weight.shape[0]
    for start in range(0, vocabulary, size):
        yield start, min(start + size, vocabulary)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int, scale: float) -> Tensor:
    """Scaled logits of one chunk, float32 ``[N, C]``; the product is in the dtype of ``hidden``, as the head's is."""
    part = None if bias is None else bias[start:stop].to(hidden.dtype)
    logits = F.linear(hidden, weight[start:stop].to(hidden.dtype), part).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _cap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _columns(wanted: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Where in a chunk each token's label is, int64 ``[N, 1]`` (0 if it is not there), and whether it is, ``[N]``."""
    inside = (wanted >= start) & (wanted < stop)
    return torch.where(inside, wanted - start, torch.zeros_like(wanted))[:, None], inside


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` with ``total`` in float32, where rounding each chunk's product would cost accuracy."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.device.type == "cuda":
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:  # no such product there
        total.addmm_(left.float(), right.float())
