"""What makes updates inside backward wrong or useless, seen before training."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_sonar.experts import ExpertTensors, owner_name
from lightning_sonar.optim.update import is_dense
from lightning_sonar.sharded import local


def check_steppable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step one tensor when its gradient is there.

    Raises:
        ValueError: if its ``step`` has to be given a closure.
    """
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [each.name for each in parameters if each.default is each.empty and each.kind in named]
    if wanted:
        raise ValueError(
            f"{type(optimizer).__name__}.step wants {', '.join(wanted)}: it runs the model itself, as often as it "
            "likes, so there is no one backward to update tensors in. Use an optimizer that steps on gradients "
            "(FusedAdamW, torch.optim.AdamW), or mode='standard_no_expert_clip'."
        )


class _Stretch(NamedTuple):
    """Where a tensor lies in its storage: bytes from ``first`` to before ``end``."""

    storage: int
    first: int
    end: int
    tensor: Tensor


def check_memory(
    optimizer: torch.optim.Optimizer, released: Callable[[Tensor], bool], names: Mapping[int, str]
) -> None:
    """Refuse released tensors that share memory with another tensor, and those that a fused kernel would misread.

    Args:
        optimizer: the one that holds all tensors.
        released: whether a tensor is updated inside backward.
        names: of tensors, by ``id``.

    Raises:
        ValueError: naming the tensors.
    """

    def name(tensor: Tensor) -> str:
        return names.get(id(tensor), f"a tensor of shape {list(tensor.shape)}")

    every = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    folded = [each for each in every if each.layout == torch.strided and released(each) and _is_folded(local(each))]
    if folded:
        raise ValueError(
            f"{name(folded[0])} (shape {list(folded[0].shape)}, strides {list(folded[0].stride())}) has several "
            "elements in one place of memory, as expand() makes them, and an update would apply all their gradients to "
            "it. Give each element its own memory: .clone() the tensor before it becomes a parameter."
        )
    stretches = [_stretch(tensor) for tensor in every if tensor.layout == torch.strided and local(tensor).numel()]
    before: _Stretch | None = None
    for stretch in sorted(stretches, key=lambda each: each[:3]):
        same = before is not None and stretch.storage == before.storage
        if before is not None and same and stretch.first < before.end:
            one, other = before.tensor, stretch.tensor
            if released(one) or released(other):
                raise ValueError(
                    f"{name(one)} and {name(other)} are two parameters in the same memory, so an update of one inside "
                    "backward would change the other before its gradient is there. Tie weights by sharing the "
                    "parameter itself (a.weight = b.weight), or give each its own memory (.clone())."
                )
        if before is None or not same or stretch.end > before.end:
            before = stretch
    # torch's own; FusedAdamW looks for itself.
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        gaps = [each for each in group["params"] if group.get("fused") and released(each) and not is_dense(local(each))]
        if gaps:
            raise ValueError(
                f"{name(gaps[0])} has gaps in its memory (shape {list(gaps[0].shape)}, strides "
                f"{list(gaps[0].stride())}), and {type(optimizer).__name__}(fused=True) would write into them. Make "
                "the parameter contiguous, use FusedAdamW, or leave out fused=True."
            )


def _is_folded(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _stretch(tensor: Tensor) -> _Stretch:
    part = local(tensor)
    size, first = part.element_size(), int(part.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in zip(part.shape, part.stride(), strict=True))
    # Fake and meta tensors have a storage, but no address.
    return _Stretch(part.untyped_storage()._cdata, first * size, (last + 1) * size, tensor)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module runs under ``torch.compile``."""
    # module.compile() leaves the first attribute, torch.compile(module) the second, and on a LightningModule the third.
    traces = ("_compiled_call_impl", "_orig_mod", "_compiler_ctx")
    return any(getattr(module, trace, None) is not None for trace in traces)


def warn_of_whole_compile(tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> None:
    """Warn if one compiled module holds the experts of several layers.

    Args:
        tensors: from `find_expert_tensors`; nothing is known of the model of any others.
    """
    if not isinstance(tensors, ExpertTensors) or tensors.source is None or tensors.source.model is None:
        return
    model = tensors.source.model
    owners = {owner_name(model, each) for each in tensors}
    for name, module in model.named_modules():
        if not is_compiled(module):
            continue
        inside = [owner for owner in owners if not name or owner == name or owner.startswith(f"{name}.")]
        if len(inside) > 1:
            warnings.warn(
                f"{name or 'The model'} is compiled as a whole and holds the experts of {len(inside)} layers: one "
                "compiled backward hands out all their gradients together at its end, so they are alive at once and "
                "little memory is saved; the training is right. Compile each layer instead (layer.compile()).",
                stacklevel=3,
            )
            return


def refuse_lost_router_loss(module: nn.Module) -> None:
    """Refuse reentrant checkpointing of a model that is asked for its router's auxiliary loss.

    The reentrant kind runs a layer's forward without a graph, so the router's logits have none either.

    Raises:
        ValueError: naming the remedy.

    Source: transformers' ``gradient_checkpointing_enable``, which leaves the checkpointing function on each layer.
    """
    configs = [getattr(each, "config", None) for each in module.modules()]
    asked = any(getattr(config, "output_router_logits", False) is True for config in configs)
    if not asked and not any(getattr(each, "router_aux_loss", 0.0) for each in module.modules()):
        return
    for name, each in module.named_modules():
        options = getattr(getattr(each, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(each, "gradient_checkpointing", False) and options.get("use_reentrant"):
            raise ValueError(
                f"{name} is checkpointed with use_reentrant=True, and the model is asked for its router's auxiliary "
                "loss: that kind runs the layer without a graph, so the loss would have no gradient and nobody would "
                "notice. Enable checkpointing with {'use_reentrant': False}, or leave the auxiliary loss out "
                "(output_router_logits=False)."
            )
