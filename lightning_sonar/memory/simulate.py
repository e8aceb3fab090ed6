"""A training step on fake tensors: the real `Trainer.fit`, hooks and optimizer, with nothing allocated.

Fake tensors have shapes, dtypes and storages that are born and die, and no memory behind them. So the step that is
simulated is the step that will run, not a second description of it, and the tracker that measures real runs books
this one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_sonar.experts import NoExpertsError, find_expert_tensors
from lightning_sonar.memory.ledger import Ledger
from lightning_sonar.memory.stand_ins import copy_fake, explained, holds, number_of, stand_in, users_line
from lightning_sonar.memory.watch import Watch

CUDA_ROUNDING = 512
"""Bytes to a multiple of which PyTorch's CUDA caching allocator rounds each allocation."""

aten = torch.ops.aten


class SimulationMode(FakeTensorMode):
    """Fake tensors that answer what a training step asks of values.

    A truth value read from a tensor is False (True if it says that numbers are finite), a whole number 0, any other
    number 1; constants are what they are. Routing is uniform: every expert has tokens, each the same share. What else
    depends on values is in `stand_ins`.

    Args:
        num_experts: experts of a layer, where a model asks which have tokens, and which tokens are one expert's.
        plans_cpu: whether the step would run on a CPU; what has a kernel of its own on a GPU asks for it.
    """

    def __init__(self, num_experts: int = 1, plans_cpu: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.num_experts = num_experts
        self.plans_cpu = plans_cpu
        self.last_read: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            self.last_read = users_line() or self.last_read
            return number_of(args[0])
        answer = stand_in(func, args)
        if answer is not None:
            with self:
                return answer(self.num_experts, *args, **(kwargs or {}))
        if func is aten._grouped_mm.default and args[0].dtype == torch.float32:
            # Its fake version knows bfloat16 only; the output is laid out the same.
            narrow = [value.to(torch.bfloat16) if _is_fp32(value) else value for value in args]
            product: Any = super().__torch_dispatch__(func, types, tuple(narrow), kwargs or {})
            return product.to(torch.float32)
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if isinstance(result, FakeTensor) and result.dtype == torch.bool and holds(func, args):
            result.holds = True  # type: ignore[attr-defined]
        return result


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

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # They wait for metrics of a validation that there is not, and take no memory.
        if pl_module.automatic_optimization:
            kept = [config for config in trainer.strategy.lr_scheduler_configs if not config.reduce_on_plateau]
            trainer.strategy.lr_scheduler_configs = kept

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
        RuntimeError: if the step ran no backward, or reads values for which there is no stand-in.
    """
    mode = SimulationMode(plans_cpu=rounding == 1)
    watcher = _SecondStep(rounding)
    # A fit switches gradients on; whoever asks for a plan may have them off.
    with _quietly(), _copies(), torch.inference_mode(False), torch.enable_grad(), mode:
        module = build()
        if num_experts is not None:
            mode.num_experts = num_experts(module)
        stubs = _stub(module)
        try:
            _fit(module, make_batch(), strategy, watcher, accumulate_grad_batches, trainer_options)
        except Exception as error:
            better = explained(error, mode.last_read)
            if better is error:
                raise
            raise better from error
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

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        # Logged are single numbers; what else may read them reads them here.
        one = value.detach() if isinstance(value, Tensor) else torch.ones(())
        module.trainer.callback_metrics[name] = one

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value)

    # Fake parameters cannot be moved, and Lightning's logging would average, synchronise and format what has no value.
    stubs: dict[str, Any] = {"to": stay, "cpu": stay, "cuda": stay, "log": log, "log_dict": log_dict}
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
def _copies() -> Iterator[None]:
    """Fake tensors can be deep-copied, as torchmetrics does with each state."""
    own = FakeTensor.__deepcopy__
    FakeTensor.__deepcopy__ = copy_fake  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.__deepcopy__ = own  # type: ignore[method-assign]


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
