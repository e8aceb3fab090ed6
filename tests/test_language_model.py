from __future__ import annotations

import csv
import math

import pytest
import torch
from helpers import batches, fit, fused, loader, make_trainer, small_model
from lightning.pytorch.loggers import CSVLogger

from lightning_sonar import SonarMoEStrategy
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.losses import response_cross_entropy
from lightning_sonar.router_load import RouterLoad, watch_router_load


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heldout_loss_is_token_weighted_and_kept_in_float32(dtype):
    seen = []

    class Watched(LanguageModel):
        def forward(self, batch, **kwargs):
            output = super().forward(batch, **kwargs)
            seen.append(response_cross_entropy(output.logits, batch["labels"]))
            return output

    data = batches(4)
    for index, batch in enumerate(data):  # batches with different numbers of labelled tokens
        batch["labels"][:, : 3 + index] = -100
    trainer = make_trainer(SonarMoEStrategy(), precision={torch.float32: "32-true", torch.bfloat16: "bf16-true"}[dtype])
    metrics = trainer.validate(Watched(small_model(dtype=dtype), fused()), loader(data), verbose=False)[0]
    counts = [count.item() for _, count in seen]
    assert len(set(counts)) == 4
    mean = sum(loss.double().item() * count.item() for loss, count in seen) / sum(counts)
    assert metrics["heldout_loss"] == pytest.approx(mean, rel=1e-6)
    assert metrics["heldout_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


def test_router_load_counts_every_routed_token():
    model = small_model()
    batch = batches(1)[0]
    with watch_router_load(model) as load:
        model(input_ids=batch["input_ids"])
    assert len(load.counts) == 2
    assert all(count.sum() == batch["input_ids"].numel() * 2 for count in load.counts)
    with torch.no_grad():
        model(input_ids=batch["input_ids"])
    assert len(load.counts) == 2, "hooks stay on only inside the context"


def test_router_load_summary_is_largest_over_mean_and_experts_without_a_token():
    load = RouterLoad()
    load.counts = [torch.tensor([4.0, 0.0, 1.0, 3.0]), torch.tensor([2.0, 2.0, 2.0, 2.0])]
    summary = load.summary()
    assert summary["max_over_mean"] == 1.5
    assert summary["unused"] == 0.5
    assert RouterLoad().summary() == {}


def test_training_logs_loss_norm_rate_and_router_load(tmp_path):
    fit(
        small_model(),
        "sonar",
        steps=4,
        log_every_n_steps=2,
        logger=CSVLogger(tmp_path, name="", version=""),
    )
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [1, 3]
    for row in rows:
        assert float(row["train_loss"]) > 0
        assert float(row["clip_norm"]) > 0
        assert float(row["lr"]) == pytest.approx(1e-2)
        assert 1 <= float(row["router/max_over_mean"]) <= 6


def test_auxiliary_loss_changes_the_routers_gradient_only_when_asked_for():
    gradients = {}
    for weight in (0.0, 1.0):
        module = LanguageModel(small_model(), fused(), router_aux_loss=weight)
        module.loss(batches(1)[0]).backward()
        gradients[weight] = {n: p.grad.clone() for n, p in module.named_parameters()}
    router = next(name for name in gradients[0.0] if name.endswith("gate.weight"))
    assert not torch.equal(gradients[0.0][router], gradients[1.0][router])


def test_the_loss_falls():
    data = batches(1) * 30
    seen = []

    class Watched(LanguageModel):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            seen.append(loss.item())
            return loss

    module = Watched(small_model(), fused())
    make_trainer(SonarMoEStrategy(), 30).fit(module, loader(data))
    assert seen[-1] < 0.5 * seen[0]


def test_auxiliary_loss_is_added_with_its_weight():
    batch = batches(1)[0]
    plain, half, whole = (
        LanguageModel(small_model(), fused(), router_aux_loss=weight).loss(batch).item() for weight in (0.0, 0.5, 1.0)
    )
    assert whole - plain > 0.1
    assert half - plain == pytest.approx((whole - plain) / 2, rel=1e-4)
