"""Modules of a user's own are planned as they are; what cannot be planned is named with its line."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from helpers import FAMILY, AutomaticLM, small_model
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_sonar import FusedAdamW, MemoryProfiler, SonarMoEStrategy, models, plan_memory
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.memory.simulate import SimulationMode

IDS = torch.zeros(2, 32, dtype=torch.int64)
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}


def plan_of(kind: type[AutomaticLM]):
    def build() -> AutomaticLM:
        return kind(small_model(dtype=torch.bfloat16), functools.partial(FusedAdamW, lr=1e-3))

    return plan_memory(build, batch=BATCH)


class LogsMetrics(AutomaticLM):
    """torchmetrics objects as submodules, which copy their states and check values."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.mean = torchmetrics.MeanMetric()
        self.accuracy = MulticlassAccuracy(self.model.config.vocab_size)

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = logits.float().square().mean()
        self.mean(loss)
        self.accuracy(logits.detach().flatten(0, 1).float(), batch["labels"].flatten())
        self.log("mean", self.mean, on_epoch=True)
        self.log_dict({"accuracy": self.accuracy, "loss": loss})
        return loss


class ReadsTheLoss(AutomaticLM):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.isnan() or not torch.isfinite(loss) or not torch.isfinite(loss).all():
            raise ValueError("the loss is not finite")
        self.log("text", float(f"{loss.item():.3f}"))
        return loss


class SelectsByMasks(AutomaticLM):
    def training_step(self, batch, batch_idx):
        output = self.model(input_ids=batch["input_ids"], use_cache=False).logits
        answered = batch["labels"] != -100
        torch.masked_select(batch["labels"], answered)
        torch.unique(batch["labels"])
        torch.bincount(batch["labels"].flatten(), minlength=5)
        torch.repeat_interleave(batch["labels"][0], batch["labels"][1])
        assert not torch.equal(batch["labels"], batch["input_ids"])
        return torch.nn.functional.cross_entropy(output[answered].float(), batch["labels"][answered])


class WaitsForValidation(AutomaticLM):
    def configure_optimizers(self):  # type: ignore[override]
        optimizer = self.optimizer_factory(self.parameters())
        plateau = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


class ReadsWhatItLogged(AutomaticLM):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize("kind", [LogsMetrics, ReadsTheLoss, SelectsByMasks, WaitsForValidation, ReadsWhatItLogged])
def test_an_ordinary_module_is_planned_as_it_is(kind):
    plan = plan_of(kind)
    assert plan.peak_bytes > 3 * 2 * plan.params_total
    assert plan.peak_expert_grads == 1


def test_a_mask_selects_all_tokens_at_the_most():
    class OnlyAnswers(SelectsByMasks):
        pass

    class Everything(AutomaticLM):
        def training_step(self, batch, batch_idx):
            output = self.model(input_ids=batch["input_ids"], use_cache=False).logits.flatten(0, 1)
            rows = torch.arange(len(output))
            return torch.nn.functional.cross_entropy(output[rows].float(), batch["labels"].flatten()[rows])

    assert plan_of(OnlyAnswers).peak_bytes == pytest.approx(plan_of(Everything).peak_bytes, rel=0.01)


class CallsNumpy(AutomaticLM):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * batch["labels"].numpy().sum()


class ReadsALength(AutomaticLM):
    def training_step(self, batch, batch_idx):
        longest = int(batch["attention_mask"].sum(-1).max())
        return super().training_step({key: value[:, :longest] for key, value in batch.items()}, batch_idx)


def test_a_line_that_needs_values_is_named_with_a_way_out():
    with pytest.raises(RuntimeError, match="cannot be planned, because it reads values") as caught:
        plan_of(CallsNumpy)
    text = str(caught.value)
    assert "test_plan_modules.py" in text
    assert 'batch["labels"].numpy()' in text
    assert "leave it out in a subclass that is made for the plan" in text


def test_an_error_after_a_number_was_read_names_the_line_that_read_it():
    with pytest.raises(RuntimeError) as caught:
        plan_of(ReadsALength)
    (note,) = caught.value.__notes__
    line = ReadsALength.training_step.__code__.co_firstlineno + 1
    assert f"test_plan_modules.py:{line}" in note
    assert "take it from a shape" in note


def test_an_error_of_the_modules_own_stays_as_it_is():
    class Faulty(AutomaticLM):
        def training_step(self, batch, batch_idx):
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing") as caught:
        plan_of(Faulty)
    assert not getattr(caught.value, "__notes__", [])


def test_constants_are_read_as_they_are_and_what_is_finite_is_true():
    with SimulationMode():
        assert torch.tensor(3).item() == 3
        value = torch.empty(4)
        assert torch.isfinite(value).all()
        assert torch.isfinite(value.sum()) & torch.isfinite(value.max())
        assert not torch.isnan(value).any()
        assert not torch.isinf(value).any()
        assert not (value > 0).all()


def test_a_module_in_place_of_a_function_is_refused():
    module = AutomaticLM(small_model(), functools.partial(FusedAdamW, lr=1e-3))
    with pytest.raises(TypeError, match=r"plan_memory\(a AutomaticLM\): expected a function that makes the module"):
        plan_memory(module, batch=BATCH)  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["batch_size", "seq_len", "accumulate_grad_batches"])
@pytest.mark.parametrize("value", [0, -2, 1.5, True])
def test_a_number_that_counts_nothing_is_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=f"{argument}={value}: expected a whole number, at least 1"):
        plan_memory("olmoe", size="tiny", **{argument: value})  # type: ignore[arg-type]


def test_no_ranks_are_refused_by_name():
    with pytest.raises(ValueError, match="ranks=0: expected at least 1"):
        plan_memory("olmoe", size="tiny", num_layers=1, **FAMILY["olmoe"]).per_rank_bytes(0)


WIDE: dict[str, Any] = {**FAMILY["olmoe"], "hidden_size": 128, "intermediate_size": 128}


def planned(mode: str, rounding: int, stochastic: bool) -> int:
    optimizer = functools.partial(FusedAdamW, lr=1e-5, stochastic_rounding=stochastic)
    return plan_memory(
        "olmoe", size="tiny", mode=mode, num_layers=1, batch_size=2, seq_len=32, padding=False, rounding=rounding,
        optimizer=optimizer, **WIDE,
    ).peak_bytes  # fmt: skip


@pytest.mark.parametrize("mode", ["standard", "sonar"])
def test_stochastic_rounding_on_a_cpu_is_planned_with_its_temporaries(mode):
    ids = torch.randint(2, 90, (6, 32), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": i} for i in ids]
    profiler = MemoryProfiler(warmup=1, steps=1)
    trainer = L.Trainer(
        strategy=SonarMoEStrategy(mode=mode), accelerator="cpu", max_steps=2, precision="bf16-true",
        gradient_clip_val=1.0, callbacks=[profiler], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = models.build("olmoe", "tiny", num_layers=1, dtype=torch.bfloat16, **WIDE)
    optimizer = functools.partial(FusedAdamW, lr=1e-5, stochastic_rounding=True)
    trainer.fit(LanguageModel(model, optimizer), DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    assert profiler.report is not None
    assert profiler.report.peak_bytes == pytest.approx(planned(mode, 1, True), rel=0.01)
    assert planned(mode, 1, False) < 0.9 * planned(mode, 1, True)


def test_stochastic_rounding_on_a_gpu_takes_no_memory():
    assert planned("sonar", 512, True) == planned("sonar", 512, False)
