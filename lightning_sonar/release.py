"""Put the hooks on: checks what is asked for, and makes the handle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sonar import messages
from lightning_sonar.expert_clip import check_accumulation
from lightning_sonar.experts import ExpertTensors
from lightning_sonar.in_backward import Accumulation, InBackward, is_released
from lightning_sonar.modes import ExpertClip, Mode, mode_name, resolve_mode
from lightning_sonar.nonfinite import Check, NonfiniteGuard, OnNonfinite
from lightning_sonar.optim.offload import check_state_device, check_streamable
from lightning_sonar.optim.step_one import is_element_wise, owner_of
from lightning_sonar.unsuitable import check_memory, check_steppable, warn_of_whole_compile


def release_in_backward(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor] | Iterable[Tensor],
    *,
    mode: str | Mode = "sonar",
    expert_clip: ExpertClip | None = None,
    accumulation: Accumulation = "exact",
    on_nonfinite: OnNonfinite = "skip",
    check: Check = "loss",
    measure_norms: bool = False,
    names: Mapping[int, str] | None = None,
    expert_state_device: Literal["cpu"] | None = None,
) -> InBackward:
    """Let the optimizer update ``tensors`` inside backward, each the moment its gradient is complete.

    Tensors that come later belong to it from the next step on: frozen ones that are unfrozen, groups that are added.
    For new expert tensors to be known as such, pass what `find_expert_tensors` returned as it is. Hooks that others put
    on a tensor see its gradient first. Not noticed is a weight that is read without its gradient (detached, or under
    ``no_grad``) in a checkpointed part of the model: where that part runs again, the weight may have been updated.

    After backward only the other parameters have gradients: clip them, and call ``optimizer.step()`` as always.
    `InBackward.train_step` does all of it. Run backward as ``handle.backward(loss)``: a bare ``loss.backward()``
    updates the tensors too, but nobody has looked at the loss then.

    Args:
        optimizer: any torch optimizer over all parameters, the tensors included.
        tensors: the expert tensors, as `find_expert_tensors` returns them, or any tensors; ``[E, ...]`` where the
            mode has one hook an expert.
        mode: a name from `MODES`, or a `Mode`.
        expert_clip: how expert gradients are clipped inside backward, in the place of the mode's own; see `Mode`.
        accumulation: ``"exact"``: the hooks act on the last microbatch only, on the summed gradient.
            That keeps every gradient until then. ``"host"``: the same, but gradients of earlier microbatches are
            summed in host memory, which takes 4 bytes an element there; see `HostSums`. Where nothing is updated
            inside backward it is ``"exact"``. ``"per_microbatch"``: they act on every microbatch (the paper's).
        on_nonfinite: for a loss that is NaN or infinite: ``"skip"`` leaves the step out, all its microbatches, and
            counts it: weights, states and step counts stay as they were, bit for bit. Only with ``"per_microbatch"``
            experts keep the updates of the microbatches before the bad one; they get no others in this step.
            ``"raise"`` raises FloatingPointError, ``"ignore"`` does not look.
        check: ``"loss"``, or ``"gradient"`` to look at each gradient too, which may be NaN or infinite under a finite
            loss. Of tensors that step inside backward just the one with such a gradient is left out, since others have
            stepped already. Tensors that step after backward are left out together. With exact clipping, and where
            nothing steps inside backward, that is the whole step. Each tensor left out is counted. Gradients are
            looked at before any clip.
        measure_norms: keep the norms of each step's gradients for `InBackward.grad_norms`.
        names: names of further parameters by ``id``, for messages.
        expert_state_device: ``"cpu"`` keeps the optimizer's states of ``tensors`` in host memory and streams them
            around each update; the results are the same bits. See `HostStates`. After ``remove()`` they are still
            there; ``optimizer.load_state_dict(optimizer.state_dict())`` puts them on the parameters' device.

    Returns:
        A handle with ``.remove()``.

    Raises:
        ValueError: if the optimizer does not hold a tensor or wants a closure, a tensor is released already, is float16
            or shares memory with another one, the mode or ``expert_state_device`` needs an element-wise optimizer and
            this one is not known to be, or the expert clip makes no sense.

    Source: arXiv 2611.03577; torch's ``register_post_accumulate_grad_hook``.
    """
    mode = resolve_mode(mode, expert_clip)
    check_accumulation(mode, accumulation)
    check_state_device(mode, expert_state_device)
    for key, value, choices in (
        ("accumulation", accumulation, get_args(Accumulation)),
        ("on_nonfinite", on_nonfinite, get_args(OnNonfinite)),
        ("check", check, get_args(Check)),
    ):
        if value not in choices:
            raise ValueError(f"{key}={value!r}: expected one of {', '.join(map(repr, choices))}.")
    experts = _named(tensors)
    all_names = {**(names or {}), **{id(tensor): name for name, tensor in experts.items()}}
    expert_ids = {id(tensor) for tensor in experts.values()}
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    held_ids = {id(tensor) for tensor in held}
    for name, tensor in experts.items():
        if id(tensor) not in held_ids and mode.in_backward != "none":
            raise ValueError(
                f"{name} is to be updated inside backward, but the optimizer does not hold it. Give the optimizer "
                "all parameters of the model, this one included; or, if it is not to train, freeze it "
                "(requires_grad_(False))."
            )
        if tensor.dtype == torch.float16:
            raise ValueError(messages.float16(name))
        if tensor.ndim < 2 and mode.expert_clip == "per_expert":
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but expert_clip='per_expert' clips each expert's slice of a "
                "tensor [E, ...]. Use expert_clip='per_tensor', or pass batched expert tensors only."
            )
    for tensor in held:
        if is_released(tensor) and mode.in_backward != "none":
            raise ValueError(messages.released_already(all_names.get(id(tensor), "A tensor")))
    if mode.granularity == "expert":
        # Of an optimizer made of two, the one that holds a tensor counts: 2-D biases of experts may be the dense one's.
        sliced = [tensor for tensor in held if mode.steps_in_backward(id(tensor) in expert_ids)]
        unfit = [owner for owner in (owner_of(optimizer, tensor) for tensor in sliced) if not is_element_wise(owner)]
        if unfit:
            raise ValueError(
                f"mode {mode_name(mode)!r} updates each expert's slice on its own, which equals updating the tensor "
                f"only for element-wise optimizers; {type(unfit[0]).__name__} is not known to be one. Use "
                "mode='sonar', or set `element_wise = True` on the optimizer if it is."
            )
    if mode.in_backward != "none":
        check_steppable(optimizer)
        check_memory(optimizer, lambda tensor: mode.steps_in_backward(id(tensor) in expert_ids), all_names)
        warn_of_whole_compile(tensors)
    if expert_state_device is not None:
        check_streamable(optimizer)
    handle = InBackward(
        optimizer,
        tensors if isinstance(tensors, ExpertTensors) else experts,
        mode=mode,
        names=all_names,
        accumulation=accumulation,
        guard=NonfiniteGuard(on_nonfinite, check),
        measure_norms=measure_norms,
        offload=expert_state_device is not None,
    )
    handle.attach(optimizer)
    if handle.host_states is not None:
        handle.host_states.init()
    return handle


def _named(tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, Tensor]:
    if isinstance(tensors, Mapping):
        return {str(name): tensor for name, tensor in tensors.items()}
    return {f"tensor {index} {list(tensor.shape)}": tensor for index, tensor in enumerate(tensors)}
