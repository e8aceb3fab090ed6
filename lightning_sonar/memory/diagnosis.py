"""Measure what is alive when a run has gone out of memory, for `out_of_memory` to reckon with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from lightning_sonar.in_backward import InBackward
from lightning_sonar.memory.ledger import OTHER, Ledger
from lightning_sonar.memory.out_of_memory import Alive, Needs, OutOfMemory, allocated, asked_for, failure
from lightning_sonar.memory.sizing import memory_there

FROM_ALLOCATOR = "what PyTorch's allocator had given out, minus the others"
FROM_TRACKER = "all other storages, by the storage tracker"
FROM_PROCESS = "the process's resident memory minus the others, so Python itself is in it"


def diagnose(
    error: BaseException,
    *,
    module: nn.Module,
    optimizers: Collection[torch.optim.Optimizer],
    device: torch.device,
    experts: Collection[int],
    engine: InBackward | None = None,
    phase: str = "",
    step: int = 0,
    accumulating: bool = False,
    ledger: Ledger | None = None,
    resident_bytes: int = 0,
) -> OutOfMemory:
    """What there was and what would have fitted; call it while the exception's frames are still alive.

    What was in flight inside the failed operation is gone by now, except in the figure that a CUDA exception gives.

    Args:
        error: the exception.
        module: its parameters and gradients are counted.
        optimizers: their state is counted.
        device: the device that ran out.
        experts: ``id`` of each expert tensor.
        engine: the handle of a Sonar-MoE strategy; None in plain Lightning.
        phase: where the step was.
        step: which optimizer step of the fit it was.
        accumulating: whether gradients are summed over several backwards.
        ledger: the book of the step under watch, if it was watched.
        resident_bytes: `resident_memory` when the step began; used on a CPU without a ledger.
    """
    text = str(error)
    parameters = [p for p in module.parameters() if _is_on(p, device)]
    trained = [p for p in parameters if p.requires_grad]
    gradients = [p for p in trained if p.grad is not None]
    of_experts = [p for p in trained if id(p) in experts]
    dense = [p for p in trained if id(p) not in experts]
    there, in_the_end = _states(optimizers, device)
    known = Alive(
        parameters=storage_bytes(parameters),
        optimizer_state=there,
        expert_gradients=storage_bytes(p.grad for p in gradients if id(p) in experts),
        dense_gradients=storage_bytes(p.grad for p in gradients if id(p) not in experts),
        rest=0,
        rest_source="",
    )
    total, source, capacity = _total(known.total, text, device, ledger)
    alive = Alive(**(vars(known) | {"rest": max(0, total - known.total), "rest_source": source}))

    asked, asked_gradient, added = asked_for(text), False, 0
    if asked is not None:
        waiting = [tensor_bytes(p) for p in trained if p.grad is None]
        margin = asked[1] + (512 if device.type == "cuda" else 0)
        asked_gradient = phase == "backward" and any(abs(size - asked[0]) <= margin for size in waiting)
        # A gradient that was to come counts among the gradients.
        added = 0 if asked_gradient else asked[0]
    # When the step began there were no activations and, but for plain Lightning, no gradients.
    process = resident_bytes - known.parameters - known.optimizer_state
    needs = Needs(
        parameters=alive.parameters,
        states=in_the_end,
        expert_gradients=sum(map(tensor_bytes, of_experts)),
        dense_gradients=sum(map(tensor_bytes, dense)),
        largest_expert_gradient=max(map(tensor_bytes, of_experts), default=0),
        largest_dense_gradient=max(map(tensor_bytes, dense), default=0),
        rest=alive.rest + added,
        process=max(0, min(process, alive.rest)) if source == FROM_PROCESS else 0,
    )
    return failure(
        error,
        needs,
        alive,
        capacity=capacity,
        mode=None if engine is None else engine.mode,
        accumulating=accumulating and (engine is None or engine.accumulation == "exact"),
        asked=None if asked is None else asked[0],
        asked_gradient=asked_gradient,
        device=str(device),
        phase=phase,
        step=step,
    )


def resident_memory(device: torch.device) -> int:
    """Resident bytes of this process; 0 on anything but a CPU."""
    return psutil.Process().memory_info().rss if device.type == "cpu" else 0


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind some tensors, each storage once; of a DTensor the part of this rank."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = _local(tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of one tensor's elements; of a DTensor the part of this rank."""
    local = _local(tensor)
    return local.numel() * local.element_size()


def _total(known: int, text: str, device: torch.device, ledger: Ledger | None) -> tuple[int, str, int]:
    """Bytes alive at the failure, where that figure is from, and what there is in all."""
    if device.type == "cuda":
        now = torch.cuda.memory_allocated(device)
        return max(known, allocated(text) or now), FROM_ALLOCATOR, _cuda_capacity(device)
    room = max(0, _room_on_cpu())
    if ledger is not None and ledger.events:
        event = ledger.events - 1
        # Storages died while the exception unwound; the last birth is as near to the failure as the book comes.
        while event > 0 and not ledger.op_at(event):
            event -= 1
        total = known + ledger.breakdown_at(event).get(OTHER, 0)
        # Not everything that died has gone back to the system, but what was alive has fitted.
        return total, FROM_TRACKER, max(total, ledger.live_bytes + room)
    resident = psutil.Process().memory_info().rss
    return resident, FROM_PROCESS, resident + room


def _cuda_capacity(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    # What the allocator holds is this process's, whether in use or not; a user may have set a fraction.
    share = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + torch.cuda.memory_reserved(device), share)


def _room_on_cpu() -> int:
    room = memory_there(torch.device("cpu"))
    try:
        import resource
    except ImportError:  # not on Windows
        return room
    memory = psutil.Process().memory_info()
    for limit, used in ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, getattr(memory, "data", 0))):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            room = min(room, soft - used)
    return room


def _states(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> tuple[int, int]:
    """Bytes of optimizer state now, and once each trained tensor has been stepped."""
    there: list[Tensor] = []
    missing: list[tuple[Tensor, Mapping[str, Any]]] = []
    stepped = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = [v for v in optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor)]
                if state:
                    there += [value for value in state if _is_on(value, device)]
                    stepped += tensor_bytes(parameter)
                elif parameter.requires_grad and _is_on(parameter, device):
                    missing.append((parameter, group))
    now = storage_bytes(there)
    coming = sum(
        # As much for each byte as the stepped tensors have.
        tensor_bytes(parameter) * (now / stepped if stepped else _moments(group))
        for parameter, group in missing
    )
    return now, now + int(coming)


def _moments(group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size its optimizer will keep, by the settings that such optimizers have."""
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return 1 if group.get("momentum") else 0


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
