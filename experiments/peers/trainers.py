"""Lightning's own Trainer, with plain AdamW and with this project's strategies, on one ordinary LightningModule."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from experiments.measuring import loss_of
from experiments.peers.base import EIGHT_BIT, Batch, Observer, Plan, Recipe, trained
from lightning_sonar import optim
from lightning_sonar.optim.states import state_tensors
from lightning_sonar.strategies import SonarMoEStrategy


class PlainLightning(Recipe):
    """``L.Trainer`` and ``torch.optim.AdamW(fused=True)``. Gradients live until after the next forward."""

    name = "lightning"
    label = "Lightning, torch AdamW(fused=True)"

    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1.0, fused=True)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer that the module hands to Lightning."""
        return self.ordinary(parameters)

    def strategy(self) -> Any:
        """What the Trainer is given as its strategy."""
        return "auto"

    def train(self, model: nn.Module, plan: Plan, observer: Observer) -> None:
        counts = {len(microbatches) for microbatches in plan.steps}
        if len(counts) != 1:
            raise ValueError(f"Steps of {sorted(counts)} microbatches: Lightning wants the same number in each.")
        each = counts.pop()
        flat = [batch for microbatches in plan.steps for batch in microbatches]
        dtype = next(model.parameters()).dtype
        with _quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*treespec, LeafSpec.*", FutureWarning)
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            # Advice of this project's on accumulation, and on exact clipping without a value, both of them meant.
            warnings.filterwarnings("ignore", "Gradients are accumulated over several backwards.*")
            warnings.filterwarnings("ignore", "expert_clip='exact' has nothing to clip to.*")
            trainer = L.Trainer(
                accelerator="cpu",
                devices=1,
                strategy=self.strategy(),
                precision="bf16-true" if dtype == torch.bfloat16 else "32-true",
                gradient_clip_val=plan.max_norm,
                accumulate_grad_batches=each,
                # A resumed training goes on with the epoch after the one it has saved.
                max_epochs=1 if plan.resume_from is None else 2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[_Watch(observer, each, plan)],
            )
            module = _Module(model, self.optimizer, plan)
            loader = DataLoader(_Batches(flat), batch_size=None, shuffle=False)
            # The file is this process's own.
            trainer.fit(module, loader, ckpt_path=plan.resume_from, weights_only=False)


class Sonar(PlainLightning):
    """The same Trainer and module with `SonarMoEStrategy` in one of its modes, and `FusedAdamW`."""

    def __init__(self, mode: str) -> None:
        self.mode = self.name = mode
        self.label = f"lightning_sonar, {mode}"
        self.clips = mode != "in_backward_all"

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return optim.FusedAdamW(parameters, lr=1.0)

    def strategy(self) -> Any:
        return SonarMoEStrategy(mode=self.mode)


ON_FP32_COPIES = "on a CPU it steps fp32 copies of the tensor, which are not seen: the peak is a lower bound"
"""What a reader must know of the figures of bitsandbytes' optimizers."""


class SonarLowBit(Sonar):
    """Mode sonar with an 8-bit optimizer of `lightning_sonar.optim`."""

    state = EIGHT_BIT

    def __init__(self, factory: str, package: str, name: str, note: str) -> None:
        super().__init__("sonar")
        self.name = name
        self.note = note
        self.label = f"lightning_sonar, sonar, {package} AdamW 8 bit"
        self._factory = factory
        self.package = self.module = package

    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(optim, self._factory)(parameters, lr=1.0, watch_every=0)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self.ordinary(parameters)


class _Module(L.LightningModule):
    """An ordinary module, in automatic optimization; it knows nothing of how it is trained."""

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], plan: Plan) -> None:
        super().__init__()
        self.model = model
        self.make = optimizer
        self.rate = plan.rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(trained(self.model))
        return [optimizer], [{"scheduler": LambdaLR(optimizer, self.rate), "interval": "step"}]


class _Watch(L.Callback):
    """Tells the observer of each step, and saves when training ends."""

    def __init__(self, observer: Observer, each: int, plan: Plan) -> None:
        self.observer = observer
        self.each = each
        self.plan = plan

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % self.each == 0:
            self.observer.begin(pl_module, self._states(trainer), [batch])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.each == 0:
            self.observer.end()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.plan.save_to is not None:
            trainer.save_checkpoint(self.plan.save_to)

    def _states(self, trainer: L.Trainer) -> Iterator[Tensor]:
        for optimizer in trainer.optimizers:
            yield from state_tensors(optimizer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's lines about devices."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Batches(Dataset[Batch]):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]
