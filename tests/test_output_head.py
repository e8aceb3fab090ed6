from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers import batches, fused, loader, make_trainer, small_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_sonar import SonarMoEStrategy, output_head
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.memory.tracker import StorageTracker
from lightning_sonar.output_head import (
    OutputHeadError,
    check_output_head,
    forward_with_loss,
    logit_transform,
)

PRECISION = {torch.float32: "32-true", torch.bfloat16: "bf16-true"}
DENSE = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def other_model(kind: str, dtype: torch.dtype = torch.float32, **values) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(kind, **{**DENSE, **values})
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def loss_and_gradients(model: nn.Module, kind: str, batch=None, **options):
    module = LanguageModel(model, fused(), loss=kind, **options)
    model.zero_grad()
    loss = module.loss(batch or batches(1)[0])
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, tolerance: float = 2e-6, **options) -> None:
    (loss, gradients), (plain_loss, plain) = (
        loss_and_gradients(model, kind, **options) for kind in ("chunked", "full")
    )
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert gradients.keys() == plain.keys()
    for name, gradient in gradients.items():
        assert (gradient - plain[name]).abs().max() <= tolerance * plain[name].abs().max() + 1e-9, name


@pytest.mark.parametrize("router_aux_loss", [0.0, 0.5])
@pytest.mark.parametrize("family", ["olmoe", "granite"])
def test_loss_and_every_gradient_are_those_of_the_whole_loss(family, router_aux_loss):
    assert_same(small_model(family), router_aux_loss=router_aux_loss)


def test_granites_scale_counts():
    model = small_model("granite")
    assert model.config.logits_scaling == 6.0
    assert logit_transform(model) == (pytest.approx(1 / 6), None)


@pytest.mark.parametrize(
    ("kind", "values", "transform"),
    [
        ("cohere", {"logit_scale": 0.5}, (0.5, None)),
        ("gemma2", {"final_logit_softcapping": 2.0}, (1.0, 2.0)),
        ("qwen2", {}, (1.0, None)),
    ],
)
def test_other_families_scales_and_caps_count(kind, values, transform):
    model = other_model(kind, **values)
    assert logit_transform(model) == transform
    assert_same(model)


@pytest.mark.parametrize("family", ["olmoe", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_passes_what_is_right(family, dtype):
    model = small_model(family, dtype=dtype)
    check_output_head(model, batches(1)[0]["input_ids"])
    with torch.autocast("cpu", torch.bfloat16):
        check_output_head(model, batches(1)[0]["input_ids"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_passes_caps_in_every_dtype(dtype):
    check_output_head(other_model("gemma2", dtype), batches(1)[0]["input_ids"])


class Odd(nn.Module):
    """A model whose logits are more than its configuration says."""

    def __init__(self, model: nn.Module, change) -> None:
        super().__init__()
        self.inner, self.change, self.config = model, change, model.config

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, **inputs):
        output = self.inner(**inputs)
        output.logits = self.change(output.logits)
        return output


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda logits: logits * 1.05, "differ from that by up to 5"),
        (lambda logits: (logits / 30).tanh() * 30, "differ from that"),  # shows on no logit of an untrained model
        (lambda logits: logits.log_softmax(-1), "differ from that"),
        (lambda logits: logits[..., :90], "logits [1, 8, 90]"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_changes_its_logits_otherwise_is_refused_by_name(change, found, dtype):
    model = Odd(small_model(dtype=dtype), change)
    module = LanguageModel(model, fused(), loss="chunked")
    with pytest.raises(OutputHeadError) as error:
        module.loss(batches(1)[0])
    assert "Odd" in str(error.value)
    assert found in str(error.value)
    assert "model.loss=full" in str(error.value)


def test_a_model_that_multiplies_where_granite_divides_is_refused():
    model = other_model("hyperclovax", logits_scaling=4.0)
    with pytest.raises(OutputHeadError, match="HyperCLOVAXForCausalLM"):
        check_output_head(model, batches(1)[0]["input_ids"])


def test_a_head_that_is_not_linear_or_never_called_is_refused():
    class Adapter(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    model = small_model()
    model.lm_head = Adapter(32, 96)
    with pytest.raises(OutputHeadError, match="OlmoeForCausalLM gives Adapter; expected a plain nn.Linear"):
        LanguageModel(model, fused(), loss="chunked").loss(batches(1)[0])
    model.get_output_embeddings = lambda: None
    with pytest.raises(OutputHeadError, match="gives NoneType"):
        check_output_head(model, batches(1)[0]["input_ids"])
    stranger = nn.Linear(32, 96)
    model.get_output_embeddings = lambda: stranger
    with pytest.raises(OutputHeadError, match="called 0 times"):
        check_output_head(model, batches(1)[0]["input_ids"])
    with pytest.raises(OutputHeadError, match="called its output head 0 times"):
        forward_with_loss(model, lambda: model(**batches(1)[0]), batches(1)[0]["labels"])


def test_a_change_in_place_of_what_the_head_gives_is_refused():
    model = Odd(small_model(), lambda logits: logits.mul_(1.0))
    with pytest.raises(OutputHeadError, match="in place"):
        LanguageModel(model, fused(), loss="chunked").loss(batches(1)[0])


def test_the_check_leaves_no_trace():
    model = small_model()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def noisy(module, args, output):
        torch.rand(4)

    handle = model.model.layers[1].register_forward_hook(noisy)
    check_output_head(model, batches(1)[0]["input_ids"])
    handle.remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert "forward" not in model.lm_head.__dict__
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_check_runs_once_and_its_tokens_are_not_in_the_routers_load(monkeypatch):
    checks, loads = [], []
    plain = output_head.check_output_head
    monkeypatch.setattr(
        "lightning_sonar.language_model.check_output_head", lambda *args: (checks.append(1), plain(*args))
    )

    class Watched(LanguageModel):
        def loss(self, batch):
            loads.append(sum(len(module._forward_pre_hooks) for module in self.model.modules()))
            return super().loss(batch)

    module = Watched(small_model(), fused(), loss="chunked")
    make_trainer(SonarMoEStrategy(), 3, log_every_n_steps=1).fit(module, loader(batches(3)))
    assert len(checks) == 1
    assert loads == [2, 2, 2], "the load is watched in every loss, the check came before"


def test_a_failed_forward_gives_the_head_its_forward_back():
    model = small_model()

    def fail():
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        forward_with_loss(model, fail, batches(1)[0]["labels"])
    assert "forward" not in model.lm_head.__dict__


def test_fake_models_run_without_the_check():
    with FakeTensorMode():
        module = LanguageModel(small_model(dtype=torch.bfloat16, backend="batched_mm"), fused(), loss="chunked")
        batch = {name: torch.zeros(2, 12, dtype=torch.long) for name in ("input_ids", "attention_mask", "labels")}
        loss = module.loss(batch)
        loss.backward()
    assert loss.shape == ()
    assert module.model.lm_head.weight.grad.shape == (96, 32)


def test_the_models_own_logits_never_exist():
    batch = batches(1, batch_size=4, seq_len=128)[0]
    whole = 4 * 128 * 96 * 4
    born = {}
    for kind in ("full", "chunked"):
        module = LanguageModel(small_model(num_layers=1), fused(), loss=kind)
        module._check_head(batch)
        with StorageTracker() as tracker:
            module.loss(batch).backward()
        born[kind] = sum(event.delta == whole for event in tracker.ledger._events)
    assert born["full"] >= 2
    assert born["chunked"] == 0


@pytest.mark.parametrize("family", ["olmoe", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_steps_of_training_lose_what_the_whole_loss_does(family, dtype):
    losses = {}
    for kind in ("full", "chunked"):
        seen = losses[kind] = []

        class Watched(LanguageModel):
            def training_step(self, batch, batch_idx, seen=seen):
                loss = super().training_step(batch, batch_idx)
                seen.append(loss.item())
                return loss

        module = Watched(small_model(family, dtype=dtype), fused(lr=1e-3), loss=kind, router_aux_loss=0.01)
        make_trainer(SonarMoEStrategy(), 3, precision=PRECISION[dtype]).fit(module, loader(batches(3)))
    assert losses["chunked"] == pytest.approx(losses["full"], rel=1e-5 if dtype == torch.float32 else 2e-3)
    assert losses["chunked"][0] != losses["chunked"][2]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_heldout_loss_is_that_of_the_whole_loss(precision):
    data = batches(4)
    for index, batch in enumerate(data):  # batches with different numbers of labelled tokens
        batch["labels"][:, : 3 + index] = -100
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    metrics = {}
    for kind in ("full", "chunked"):
        module = LanguageModel(small_model("granite", dtype=dtype), fused(), loss=kind)
        trainer = make_trainer(SonarMoEStrategy(), precision=precision)
        metrics[kind] = trainer.validate(module, loader(data), verbose=False)[0]
    # In bfloat16 the whole loss rounds the logits once more, at Granite's scale.
    tolerance = 1e-5 if dtype == torch.float32 and precision != "bf16-mixed" else 1e-4
    assert metrics["chunked"].keys() == metrics["full"].keys()
    for name, value in metrics["full"].items():
        assert metrics["chunked"][name] == pytest.approx(value, rel=tolerance * (5 if "perplexity" in name else 1))


@pytest.mark.parametrize("kind", ["full", "chunked"])
def test_a_loss_that_is_not_a_number_shows_in_the_heldout_loss(kind):
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[3, 5] = float("nan")
    module = LanguageModel(model, fused(), loss=kind)
    metrics = make_trainer(SonarMoEStrategy()).validate(module, loader(batches(2)), verbose=False)[0]
    assert math.isnan(metrics["heldout_loss"])


def test_an_unknown_loss_is_named():
    with pytest.raises(ValueError, match=r"loss='half'\): expected one of full, chunked"):
        LanguageModel(small_model(), fused(), loss="half")  # type: ignore[arg-type]
