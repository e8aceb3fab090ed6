"""What a Lightning user relies on, in a mode that steps inside backward, against the same run without hooks."""

from __future__ import annotations

import copy
import pickle
import warnings

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_sonar import FusedAdamW, SonarMoEStrategy, find_expert_tensors
from lightning_sonar.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("deterministic")
both = pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])


def agree(make_callbacks=list, prepare=lambda model: None, automatic=True, optimizer=None, data=None, **options):
    """The same run with and without hooks gives the same weights and states, bit for bit."""
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        model = small_model()
        prepare(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer, module = fit(
                model, mode, automatic=automatic, optimizer=optimizer, data=data, callbacks=make_callbacks(), **options
            )
        results.append(snapshot(trainer, module))
    assert differing(*results) == []
    return trainer, module


def test_accumulation_that_changes_between_epochs():
    agree(lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], steps=-1, data=batches(6), max_epochs=3)


@both
def test_parameter_groups_with_different_weight_decay(automatic):
    def optimizer(parameters):
        parameters = list(parameters)
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        return FusedAdamW(
            [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
        )

    agree(automatic=automatic, optimizer=optimizer)


@both
def test_frozen_parameters_stay_and_the_others_train(automatic):
    def freeze(model):
        for name, parameter in model.named_parameters():
            if "layers.0" in name or "embed" in name:
                parameter.requires_grad_(False)

    _, module = agree(
        prepare=freeze, automatic=automatic, optimizer=lambda p: FusedAdamW([q for q in p if q.requires_grad])
    )
    fresh = dict(small_model().named_parameters())
    moved = {name for name, p in module.model.named_parameters() if not torch.equal(p, fresh[name])}
    assert moved == {name for name in fresh if not ("layers.0" in name or "embed" in name)}


@both
def test_weight_averaging_and_swa(automatic):
    agree(lambda: [WeightAveraging()], automatic=automatic, data=batches(4), steps=-1, max_epochs=2)
    if automatic:
        agree(
            lambda: [StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=1)],
            data=batches(4),
            steps=-1,
            max_epochs=3,
        )


@both
def test_learning_rate_monitor_sees_the_live_rate(automatic, tmp_path):
    monitor = LearningRateMonitor("step")
    fit(
        small_model(),
        "sonar",
        automatic=automatic,
        steps=4,
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        callbacks=[monitor],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    (name,) = monitor.lrs
    assert name == "lr-FusedAdamW"
    assert monitor.lrs[name] == pytest.approx([1e-2, 1e-2 / 2, 1e-2 / 3, 1e-2 / 4])


@both
def test_model_checkpoint_counts_steps(automatic, tmp_path):
    def savers():
        return [ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")]

    agree(savers, automatic=automatic, steps=5, enable_checkpointing=True)
    assert {path.stem.split("-")[0] for path in tmp_path.glob("*.ckpt")} == {"step=2", "step=4"}


@both
def test_early_stopping_stops(automatic):
    class Validated(AutomaticLM if automatic else LanguageModel):
        def validation_step(self, batch, batch_idx):
            self.log("watched", torch.tensor(1.0))

        def on_validation_epoch_start(self):
            pass

        def on_validation_epoch_end(self):
            pass

    trainer = make_trainer(SonarMoEStrategy(), -1, callbacks=[EarlyStopping("watched", patience=1)], max_epochs=9)
    trainer.fit(Validated(small_model(), fused()), loader(batches(2)), loader(batches(1)))
    assert trainer.current_epoch < 4


@both
@pytest.mark.parametrize("options", [{"limit_train_batches": 3}, {"limit_train_batches": 0.5}, {"fast_dev_run": 2}])
def test_limits_and_fast_dev_run(automatic, options):
    trainer, _ = agree(automatic=automatic, data=batches(6), steps=-1, **options)
    assert trainer.global_step == (2 if "fast_dev_run" in options else 3)


@both
def test_fit_may_be_called_twice(automatic):
    results = []
    for mode in ("standard_no_expert_clip", "sonar"):
        module = (AutomaticLM if automatic else LanguageModel)(small_model(), fused())
        trainer = make_trainer(SonarMoEStrategy(mode=mode), -1)
        for _ in range(2):
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(module, loader(batches(3)))
            assert trainer.strategy.in_backward is None
        results.append(snapshot(trainer, module))
    assert differing(*results) == []


@both
def test_the_module_can_be_copied_and_pickled_during_and_after_training(automatic):
    copies = []

    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            copies.append((copy.deepcopy(module.model), pickle.loads(pickle.dumps(module.model))))

    _, module = fit(small_model(), "sonar", automatic=automatic, steps=2, callbacks=[Copies()])
    for copied in (*copies[-1], copy.deepcopy(module.model), pickle.loads(pickle.dumps(module.model))):
        assert all(torch.equal(a, b) for a, b in zip(module.model.parameters(), copied.parameters(), strict=True))
        assert not any(p._post_accumulate_grad_hooks for p in copied.parameters())


@both
@pytest.mark.parametrize(
    "mode", ["standard", "standard_no_expert_clip", "sonar", "sonar_per_expert", "in_backward_all"]
)
def test_true_gradient_norms_are_logged_in_every_mode(mode, automatic):
    wanted, logged = [], []

    class Expected(L.Callback):
        def on_after_backward(self, trainer, module):
            experts = {id(t) for t in find_expert_tensors(module).tensors}
            parts = {True: [], False: []}
            for p in module.parameters():
                parts[id(p) in experts].append(p.grad.float().norm())
            wanted.append([torch.stack(parts[key]).norm().item() for key in (True, False)])

    class Logged(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            metrics = trainer.callback_metrics
            logged.append([metrics[f"grad_norm/{part}"].item() for part in ("experts", "dense", "total")])

    clip = None if mode == "in_backward_all" else 0.05
    reference = "standard_no_expert_clip" if mode != "standard" else "standard"
    if mode == "in_backward_all":
        reference = "standard"
    fit(small_model(), reference, automatic=automatic, steps=3, clip=clip, callbacks=[Expected()])
    fit(
        small_model(),
        mode,
        automatic=automatic,
        steps=3,
        clip=clip,
        callbacks=[Logged()],
        strategy_options={"log_grad_norm": True},
    )
    for (experts, dense), got in zip(wanted, logged, strict=True):
        assert got[:2] == pytest.approx([experts, dense], rel=1e-5)
        assert got[2] == pytest.approx((experts**2 + dense**2) ** 0.5, rel=1e-5)


def test_logging_norms_changes_nothing():
    plain = snapshot(*fit(small_model(), "sonar"))
    logging = snapshot(*fit(small_model(), "sonar", strategy_options={"log_grad_norm": True}))
    assert differing(plain, logging) == []


def test_pytorch_lightning_knows_the_name():
    import pytorch_lightning as pl

    from lightning_sonar import register_strategies

    register_strategies()

    class Module(pl.LightningModule):
        training_step = AutomaticLM.training_step
        configure_optimizers = AutomaticLM.configure_optimizers

        def __init__(self, model):
            super().__init__()
            self.model, self.optimizer_factory, self.scheduler_factory = model, fused(), None

    results = []
    for strategy in ("sonar_moe", "auto"):
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module(small_model())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loader(batches(3)))
        results.append(snapshot(trainer, module))
    assert differing(*results) == []
