"""A training step on fake tensors: the real `Trainer.fit`, hooks and optimizer, with nothing allocated.

Fake tensors have shapes, dtypes and storages that are born and die, and no memory behind them. So the step that is
simulated is the step that will run, not a second description of it, and the tracker that measures real runs books
this one.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_sonar.experts import NoExpertsError, find_expert_tensors
from lightning_sonar.memory.ledger import Ledger
from lightning_sonar.memory.watch import Watch

CUDA_ROUNDING = 512
"""Bytes to a multiple of which PyTorch's CUDA caching allocator rounds each allocation."""

aten = torch.ops.aten


class SimulationMode(FakeTensorMode):
    """Fake tensors that answer what a training step asks of values.

    A truth value read from a tensor is False, a whole number 0, any other number 1 (a count of steps is divided by).
    Routing is uniform: every expert has tokens, each the same share.

    Args:
        num_experts: experts of a layer, where a model asks which have tokens, and which tokens are one expert's.
    """

    def __init__(self, num_experts: int = 1) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.num_experts = num_experts

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        if func is aten.nonzero.default:
            # A list of experts that have tokens: all of them, but not the place that stands for none. A table of who
            # goes to one expert: its share.
            mask = args[0]
            count = mask.numel()
            hits = min(count, self.num_experts) if mask.dim() == 1 else math.ceil(count / self.num_experts)
            return mask.new_empty((hits, mask.dim()), dtype=torch.int64)
        if func is aten._grouped_mm.default and args[0].dtype == torch.float32:
            # Its fake version knows bfloat16 only; the output is laid out the same.
            narrow = [value.to(torch.bfloat16) if _is_fp32(value) else value for value in args]
            product: Any = super().__torch_dispatch__(func, types, tuple(narrow), kwargs or {})
            return product.to(torch.float32)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _is_fp32(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


class Batches:
    """One batch, given out a number of times. A DataLoader would read values, which fake tensors have not."""

    def __init__(self, batch: Any, number: int) -> None:
        self.batch, self.number = batch, number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.number):
            yield self.batch


class _SecondStep(pl.Callback):
    """Watches the second optimizer step: in the first one some optimizers have no state yet."""

    def __init__(self, rounding: int) -> None:
        self.rounding = rounding
        self.watch: Watch | None = None
        self.ended = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 1 and not self.ended:
            if self.watch is None:
                engine = getattr(trainer.strategy, "in_backward", None)
                self.watch = Watch(trainer, pl_module, _expert_ids(engine, pl_module), rounding=self.rounding)
                if engine is not None:
                    engine.observers.append(self)
            self.watch.begin(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.watch is not None and not self.ended:
            self.watch.end()
            self.ended = trainer.global_step >= 2

    def on_phase(self, phase: str) -> None:
        if self.watch is not None and not self.ended:
            if phase in ("clip", "step", "done"):
                self.watch.label_gradients()
            self.watch.mark(phase)

    def on_gradient(self, tensor: Tensor) -> None:
        if self.watch is not None and not self.ended:
            self.watch.label_gradient(tensor)


def _expert_ids(engine: Any, module: pl.LightningModule) -> set[int]:
    if engine is not None:
        return {id(tensor) for tensor in engine.experts.values()}
    try:
        return {id(tensor) for tensor in find_expert_tensors(module).tensors}
    except NoExpertsError:
        return set()


def simulate_step(
    build: Callable[[], pl.LightningModule],
    make_batch: Callable[[], Any],
    *,
    strategy: Strategy,
    rounding: int = CUDA_ROUNDING,
    num_experts: Callable[[pl.LightningModule], int] | None = None,
    accumulate_grad_batches: int = 1,
    **trainer_options: Any,
) -> Ledger:
    """Fit for two optimizer steps on fake tensors and return the book of the second.

    Args:
        build: makes the module, with its parameters in the dtype they train in; called under the fake mode.
        make_batch: makes a batch of the true shapes; called under the fake mode.
        strategy: the strategy to fit with; must be new.
        rounding: storages are rounded up to a multiple of this many bytes; 1 is exact, as on a CPU.
        num_experts: from the module, experts of a layer; None means 1.
        accumulate_grad_batches: batches of one optimizer step.
        trainer_options: further arguments of the Trainer, such as ``gradient_clip_val`` and ``precision``.

    Returns:
        The ledger of the second step, phases marked and storages labelled. Nothing was allocated.

    Raises:
        RuntimeError: if the step ran no backward.
    """
    mode = SimulationMode()
    watcher = _SecondStep(rounding)
    # A fit switches gradients on; whoever asks for a plan may have them off.
    with _quietly(), torch.inference_mode(False), torch.enable_grad(), mode:
        module = build()
        if num_experts is not None:
            mode.num_experts = num_experts(module)
        stubs = _stub(module)
        try:
            _fit(module, make_batch(), strategy, watcher, accumulate_grad_batches, trainer_options)
        finally:
            for name in stubs:
                object.__delattr__(module, name)
    if watcher.watch is None or not watcher.watch.saw_backward:
        raise RuntimeError(
            "The simulated step ended without a backward, so there is no peak to tell: the module's training step left "
            "it out. Numbers read from fake tensors are stand-ins (a truth value is False); let the step that is "
            "planned not depend on them."
        )
    watcher.watch.close()
    return watcher.watch.tracker.ledger


def _stub(module: pl.LightningModule) -> list[str]:
    """Take away what fake tensors cannot do and a plan does not need; returns the names."""

    def stay(*args: Any, **kwargs: Any) -> pl.LightningModule:
        return module

    def silent(*args: Any, **kwargs: Any) -> None:
        return None

    # Fake parameters cannot be moved. Logging copies tensors through their storage; what is logged are single numbers.
    stubs: dict[str, Any] = {"to": stay, "cpu": stay, "cuda": stay, "log": silent, "log_dict": silent}
    for name, stub in stubs.items():
        object.__setattr__(module, name, stub)
    return list(stubs)


def _fit(
    module: pl.LightningModule,
    batch: Any,
    strategy: Strategy,
    watcher: pl.Callback,
    accumulate_grad_batches: int,
    options: dict[str, Any],
) -> None:
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=2,
        accumulate_grad_batches=accumulate_grad_batches,
        callbacks=[watcher],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(module, Batches(batch, 2 * accumulate_grad_batches))


@contextmanager
def _quietly() -> Iterator[None]:
    """Nothing that a simulated fit says about devices, loaders or logging concerns the user."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    loggers.append(logging.getLogger("lightning.pytorch.utilities.rank_zero"))
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
