"""The LightningModule that the experiments train: a causal language model on instruction data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric
from torchmetrics.text import Perplexity

from lightning_sonar.data.packing import check_packing, packed_arguments, router_loss
from lightning_sonar.losses import IGNORED, response_cross_entropy, shift
from lightning_sonar.mixin import SonarMoEMixin
from lightning_sonar.optim.states import largest_update
from lightning_sonar.output_head import check_output_head, forward_with_loss
from lightning_sonar.router_load import watch_router_load

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Batch = Mapping[str, Tensor]
Loss = Literal["full", "chunked"]


class LanguageModel(SonarMoEMixin, L.LightningModule):
    """Trains a Hugging Face causal language model with manual optimization and in-backward updates.

    A batch holds int64 ``input_ids``, ``attention_mask`` and ``labels``, each ``[B, T]``; labels are aligned with the
    inputs and -100 where a token does not count. A packed one holds ``position_ids`` too (`lightning_sonar.data.pack`).

    Args:
        model: a causal language model whose output has ``.logits`` ``[B, T, V]``.
        optimizer: makes the optimizer from the parameters.
        scheduler: makes a learning-rate scheduler, stepped once a step; ``None`` for a constant rate.
        router_aux_loss: weight of the router's load-balancing loss; 0 leaves it out, as transformers does.
        settings: whatever the module was made from, in plain containers; stands in its checkpoints.
        loss: ``"full"`` computes the loss from the model's logits; ``"chunked"`` from the last hidden states, in
            chunks, so that the whole logits never exist (`lightning_sonar.chunked_loss`). They agree within rounding.

    Raises:
        ValueError: for an unknown ``loss``. On the first batch `lightning_sonar.output_head.OutputHeadError`, if
            ``loss="chunked"`` does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        router_aux_loss: float = 0.0,
        settings: Mapping[str, Any] | None = None,
        loss: Loss = "full",
    ) -> None:
        super().__init__()
        if loss not in get_args(Loss):
            raise ValueError(f"LanguageModel(loss={loss!r}): expected one of {', '.join(get_args(Loss))}.")
        # Plain containers: a configuration object in a checkpoint could not be loaded with weights_only.
        self.save_hyperparameters({"settings": dict(settings or {})}, logger=False)
        self.model = model
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler
        self.router_aux_loss = router_aux_loss
        self.loss_kind: Loss = loss
        self._head_checked = False
        self._packing_checked = False
        self._heldout: list[Metric] = []

    def forward(self, batch: Batch, **kwargs: Any) -> Any:
        # The cache would keep every layer's keys and values alive until the step ends.
        return self.model(input_ids=batch["input_ids"], use_cache=False, **packed_arguments(batch), **kwargs)

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy over the response tokens, and the router's auxiliary loss if asked for; 0-dim."""
        if not self.router_aux_loss:
            return self._run(batch)[1]
        output, loss, _ = self._run(batch, output_router_logits=True)
        return loss + self.router_aux_loss * router_loss(self.model, output, batch)

    def _run(self, batch: Batch, **kwargs: Any) -> tuple[Any, Tensor, Tensor]:
        """The model's output, the mean loss and the number of tokens it is the mean of."""
        self._check_head(batch)
        if self.loss_kind == "chunked":
            return forward_with_loss(self.model, lambda: self(batch, **kwargs), batch["labels"])
        output = self(batch, **kwargs)
        return output, *response_cross_entropy(output.logits, batch["labels"])

    def _check_head(self, batch: Batch) -> None:
        if "position_ids" in batch and not self._packing_checked:
            check_packing(self.model, len(batch["input_ids"]))
            self._packing_checked = True
        if self.loss_kind == "chunked" and not self._head_checked:
            check_output_head(self.model, batch["input_ids"])
            self._head_checked = True

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._check_head(batch)  # before the router's load is watched: its few tokens do not count
        logs = (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        with watch_router_load(self.model) if logs else nullcontext() as load:
            loss = self.loss(batch)
        if load is not None:
            # Of several ranks the mean of what each has seen of its own batch.
            self.log_dict({f"router/{name}": value for name, value in load.summary().items()}, sync_dist=True)
            for name in ("skipped_steps", "skipped_tensors"):
                self.log(name, float(getattr(self.in_backward, name)))
        return self.finish_step(loss)

    def finish_step(self, loss: Tensor) -> Tensor:
        """Backward, clip, step; then log. Returns the detached loss."""
        loss = self.sonar_step(loss)
        # The mean over the ranks: one number, sent in every step, since Lightning wants the same arguments every time.
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        norm = self.trainer.strategy.last_norm  # type: ignore[attr-defined]
        if norm is not None:
            self.log("clip_norm", norm.float())
        update = largest_update(self.trainer.optimizers[0])
        if update is not None:
            self.log("largest_update", update)
        return loss

    def on_validation_epoch_start(self) -> None:
        if self.loss_kind == "full":
            metrics: list[Metric] = [Perplexity(ignore_index=IGNORED)]
        else:
            # Summed loss and tokens. MeanMetric would do, but it drops NaN, or else (torchmetrics 1.9) its weights.
            metrics = [SumMetric(nan_strategy="disable"), SumMetric(nan_strategy="disable")]
        # No submodules: a module cast to bfloat16 would take the metrics' sums along, and round them away.
        self._heldout = [metric.set_dtype(torch.float32).to(self.device) for metric in metrics]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.loss_kind == "chunked":
            _, loss, tokens = self._run(batch)
            self._heldout[0].update(loss * tokens)
            self._heldout[1].update(tokens)
            return
        predicted, wanted = shift(self(batch).logits, batch["labels"])
        self._heldout[0].update(predicted.float(), wanted)

    def on_validation_epoch_end(self) -> None:
        found = [metric.compute() for metric in self._heldout]
        self._heldout.clear()
        # Perplexity is the exponential of the mean over all tokens, so its logarithm is the token-weighted loss.
        loss = found[0].log() if self.loss_kind == "full" else found[0] / found[1]
        self.log("heldout_loss", loss, prog_bar=True)
        self.log("heldout_perplexity", loss.exp() if self.loss_kind == "chunked" else found[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_factory(parameter for parameter in self.parameters() if parameter.requires_grad)
        if self.scheduler_factory is None:
            return optimizer
        scheduler = {"scheduler": self.scheduler_factory(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
