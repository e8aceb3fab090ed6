"""The peak of a training step before it runs: `plan_memory`.

The step is the real one, on fake tensors; see `simulate`. What remains to be modelled (expert kernels that cannot run
here, what the caching allocator reserves, several ranks) says so in the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_sonar import models
from lightning_sonar.experts import NoExpertsError, find_expert_tensors
from lightning_sonar.language_model import LanguageModel, Loss, OptimizerFactory
from lightning_sonar.memory.backend_models import MODELLED, use_model_of
from lightning_sonar.memory.ledger import OTHER, Ledger
from lightning_sonar.memory.optimizer_models import is_modelled, label_of, note_of, with_models
from lightning_sonar.memory.plan_checks import check_arguments
from lightning_sonar.memory.report import (
    DENSE_GRADIENTS,
    EXPERT_GRADIENTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    MemoryReport,
    report_of,
)
from lightning_sonar.memory.reserved import reserved_bytes
from lightning_sonar.memory.simulate import CUDA_ROUNDING, simulate_step
from lightning_sonar.modes import Mode, mode_name, resolve_mode
from lightning_sonar.optim import FusedAdamW
from lightning_sonar.strategies import SonarMoEStrategy

PRECISIONS = {
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.float32,
    "32": torch.float32,
    "32-true": torch.float32,
}
"""The dtype of parameters under each of Lightning's precisions that the strategies take."""


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of one training step, in bytes.

    Attributes:
        model: name of the model.
        size: ``tiny``, ``full``, or ``""`` for a module of the caller's.
        mode: name of the mode.
        backend: the expert kernel; ends in ``(model)`` where its allocations are modelled.
        optimizer: class of the optimizer; ends in ``(model)`` where what it allocates is modelled.
        batch_size: sequences in a microbatch.
        seq_len: tokens in a sequence.
        checkpointing: whether decoder layers are checkpointed.
        loss: ``full`` or ``chunked`` cross-entropy.
        precision: Lightning's precision.
        peak_bytes: most bytes alive at once, rounded as the device's allocator rounds each storage.
        peak_phase: the phase of the peak: ``forward``, ``backward``, ``clip``, ``step`` or ``done``.
        peak_op: the operation that reached it.
        split: bytes at the peak: ``parameters``, ``optimizer_state``, ``expert_gradients``, ``dense_gradients``,
            ``activations`` (born in forward) and ``temporaries`` (born later). Sums to the peak.
        peak_expert_grads: expert tensors whose gradient was alive at the same time, at most.
        reserved_bytes: an estimate of what the caching allocator reserves for this step.
        model_id: checkpoint or folder of an ``hf`` model.
        num_layers: number of decoder layers, if it was given.
        accumulate_grad_batches: microbatches of a step.
        params_total: number of parameters.
        params_expert: number of parameters in expert tensors.
        largest_unit_bytes: bytes of the parameters of the largest experts module.
        curve: ``position``, ``live_bytes`` and ``sharded_bytes`` (parameters, states, gradients), equally long: live
            memory over the step. A position is the number of
            the phase (forward 0, backward 1, clip 2, step and after it 3) plus the share of its events that have
            happened.
        notes: what is modelled.
        accumulation: how gradients of several microbatches are summed; see `release_in_backward`.
        expert_state_device: ``"cpu"`` if states of expert tensors are kept in host memory.
        host_bytes: most bytes alive at once in host memory, in none of the other figures.
    """

    model: str
    size: str
    mode: str
    backend: str
    optimizer: str
    batch_size: int
    seq_len: int
    checkpointing: bool
    loss: str
    precision: str
    peak_bytes: int
    peak_phase: str
    peak_op: str
    split: dict[str, int]
    peak_expert_grads: int
    reserved_bytes: int
    model_id: str | None
    num_layers: int | None
    accumulate_grad_batches: int
    params_total: int
    params_expert: int
    largest_unit_bytes: int
    curve: dict[str, list[float]] = field(repr=False)
    notes: tuple[str, ...] = ()
    accumulation: str = "exact"
    expert_state_device: str | None = None
    host_bytes: int = 0

    def per_rank_bytes(self, ranks: int) -> int:
        """Peak of each of ``ranks`` ranks under FSDP2, by arithmetic on this plan: an estimate, not a simulation.

        Parameters, states and gradients are divided; activations are each rank's own, for a microbatch of this size.
        One experts module is gathered while it runs, the next one meanwhile, and one's gradient is whole until it is
        reduced.
        """
        if ranks < 1:
            raise ValueError(f"ranks={ranks}: expected at least 1.")
        if ranks == 1:
            return self.peak_bytes
        moments = zip(self.curve["live_bytes"], self.curve["sharded_bytes"], strict=True)
        peak = max(sharded / ranks + (live - sharded) for live, sharded in moments)
        return int(peak) + 3 * self.largest_unit_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the curve left out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "curve"}
        return values | {"notes": list(self.notes)}


def plan_memory(
    model: str | Callable[[], pl.LightningModule] = "olmoe",
    *,
    mode: str | Mode = "sonar",
    batch: Mapping[str, Any] | None = None,
    size: models.Size = "full",
    backend: str = "grouped_mm",
    optimizer: OptimizerFactory | None = None,
    batch_size: int = 2,
    seq_len: int = 256,
    padding: bool = True,
    checkpointing: bool = False,
    loss: Loss = "full",
    precision: str = "bf16-true",
    gradient_clip_val: float | None = 1.0,
    accumulate_grad_batches: int = 1,
    strategy: Callable[[], SonarMoEStrategy] | None = None,
    rounding: int = CUDA_ROUNDING,
    model_id: str | None = None,
    num_layers: int | None = None,
    router_aux_loss: float = 0.0,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    **overrides: Any,
) -> MemoryPlan:
    """Predict the peak memory of a training step without allocating it; about 3 seconds for OLMoE-1B-7B.

    Args:
        model: a name that `models.build` knows (``"hf"`` with ``model_id`` needs only the configuration), or a
            function that makes a LightningModule whose parameters have the dtype they train in.
        mode: a named mode, or a `Mode`.
        batch: for a module of one's own: a batch of the true shapes, on the CPU; its values do not matter.
        size: ``"full"`` or ``"tiny"``.
        backend: an expert kernel of transformers' dispatch, or one that is modelled: ``"sonicmoe"``.
        optimizer: makes the optimizer from the parameters; None is `FusedAdamW`. For a named model only.
        batch_size: sequences in a microbatch.
        seq_len: tokens in a sequence.
        padding: whether sequences are padded, so that an attention mask ``[B, 1, T, T]`` is built.
        checkpointing: activation checkpointing of the decoder layers.
        loss: ``"full"`` or ``"chunked"`` cross-entropy.
        precision: ``"bf16-true"``, ``"bf16-mixed"`` or ``"32"``.
        gradient_clip_val: the Trainer's; not used in a mode that clips nothing.
        accumulate_grad_batches: the Trainer's.
        strategy: makes the strategy, if its other arguments matter; ``mode`` is then taken from it.
        rounding: bytes to a multiple of which storages are rounded up; 1 is exact, as on a CPU.
        model_id: for ``"hf"``: a hub id or a local folder with a ``config.json``.
        num_layers: number of decoder layers, if not the model's own.
        router_aux_loss: weight of the router's load-balancing loss.
        attn_implementation: transformers' attention implementation.
        trust_remote_code: whether code beside the configuration may run.
        overrides: further values of the model's configuration.

    Returns:
        The plan. Fake tensors live on the CPU, so kernels are those of the CPU where a device chooses; what a kernel
        takes and gives back inside one operation is not seen.

    Raises:
        TypeError: for a module in place of a function that makes one.
        ValueError: for a precision, model or mode that does not exist, or a number below 1.
        RuntimeError: if the step reads values for which there is no stand-in; see `stand_ins`.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: expected one of {', '.join(PRECISIONS)}.")
    check_arguments(
        model,
        batch,
        {"batch_size": batch_size, "seq_len": seq_len, "accumulate_grad_batches": accumulate_grad_batches},
        {"backend": backend, "optimizer": optimizer, "checkpointing": checkpointing, "loss": loss},
    )
    made = SonarMoEStrategy(mode=resolve_mode(mode)) if strategy is None else strategy()
    resolved = made.mode
    notes: list[str] = []
    label = backend
    if backend in MODELLED:
        label = use_model_of(backend)
        notes.append(f"backend {backend} is modelled by what its forward and backward allocate")
    make_optimizer = with_models(optimizer or functools.partial(FusedAdamW, lr=1e-5))
    found: dict[str, Any] = {}

    def build() -> pl.LightningModule:
        if callable(model):
            module = model()
        else:
            network = models.build(
                model,
                size,
                num_layers=num_layers,
                model_id=model_id,
                backend=label,
                dtype=PRECISIONS[precision],
                checkpointing=checkpointing,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                **overrides,
            )
            module = LanguageModel(network, _noting(make_optimizer, found), router_aux_loss=router_aux_loss, loss=loss)
        found.update(_counts(module))
        return module

    ledger = simulate_step(
        build,
        lambda: _fake(batch) if batch is not None else language_batch(batch_size, seq_len, padding),
        strategy=made,
        rounding=rounding,
        num_experts=lambda module: found["number"],
        gradient_clip_val=gradient_clip_val if resolved.clip != "none" else None,
        accumulate_grad_batches=accumulate_grad_batches,
        precision=precision,
    )
    report = report_of(ledger, device="planned")
    return MemoryPlan(
        model=model if isinstance(model, str) else "module",
        size=size if isinstance(model, str) else "",
        mode=mode_name(resolved),
        backend=label,
        optimizer=found.get("optimizer", "the module's"),
        batch_size=batch_size,
        seq_len=seq_len,
        checkpointing=checkpointing,
        loss=loss,
        precision=precision,
        peak_bytes=report.peak_bytes,
        peak_phase=report.peak_phase,
        peak_op=report.peak_op,
        split=split_of(ledger),
        peak_expert_grads=report.peak_expert_gradients,
        reserved_bytes=reserved_bytes(ledger),
        model_id=model_id,
        num_layers=num_layers,
        accumulate_grad_batches=accumulate_grad_batches,
        params_total=found["total"],
        params_expert=found["experts"],
        largest_unit_bytes=found["unit"],
        curve=_curve(ledger, report),
        notes=(*notes, *([found["note"]] if "note" in found else [])),
        accumulation=made.accumulation,
        expert_state_device=made.expert_state_device,
        host_bytes=report.host_bytes,
    )


def _counts(module: nn.Module) -> dict[str, int]:
    """Parameters in all and in experts, bytes of the largest experts module, and the number of experts."""
    total = sum(parameter.numel() for parameter in module.parameters())
    try:
        experts = find_expert_tensors(module)
    except NoExpertsError:
        return {"total": total, "experts": 0, "unit": 0, "number": 1}
    units: dict[str, int] = {}
    for name, tensor in experts.items():
        owner = name.rpartition(".")[0]
        units[owner] = units.get(owner, 0) + tensor.numel() * tensor.element_size()
    number = max(tensor.shape[0] for tensor in experts.values())
    return {"total": total, "experts": experts.numel, "unit": max(units.values()), "number": number}


def language_batch(batch_size: int, seq_len: int, padding: bool = True) -> dict[str, Any]:
    """A batch for `LanguageModel`, int64 ``[B, T]`` each; to be called under a fake mode."""
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.int64)
    mask = torch.ones_like(tokens) if padding else None
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.zeros_like(tokens)}


def split_of(ledger: Ledger) -> dict[str, int]:
    """Bytes at the peak by what they hold; what has no label is an activation if it was born in forward."""
    event = ledger.peak_event
    at_peak = ledger.breakdown_at(event)
    split = {name: at_peak.get(name, 0) for name in (PARAMETERS, OPTIMIZER_STATE, EXPERT_GRADIENTS, DENSE_GRADIENTS)}
    others = ledger.split_at(event, OTHER)
    split["activations"] = others.pop("forward", 0)
    split["temporaries"] = sum(others.values())
    return split


# What follows the step is that its gradients go.
_PHASES = {"forward": 0, "backward": 1, "clip": 2, "step": 3, "done": 3}


def _curve(ledger: Ledger, report: MemoryReport) -> dict[str, list[float]]:
    bounds: dict[int, tuple[int, int]] = {}
    for span in ledger.spans:
        number = _PHASES[span.phase]
        start, end = bounds.get(number, (max(span.start, ledger.first_event), span.end))
        bounds[number] = (min(start, span.start) if number else start, max(end, span.end))
    positions: list[float] = []
    live: list[float] = []
    held: list[float] = []
    labels = (PARAMETERS, OPTIMIZER_STATE, EXPERT_GRADIENTS, DENSE_GRADIENTS)
    sums = [sum(values) for values in zip(*(report.timeline["by_label"][label] for label in labels), strict=True)]
    for event, level, sharded in zip(report.timeline["event"], report.timeline["live_bytes"], sums, strict=True):
        for number, (start, end) in bounds.items():
            if start <= event < end:
                positions.append(round(number + (event - start) / (end - start), 5))
                live.append(level)
                held.append(sharded)
                break
    return {"position": positions, "live_bytes": live, "sharded_bytes": held}


def _fake(batch: Any) -> Any:
    """A batch of the same shapes on fake tensors."""
    if isinstance(batch, torch.Tensor):
        return torch.empty(batch.shape, dtype=batch.dtype)
    if isinstance(batch, Mapping):
        return {key: _fake(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_fake(value) for value in batch)
    return batch


def _noting(make: OptimizerFactory, found: dict[str, Any]) -> OptimizerFactory:
    def noting(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        found["optimizer"] = label_of(optimizer)
        if is_modelled(optimizer):
            found["note"] = note_of(optimizer)
        group = optimizer.param_groups[0]
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            found["note"] = (
                f"{type(optimizer).__name__} is planned tensor by tensor, as on a CPU; on a GPU torch's default is "
                "foreach, whose temporaries are as large as all gradients: pass fused=True, or plan foreach=True"
            )
        return optimizer

    return noting
