"""Run a causal language model with its output head replaced, so that the loss is computed where the logits would be.

The whole model's own forward runs, and only the head's is another function for that time. So the model's auxiliary loss
and its hooks work as ever, and the head's weight is used where FSDP has it gathered: inside the forward of the unit
that holds it. What the model does to the logits after the head, a scale or a cap, is read from its configuration;
`check_output_head` compares with the model's own logits, since no configuration says it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_sonar.chunked_loss import chunked_cross_entropy

_CHECKED_TOKENS = 8
_RAMP = 100.0
_REMEDY = "Use model.loss=full (in Python: LanguageModel(loss='full'))."


class OutputHeadError(ValueError):
    """A model whose logits are not its output head's with a known scale and cap."""


def output_head(model: nn.Module) -> nn.Module:
    """The module that makes logits from hidden states.

    Raises:
        OutputHeadError: if the model names none, or one that is not linear.
    """
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    # By its forward: FSDP gives the module another class, and an adapter's layer is no plain product.
    if not isinstance(head, nn.Module) or type(head).forward is not nn.Linear.forward:
        raise OutputHeadError(
            f"model.loss=chunked: get_output_embeddings() of {type(model).__name__} gives {type(head).__name__}; "
            f"expected a plain nn.Linear. {_REMEDY}"
        )
    return head


def logit_transform(model: nn.Module) -> tuple[float, float | None]:
    """The scale and the cap that a Hugging Face model puts on its logits after the head: ``(1.0, None)`` for none.

    Granite divides by ``logits_scaling``, Cohere multiplies with ``logit_scale``, Falcon-H1 with
    ``lm_head_multiplier``; Gemma caps at ``final_logit_softcapping``.
    """
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    config = text() if callable(text) else config
    scale = 1.0
    for name, power in (("logits_scaling", -1), ("logit_scale", 1), ("lm_head_multiplier", 1)):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)):
            scale *= value**power
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, float(cap) if isinstance(cap, (int, float)) else None


@contextmanager
def _replaced(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    # Only the forward: the module is still called, so hooks on it (FSDP's, for one) run.
    before = head.__dict__.get("forward")
    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def forward_with_loss(
    model: nn.Module, run: Callable[[], Any], labels: Tensor, chunk: int | None = None
) -> tuple[Any, Tensor, Tensor]:
    """Run a model and compute its loss in chunks instead of its logits.

    Args:
        model: a Hugging Face causal language model.
        run: calls the model on the batch that ``labels`` belong to; its output's ``.logits`` mean nothing.
        labels: int64 ``[B, T]``, as in `chunked_cross_entropy`.
        chunk: as in `chunked_cross_entropy`.

    Returns:
        What ``run`` returned, the mean loss (float32, 0-dim) and the number of tokens it is the mean of.

    Raises:
        OutputHeadError: if the model has no linear output head, or did not call it once.
    """
    head = output_head(model)
    scale, softcap = logit_transform(model)
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def lose(hidden: Tensor) -> Tensor:
        loss, tokens = chunked_cross_entropy(
            hidden,
            head.weight,  # type: ignore[arg-type]
            labels.to(hidden.device),
            bias=getattr(head, "bias", None),
            scale=scale,
            softcap=softcap,
            chunk=chunk,
        )
        # Returned, so that hooks on the head's output see the backward come by (FSDP gathers the weight again in one);
        # the logits' three dimensions, so that what the model does to logits works on it. No view: FSDP warns of those.
        shaped = loss.reshape(1, 1, 1).clone()
        found.append((loss, shaped, tokens))
        return shaped

    with _replaced(head, lose):
        output = run()
    if len(found) != 1:
        raise OutputHeadError(
            f"model.loss=chunked: {type(model).__name__} called its output head {len(found)} times in one forward; "
            f"expected once. {_REMEDY}"
        )
    loss, shaped, tokens = found[0]
    if not shaped.requires_grad:
        return output, loss, tokens
    if shaped._version:
        raise OutputHeadError(
            f"model.loss=chunked: {type(model).__name__} changes its output head's result in place, which would change "
            f"the loss; expected new tensors. {_REMEDY}"
        )
    return output, shaped.sum(), tokens


@torch.no_grad()
def check_output_head(model: nn.Module, input_ids: Tensor) -> None:
    """Check on a few tokens that a model does to its logits what `logit_transform` says, and nothing else.

    The head is made to return logits from -100 to 100, since a cap does not show on the small ones of an untrained
    model. Random state, training mode and buffers are left as they were. Nothing is checked under ``FakeTensorMode``.

    Args:
        model: a Hugging Face causal language model.
        input_ids: int64 ``[B, T]``; at most eight tokens of its first row are used.

    Raises:
        OutputHeadError: naming the model's class, if its logits are something else.
    """
    ids = input_ids[:1, :_CHECKED_TOKENS]
    head = output_head(model)
    weight: Tensor = head.weight  # type: ignore[assignment]
    if isinstance(ids, FakeTensor) or isinstance(weight, FakeTensor) or weight.is_meta:
        return
    scale, softcap = logit_transform(model)
    plain_forward, made = head.forward, []

    def pretend(hidden: Tensor) -> Tensor:
        logits = plain_forward(hidden)
        ramp = torch.linspace(-_RAMP, _RAMP, logits.numel(), device=logits.device).reshape(logits.shape)
        made.append(ramp.to(logits.dtype))
        return made[-1].clone()  # the model may change it in place

    modes = {module: module.training for module in model.modules()}
    devices = [ids.device] if ids.device.type == "cuda" else []
    try:
        # Evaluation: a router that adds noise or keeps a statistic must not do so for this.
        model.eval()
        with torch.random.fork_rng(devices=devices), _replaced(head, pretend):
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for module, training in modes.items():
            module.training = training
    found = f"its output head called {len(made)} times"
    if len(made) == 1:
        expected = made[0].float() * scale
        if softcap is not None:
            expected = (expected / softcap).tanh() * softcap
        found = f"logits {list(logits.shape)} from a head that gave {list(expected.shape)}"
        if logits.shape == expected.shape:
            # A model rounds after the scale and at each of the cap's three operations.
            rtol = 4 * torch.finfo(made[0].dtype).eps
            if torch.allclose(logits.float(), expected, rtol=rtol, atol=rtol):
                return
            worst = (logits.float() - expected).abs().max().item()
            found = f"logits that differ from that by up to {worst:.3g} where the head gave -{_RAMP:g} to {_RAMP:g}"
    raise OutputHeadError(
        f"model.loss=chunked takes the logits of {type(model).__name__} for its output head's with scale {scale:g} and "
        f"softcap {softcap}, as its configuration says; found {found}. {_REMEDY}"
    )
