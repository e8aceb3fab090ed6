from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot

from lightning_sonar import SonarMoEMixin, SonarMoEStrategy
from lightning_sonar.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("deterministic")


class ByHand(LanguageModel):
    """Manual optimization written out, as Lightning's documentation shows it."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()


def run(module, clip, steps=6, strategy=None):
    trainer = make_trainer(strategy or SonarMoEStrategy(), steps, clip=clip)
    trainer.fit(module, loader(batches(steps)))
    return snapshot(trainer, module)


def test_writing_the_step_by_hand_equals_sonar_step_bitwise():
    by_hand = run(ByHand(small_model(), fused()), None)
    assert differing(run(LanguageModel(small_model(), fused()), 0.5), by_hand) == []


def test_clipping_by_hand_without_a_value_takes_the_trainers_and_happens_once():
    class Plain(ByHand):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(self.optimizers())
            self.optimizers().step()

    assert differing(run(Plain(small_model(), fused()), 0.5), run(ByHand(small_model(), fused()), None)) == []


def test_manual_and_automatic_optimization_agree_bitwise():
    manual = snapshot(*fit(small_model(), "sonar", automatic=False))
    automatic = snapshot(*fit(small_model(), "sonar", automatic=True))
    assert differing(manual, automatic) == []


def test_accumulate_equals_one_step_on_the_sum():
    class Accumulates(LanguageModel):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch) / 2
            if batch_idx % 2 == 0:
                with self.accumulate():
                    return self.sonar_step(loss)
            return self.sonar_step(loss)

    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in ("standard_no_expert_clip", "sonar"):
            module = Accumulates(small_model(), fused())
            trainer = make_trainer(SonarMoEStrategy(mode=mode), -1)
            trainer.fit(module, loader(batches(8)))
            assert trainer.global_step == 4
            results.append(snapshot(trainer, module))
        automatic = fit(small_model(), "sonar", automatic=True, steps=4, data=batches(8), accumulate_grad_batches=2)
    assert differing(*results) == []
    assert differing(results[0], snapshot(*automatic)) == []


def test_the_trainers_accumulation_is_applied_as_in_automatic_optimization():
    results = []
    for automatic in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer, module = fit(
                small_model(), "sonar", automatic=automatic, steps=-1, data=batches(7), accumulate_grad_batches=3
            )
        assert trainer.global_step == 3  # the last one on a single batch
        assert trainer.accumulate_grad_batches == 3
        results.append(snapshot(trainer, module))
    assert differing(*results) == []


def test_another_strategy_is_refused_with_the_remedy():
    trainer = make_trainer("auto", 1, clip=None)
    with pytest.raises(
        RuntimeError, match=r"strategy is SingleDeviceStrategy.*Pass Trainer\(strategy=SonarMoEStrategy"
    ):
        trainer.fit(LanguageModel(small_model(), fused()), loader(batches(1)))


def test_the_mixin_makes_any_module_manual():
    class Mine(SonarMoEMixin, L.LightningModule):
        pass

    assert not Mine().automatic_optimization


def test_epoch_schedulers_step_once_an_epoch():
    class Epochs(LanguageModel):
        def configure_optimizers(self):
            optimizer = self.optimizer_factory(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Epochs(small_model(), fused())
    trainer = make_trainer(SonarMoEStrategy(), -1, max_epochs=3)
    trainer.fit(module, loader(batches(2)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / 8)


@pytest.mark.parametrize(("frequency", "accumulate"), [(4, 1), (2, 4), (3, 2)])
def test_scheduler_frequency_counts_as_in_automatic_optimization(frequency, accumulate):
    rates = []
    for kind in (AutomaticLM, LanguageModel):

        class Scheduled(kind):
            def configure_optimizers(self):
                optimizer = self.optimizer_factory(self.parameters())
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
                config = {"scheduler": scheduler, "interval": "step", "frequency": frequency}
                return {"optimizer": optimizer, "lr_scheduler": config}

        trainer = make_trainer(SonarMoEStrategy(), -1, max_epochs=2, accumulate_grad_batches=accumulate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Scheduled(small_model(), fused()), loader(batches(6)))
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert rates[0] < 1e-2


def test_a_plateau_scheduler_is_left_to_the_user_who_is_told():
    class Plateau(LanguageModel):
        def configure_optimizers(self):
            optimizer = self.optimizer_factory(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    with pytest.warns(UserWarning, match=r"ReduceLROnPlateau needs a metric.*self.lr_schedulers\(\).step\(metric\)"):
        make_trainer(SonarMoEStrategy(), 2).fit(Plateau(small_model(), fused()), loader(batches(2)))


def test_a_clip_value_is_honoured_when_the_step_takes_a_closure():
    class Closure(LanguageModel):
        def training_step(self, batch, batch_idx):
            self.optimizers().step(closure=lambda: self.manual_backward(self.loss(batch)))

    closure = run(Closure(small_model(), fused()), 0.01)
    assert differing(closure, run(LanguageModel(small_model(), fused()), 0.01)) == []


def test_value_clipping_by_hand_after_backward_is_refused():
    class Late(LanguageModel):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.01, gradient_clip_algorithm="value")

    with pytest.raises(RuntimeError, match="updated in it with unclipped gradients. Say it before: Trainer"):
        run(Late(small_model(), fused()), None)


class ValidatesInTheMiddle(SonarMoEMixin, AutomaticLM):
    """Validates after every second batch, within a step of three."""

    def training_step(self, batch, batch_idx):
        return self.sonar_step(super().training_step(batch, batch_idx))

    def validation_step(self, batch, batch_idx):
        return None


class Automatic(AutomaticLM):
    def validation_step(self, batch, batch_idx):
        return None


@pytest.mark.filterwarnings("ignore:Gradients are accumulated")
@pytest.mark.parametrize("accumulation", ["exact", "host"])
@pytest.mark.parametrize("mode", ["standard", "sonar", "sonar_exact_clip"])
def test_validation_in_the_middle_of_a_step_loses_nothing_that_was_accumulated(mode, accumulation):
    results = []
    for kind in (Automatic, ValidatesInTheMiddle):
        module = kind(small_model(), fused())
        trainer = make_trainer(
            SonarMoEStrategy(mode=mode, accumulation=accumulation),
            -1,
            accumulate_grad_batches=3,
            val_check_interval=2,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, loader(batches(9)), loader(batches(1)))
        assert trainer.global_step == 3
        results.append(snapshot(trainer, module))
    assert differing(*results) == []


def test_what_the_strategy_takes_from_the_trainer_it_gives_back():
    trainer = make_trainer(SonarMoEStrategy(accumulation="host"), 2, clip=0.25, accumulate_grad_batches=2)
    trainer.fit(LanguageModel(small_model(), fused()), loader(batches(4)))
    assert (trainer.gradient_clip_val, trainer.accumulate_grad_batches) == (0.25, 2)
