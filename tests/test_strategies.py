from __future__ import annotations

import itertools

import lightning as L
import pytest
import torch
from helpers import PRECISION, AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from torch import nn

from lightning_sonar import FusedAdamW, SonarMoEStrategy
from lightning_sonar.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("deterministic")

OPTIMIZERS = {
    "FusedAdamW": fused(),
    "torch.optim.AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "torch.optim.AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def bitwise(
    mode, reference, *, family="olmoe", dtype=torch.float32, backend="grouped_mm", checkpointing=False, **options
):
    snapshots = []
    for name in (reference, mode):
        model = small_model(family, dtype, backend, checkpointing=checkpointing)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        trainer, module = fit(model, name, **options)
        assert trainer.global_step == options.get("steps", 10)
        snapshots.append(snapshot(trainer, module))
        moved = [n for n, p in model.named_parameters() if not torch.equal(start[n], p)]
        assert len(moved) == len(start), "a comparison of weights that never moved proves nothing"
    assert differing(*snapshots) == []
    assert any(name.endswith("exp_avg_sq") for name in snapshots[0])


MATRIX = list(
    itertools.product(
        ("olmoe", "granite"),
        (torch.float32, torch.bfloat16),
        ("eager", "grouped_mm"),
        (False, True),
        OPTIMIZERS,
        (False, True),
    )
)


def case_id(case) -> str:
    family, dtype, backend, automatic, optimizer, checkpointing = case
    return "-".join(
        [family, str(dtype)[6:], backend, "automatic" if automatic else "manual", optimizer]
        + ["checkpointing"] * checkpointing
    )


@pytest.mark.parametrize("case", MATRIX, ids=case_id)
def test_sonar_matches_standard_without_expert_clip_bitwise(case):
    family, dtype, backend, automatic, optimizer, checkpointing = case
    bitwise(
        "sonar",
        "standard_no_expert_clip",
        family=family,
        dtype=dtype,
        backend=backend,
        automatic=automatic,
        optimizer=OPTIMIZERS[optimizer],
        checkpointing=checkpointing,
    )


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["olmoe", "granite"])
def test_per_expert_hooks_match_standard_bitwise(family, dtype, optimizer, automatic):
    bitwise(
        "sonar_per_expert",
        "standard_no_expert_clip",
        family=family,
        dtype=dtype,
        automatic=automatic,
        optimizer=OPTIMIZERS[optimizer],
    )


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["olmoe", "granite"])
def test_in_backward_all_matches_unclipped_standard_bitwise(family, dtype, automatic):
    bitwise("in_backward_all", "standard", family=family, dtype=dtype, automatic=automatic, clip=None)


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_mixed_precision_with_clipping_matches_bitwise(automatic):
    bitwise("sonar", "standard_no_expert_clip", precision="bf16-mixed", automatic=automatic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_standard_mode_is_plain_lightning_bitwise(dtype):
    trainer, module = fit(small_model(dtype=dtype), "standard", automatic=True, optimizer=OPTIMIZERS["FusedAdamW"])
    plain = make_trainer("auto", 10, PRECISION[dtype])
    other = AutomaticLM(small_model(dtype=dtype), OPTIMIZERS["torch.optim.AdamW fused"])
    # Lightning itself refuses to clip for torch's fused AdamW only under mixed precision.
    plain.fit(other, loader(batches(10)))
    assert differing(snapshot(trainer, module), snapshot(plain, other)) == []


def test_clip_value_is_honoured_in_automatic_and_manual_optimization():
    results = {}
    for automatic in (False, True):
        for clip in (0.01, None):
            trainer, module = fit(small_model(), "sonar", automatic=automatic, clip=clip)
            results[automatic, clip] = snapshot(trainer, module)
            assert trainer.gradient_clip_val == clip
    assert differing(results[False, 0.01], results[True, 0.01]) == []
    assert differing(results[False, None], results[True, None]) == []
    assert differing(results[True, 0.01], results[True, None]) != []


def test_value_algorithm_matches_plain_lightning_bitwise():
    for automatic in (False, True):
        trainer, module = fit(small_model(), "sonar", automatic=automatic, clip=1e-3, gradient_clip_algorithm="value")
        plain = make_trainer("auto", 10, clip=1e-3, gradient_clip_algorithm="value")
        other = AutomaticLM(small_model(), OPTIMIZERS["torch.optim.AdamW fused"])
        plain.fit(other, loader(batches(10)))
        assert differing(snapshot(trainer, module), snapshot(plain, other)) == []


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_global_step_counts_one_a_batch_and_schedulers_step(automatic):
    seen = []

    def schedule(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append((trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))

    trainer, _ = fit(small_model(), "sonar", automatic=automatic, scheduler=schedule, steps=4, callbacks=[Watch()])
    assert trainer.global_step == 4
    assert seen == [(step, pytest.approx(1e-2 / (1 + step))) for step in range(1, 5)]


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_schedulers_match_standard_bitwise(automatic):
    bitwise(
        "sonar",
        "standard_no_expert_clip",
        automatic=automatic,
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=10),
    )


def test_hooks_are_gone_after_fit_and_the_plugin_is_its_own_again():
    for automatic in (False, True):
        trainer, module = fit(small_model(), "sonar", automatic=automatic, steps=2)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
        assert trainer.strategy.in_backward is None
        assert "clip_gradients" not in vars(trainer.strategy.precision_plugin)
        assert not trainer.optimizers[0]._optimizer_step_post_hooks


def test_hooks_are_gone_after_a_fit_that_failed():
    class Fails(AutomaticLM):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise KeyError("on purpose")
            return super().training_step(batch, batch_idx)

    model = small_model()
    trainer = make_trainer(SonarMoEStrategy())
    with pytest.raises(KeyError, match="on purpose"):
        trainer.fit(Fails(model, fused()), loader(batches(3)))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert trainer.strategy.in_backward is None


def test_gradients_are_gone_when_the_step_is():
    left = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            left.append([name for name, p in module.named_parameters() if p.grad is not None])

    for automatic in (False, True):
        fit(small_model(), "standard", automatic=automatic, steps=2, callbacks=[Watch()])
    assert left == [[], [], [], []]


def test_experts_have_no_gradient_after_backward_and_dense_ones_do():
    seen = []

    class Watch(L.Callback):
        def on_after_backward(self, trainer, module):
            seen.append({name for name, p in module.named_parameters() if p.grad is not None})

    _, module = fit(small_model(), "sonar", automatic=True, steps=2, callbacks=[Watch()])
    dense = {name for name, _ in module.named_parameters() if "experts" not in name}
    assert seen == [dense, dense]


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_a_bad_loss_is_skipped_counted_and_reported(automatic):
    class Automatic(AutomaticLM):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 1 else loss

    class Manual(LanguageModel):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return self.sonar_step(loss * float("nan") if batch_idx == 1 else loss)

    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(snapshot(trainer, module))

    module = (Automatic if automatic else Manual)(small_model(), fused())
    trainer = make_trainer(SonarMoEStrategy(), callbacks=[Watch()])
    with pytest.warns(UserWarning, match="1 training steps updated nothing because their loss was not finite"):
        trainer.fit(module, loader(batches(3)))
    assert differing(seen[0], seen[1]) == []
    assert len(differing(seen[1], seen[2])) == len(seen[1])
    assert trainer.global_step == 3
    assert trainer.strategy.skipped_steps == 1


def test_float16_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"precision='16-true'.*Use precision='bf16-true'"):
        fit(small_model(), "sonar", precision="16-true", steps=1)


def test_loss_scaling_is_refused_with_the_remedy():
    from lightning.pytorch.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu")  # what Trainer(precision="16-mixed") makes on a GPU
    trainer = make_trainer(SonarMoEStrategy(), 1, precision=None, plugins=[plugin])
    with pytest.raises(ValueError, match=r"precision='16-mixed'.*loss scaling.*Use precision='bf16-true'"):
        trainer.fit(LanguageModel(small_model(), fused()), loader(batches(1)))


def test_two_optimizers_are_refused():
    class Two(AutomaticLM):
        automatic_optimization = False

        def configure_optimizers(self):
            dense = [p for n, p in self.named_parameters() if "experts" not in n]
            experts = [p for n, p in self.named_parameters() if "experts" in n]
            return [FusedAdamW(dense), FusedAdamW(experts)]

    module = Two(small_model(), None)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="drives one optimizer over all parameters; configure_optimizers returned 2"):
        make_trainer(SonarMoEStrategy(), 1).fit(module, loader(batches(1)))


@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_in_backward_all_with_a_clip_value_is_refused(automatic):
    module = (AutomaticLM if automatic else LanguageModel)(small_model(), fused())
    with pytest.raises(ValueError, match=r"gradient_clip_val=1.0 was given. Set gradient_clip_val=None"):
        make_trainer(SonarMoEStrategy(mode="in_backward_all"), 1, clip=1.0).fit(module, loader(batches(1)))


def test_unknown_mode_and_expert_clip_list_the_choices():
    with pytest.raises(ValueError, match="mode='nonsense' is not a mode. Choose one of standard"):
        SonarMoEStrategy(mode="nonsense")
    with pytest.raises(ValueError, match="expert_clip='nonsense': expected one of none"):
        SonarMoEStrategy(expert_clip="nonsense")


def test_the_registered_name_works():
    trainer = make_trainer("sonar_moe", 2)
    assert isinstance(trainer.strategy, SonarMoEStrategy)
    trainer.fit(AutomaticLM(small_model(), fused()), loader(batches(2)))
    assert trainer.global_step == 2


def test_strategy_takes_the_device_that_the_trainer_chose(monkeypatch):
    strategy = SonarMoEStrategy()
    make_trainer(strategy)
    assert strategy.root_device == torch.device("cpu")
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 1)
    strategy.parallel_devices = [torch.device("cpu"), torch.device("cpu")]
    with pytest.raises(ValueError, match="runs on one device, but the Trainer was given 2. Set devices=1"):
        _ = strategy.root_device


class Dense(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_dense_model_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="No batched expert tensors found"):
        make_trainer(SonarMoEStrategy(), 1).fit(Dense(), torch.utils.data.DataLoader(torch.zeros(4, 4)))


@pytest.mark.parametrize("mode", ["standard", "standard_no_expert_clip"])
def test_modes_without_hooks_train_a_model_whose_experts_are_frozen(mode):
    def dense(parameters):
        return FusedAdamW([parameter for parameter in parameters if parameter.requires_grad])

    model = small_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    trainer, _ = fit(model, mode, automatic=True, steps=2, optimizer=dense)
    assert trainer.global_step == 2


def test_standard_mode_trains_a_dense_model():
    data = torch.utils.data.DataLoader(torch.zeros(4, 4))
    make_trainer(SonarMoEStrategy(mode="standard"), 1).fit(Dense(), data)
    with pytest.raises(ValueError, match="No batched expert tensors found"):
        make_trainer(SonarMoEStrategy(mode="standard_no_expert_clip"), 1).fit(Dense(), data)


def test_exact_accumulation_matches_standard_bitwise_in_automatic_optimization():
    with pytest.warns(UserWarning, match="saves is lost"):
        bitwise("sonar", "standard_no_expert_clip", automatic=True, steps=4, data=batches(8), accumulate_grad_batches=2)


def test_per_microbatch_accumulation_steps_experts_every_batch():
    trainer, module = fit(
        small_model(),
        "sonar",
        automatic=True,
        steps=2,
        data=batches(6),
        accumulate_grad_batches=3,
        strategy_options={"accumulation": "per_microbatch"},
    )
    steps = {
        name: trainer.optimizers[0].state[parameter]["step"].item() for name, parameter in module.named_parameters()
    }
    assert all(count == (6 if "experts" in name else 2) for name, count in steps.items())


def test_validation_inside_training_changes_nothing():
    snapshots = []
    for interval in (None, 2):
        module = LanguageModel(small_model(), fused())
        trainer = make_trainer(
            SonarMoEStrategy(), 6, val_check_interval=interval, num_sanity_val_steps=0, limit_val_batches=2
        )
        trainer.fit(module, loader(batches(6)), loader(batches(2, seed=9)) if interval else None)
        snapshots.append(snapshot(trainer, module))
    assert differing(*snapshots) == []


def test_validate_alone_needs_no_hooks():
    module = LanguageModel(small_model(), fused())
    trainer = make_trainer(SonarMoEStrategy())
    metrics = trainer.validate(module, loader(batches(2)), verbose=False)[0]
    assert metrics["heldout_loss"] > 0
    assert trainer.strategy.in_backward is None
