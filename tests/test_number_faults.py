"""NaN and infinity in the loss, the input or one gradient: nothing bad gets into weights or states, all is counted."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, fused, loader, make_trainer, small_model, snapshot
from lightning.pytorch.loggers import CSVLogger
from number_faults import (
    DTYPES,
    GRADIENTS,
    INF,
    NAN,
    OPTIMIZERS,
    Cell,
    Run,
    grid,
    modes,
    same,
    wrong,
    wrong_with,
)
from test_in_backward import inputs, toy
from torch import Tensor, nn

from lightning_sonar import SonarMoEStrategy, find_expert_tensors, release_in_backward
from lightning_sonar.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("deterministic")

BAD = (NAN, INF, -INF)
EACH_MODE = pytest.mark.parametrize("mode", modes(), ids=lambda mode: "-".join(filter(None, mode.values())))
ACCUMULATIONS = ("exact", "host", "per_microbatch")
# The largest grids, which together try every pair of axes.
GRIDS = {
    "loss": {"fault": ("loss", "input"), "value": BAD, "step": (0, 1), "check": ("loss", "gradient")},
    "loss in a microbatch": {"fault": ("loss",), "check": ("loss", "gradient"), "accumulation": ACCUMULATIONS},
    "loss, optimizers": {"fault": ("loss",), "optimizer": tuple(OPTIMIZERS), "dtype": tuple(DTYPES)},
    "gradient": {"fault": tuple(GRADIENTS), "value": BAD, "step": (0, 1), "clip": ("none", "norm", "value")},
    "gradient in a microbatch": {"fault": tuple(GRADIENTS), "value": (NAN, INF), "accumulation": ACCUMULATIONS},
    "gradient, optimizers": {"fault": tuple(GRADIENTS), "optimizer": tuple(OPTIMIZERS), "dtype": tuple(DTYPES)},
}
for name, axes in GRIDS.items():
    axes.setdefault("check", ("gradient",) if name.startswith("gradient") else ("loss",))
    if "accumulation" in axes:
        axes.update(micro=(0, 1), clip=("none", "norm", "value"))
    if "optimizer" in axes:
        axes["state_device"] = (None, "cpu")
    axes["on_device"] = (False, True)


# On a toy: every mode, with every expert clip it can have.


@EACH_MODE
def test_a_bad_loss_or_input_leaves_no_trace_but_its_count(mode):
    cells = grid([mode], fault=("loss", "input"), value=(NAN,), step=(0, 1), on_device=(False, True))
    assert wrong(cells) == {}


@EACH_MODE
def test_one_bad_element_of_one_gradient_leaves_out_what_the_rule_says_and_no_more(mode):
    axes = {"fault": tuple(GRADIENTS), "value": (INF,), "clip": ("norm", "value"), "on_device": (False, True)}
    assert wrong(grid([mode], check=("gradient",), **axes)) == {}


@EACH_MODE
def test_a_bad_microbatch_first_or_last_spoils_its_own_step_only(mode):
    axes = {"accumulation": ACCUMULATIONS, "micro": (0, 1)}
    assert wrong(grid([mode], fault=("loss",), **axes)) == {}
    assert wrong(grid([mode], fault=("first",), check=("gradient",), **axes)) == {}


@pytest.mark.parametrize("dtype", ["bf16", "mixed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_faults_leave_no_trace_under_any_optimizer_and_place_of_states(optimizer, dtype):
    axes = {"optimizer": (optimizer,), "dtype": (dtype,), "state_device": (None, "cpu")}
    some = [mode for mode in modes() if mode["expert_clip"] is None and "all" not in str(mode["mode"])]
    assert wrong(grid(some, fault=("loss",), **axes)) == {}
    assert wrong(grid(some[-3:], fault=("first",), check=("gradient",), **axes)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRIDS)
def test_no_pair_of_axes_lets_a_bad_number_through(name):
    cells = list(grid(modes(), **GRIDS[name]))
    print(f"\n{name}: {len(cells)} faults injected")
    assert wrong(cells) == {}


@pytest.mark.slow
def test_no_combination_of_all_axes_lets_a_bad_number_through():
    axes = {key: tuple({value: None for axes in GRIDS.values() for value in axes.get(key, ())}) for key in vars(Cell())}
    axes = {key: found for key, found in axes.items() if found}
    axes["accumulation"] = (None, *ACCUMULATIONS)
    draw = random.Random(0)
    found: set[Cell] = set()
    while len(found) < 1000:
        found.update(grid([draw.choice(modes())], **{key: (draw.choice(each),) for key, each in axes.items()}))
    assert wrong(sorted(found, key=str)) == {}


@EACH_MODE
def test_the_grid_notices_a_step_that_nobody_looked_at(mode):
    assert wrong_with(Cell(**mode, clip="none"), on_nonfinite="ignore") == "values differ after step 1"
    spoiled = Cell(**mode, clip="none", fault="first", check="gradient")
    assert wrong_with(spoiled, check="loss") == "values differ after step 1"


# Raise and ignore.


@pytest.mark.parametrize("fault", ["loss", *GRADIENTS])
@EACH_MODE
def test_raise_says_truly_whether_something_was_updated_and_the_next_step_can_begin(mode, fault):
    cell = Cell(**mode, fault=fault, check="gradient" if fault in GRADIENTS else "loss")
    cell = cell if cell.allowed else Cell(**mode, fault=fault, check=cell.check, clip="none")
    run = Run(cell, reference=False, on_nonfinite="raise")
    run.train(0)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with pytest.raises(FloatingPointError, match="not finite|The loss is nan") as caught:
        run.train(1)
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    in_backward = {
        "loss": set(),
        "second": set(),  # the last layer's, so the first to come
        "first": {"second"},
        "bias": {"first", "second"},
    }[fault]
    assert moved == (set() if cell.judged_first else in_backward)
    told = "other tensors were updated in this step already" if moved else "nothing was updated in this step"
    assert told in str(caught.value).lower()
    run.handle.abandon_step()
    run.train(2)
    assert all(value.isfinite().all() for value in run.values())


def test_raise_in_a_later_microbatch_does_not_claim_that_nothing_was_updated():
    cell = Cell(accumulation="per_microbatch", micro=1)
    run = Run(cell, reference=False, on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match="The loss is nan; other tensors were updated in this step already"):
        run.train(1)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("fault", ["loss", "input", *GRADIENTS])
def test_what_nobody_looks_at_spoils_in_backward_modes_as_it_spoils_ordinary_training(fault, value):
    found = []
    for mode in ("standard_no_expert_clip", "sonar", "sonar_per_expert"):
        run = Run(Cell(mode=mode, fault=fault, value=value), reference=False, on_nonfinite="ignore")
        for step in range(3):
            run.train(step)
        found.append(run.values())
    assert not all(each.isfinite().all() for each in found[0])
    assert same(found[0], found[1])
    assert same(found[0], found[2])


# Faults that were found by the grids.


@pytest.mark.parametrize("mode", ["sonar", "sonar_per_expert", "in_backward_all"])
def test_an_infinite_gradient_is_seen_before_clipping_by_value_makes_a_number_of_it(mode):
    model, _made, handle = toy(mode, check="gradient")
    model.first.register_hook(lambda grad: torch.full_like(grad, INF))
    before = model.first.detach().clone()
    handle.train_step(model(inputs()), max_norm=0.1, algorithm="value")
    assert handle.skipped_tensors == 1
    assert torch.equal(model.first, before)


@pytest.mark.parametrize("on_device", [False, True])
def test_gradients_of_a_bad_loss_are_no_tensors_left_out_besides(monkeypatch, on_device):
    monkeypatch.setattr("lightning_sonar.nonfinite._stays_on_device", lambda tensor, optimizer: on_device)
    for mode in ("standard", "sonar", "sonar_exact_clip"):
        model, _made, handle = toy(mode, check="gradient")
        handle.train_step(model(inputs()) * NAN, max_norm=0.1)
        assert (handle.skipped_steps, handle.skipped_tensors) == (1, 0)


@pytest.mark.parametrize("mode", ["standard", "sonar", "sonar_exact_clip"])
def test_a_largest_norm_that_is_no_number_is_refused(mode):
    model, made, handle = toy(mode)
    with pytest.raises(ValueError, match="gradient_clip_val=nan: expected the largest norm"):
        handle.train_step(model(inputs()), max_norm=NAN)
    assert not any(made.state.values())
    handle.max_norm = 0.0
    handle.backward(model(inputs()))
    with pytest.raises(ValueError, match="gradient_clip_val=nan"):
        handle.clip_(NAN)
    with pytest.raises(ValueError, match="gradient_clip_val=nan"):
        fit(small_model(), mode, steps=1, clip=NAN)


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = 4
        self.table = nn.Embedding(10, 8, sparse=True)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.bmm(self.table(ids).expand(4, len(ids), 8), self.experts).square().mean()


@pytest.mark.parametrize("mode", ["standard", "sonar", "in_backward_all"])
def test_sparse_gradients_are_looked_at_and_measured_too(mode):
    model = SparseTable()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = release_in_backward(made, find_expert_tensors(model), mode=mode, check="gradient", measure_norms=True)
    ids = torch.tensor([1, 2, 2])
    handle.backward(model(ids))
    handle.clip_(0.0)
    made.step()
    made.zero_grad()
    twin = SparseTable()
    twin(ids).backward()
    exact = twin.table.weight.grad.to_dense().norm()
    torch.testing.assert_close(handle.grad_norms()["dense"], exact)
    before = model.table.weight.detach().clone()
    hook = model.table.weight.register_hook(lambda grad: grad * NAN)
    handle.train_step(model(ids))
    hook.remove()
    assert torch.equal(model.table.weight, before)
    assert handle.skipped_tensors == {"standard": 2, "sonar": 1, "in_backward_all": 1}[mode]


# Under the Trainer, on OLMoE.

PRECISIONS = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}


def spoiled(kind: type, bad: tuple[str, float, int] | None):
    """A module of this kind whose batch number so-and-so has a bad loss, or one bad element among its embeddings."""
    fault, value, index = bad or ("", 0.0, -1)

    class Spoiled(kind):
        def training_step(self, batch, batch_idx):
            self.here = batch_idx == index
            if fault != "input":
                return super().training_step(batch, batch_idx)
            with torch.no_grad():
                handle = self.model.get_input_embeddings().register_forward_hook(self.spoil)
            try:
                return super().training_step(batch, batch_idx)
            finally:
                handle.remove()

        def spoil(self, module, args, output):
            if not self.here:
                return None
            mask = torch.zeros_like(output)
            mask[0, 4, 2] = value
            return output + mask

        def sonar_step(self, loss):
            return super().sonar_step(loss * value if self.here and fault == "loss" else loss)

        def backward(self, loss, *args, **kwargs):
            loss.backward(*args, **kwargs)

    if kind is AutomaticLM and fault == "loss":

        class Automatic(Spoiled):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                return loss * value if self.here else loss

        return Automatic
    return Spoiled


def trained(mode, precision, bad, data, automatic=False, options=None, **trainer_options):
    kind = spoiled(AutomaticLM if automatic else LanguageModel, bad)
    module = kind(small_model(dtype=PRECISIONS[precision], num_layers=1), fused())
    strategy = SonarMoEStrategy(**mode, **(options or {}))
    clip = None if mode["mode"] == "in_backward_all" else 0.5
    trainer = make_trainer(strategy, precision=precision, clip=clip, **trainer_options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "1 training steps updated nothing")
        trainer.fit(module, loader(data))
    return trainer, snapshot(trainer, module)


def check_fit(mode, precision, fault, value, index, automatic):
    data = batches(3)
    trainer, found = trained(mode, precision, (fault, value, index), data, automatic)
    _, wanted = trained(mode, precision, None, data[:index] + data[index + 1 :], automatic)
    assert differing(found, wanted) == []
    assert all(value.isfinite().all() for value in found.values())
    assert (trainer.strategy.skipped_steps, trainer.strategy.skipped_tensors) == (1, 0)
    assert trainer.global_step == 3


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", ["standard", "sonar", "sonar_exact_clip"])
def test_a_fit_with_a_bad_input_equals_one_without_that_batch(mode, precision):
    check_fit({"mode": mode}, precision, "input", NAN, 1, automatic=mode == "sonar")


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("precision", PRECISIONS)
@EACH_MODE
def test_a_fit_with_any_fault_equals_one_without_that_batch(mode, precision, automatic):
    for fault, value, index in itertools.product(("loss", "input"), (NAN, INF), (0, 1)):
        check_fit(mode, precision, fault, value, index, automatic)


class Index(L.Callback):
    """Which batch it is."""

    now = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.now = batch_idx


@pytest.mark.parametrize("mode", ["standard", "sonar", "sonar_per_expert", "sonar_exact_clip"])
def test_a_bad_activation_that_the_loss_does_not_see_is_kept_out_by_looking_at_gradients(mode):
    """The last position has no label, and what comes after attention mixes no positions."""
    data = batches(3)
    for batch in data:
        batch["labels"][:, -1] = -100
    seen = {}
    for check in ("loss", "gradient"):
        module, index = LanguageModel(small_model(num_layers=1), fused()), Index()

        def spoil(layer, args, output, index=index):
            mask = torch.zeros_like(output)
            mask[:, -1] = NAN if index.now == 1 else 0.0
            return output + mask

        module.model.model.layers[0].post_attention_layernorm.register_forward_hook(spoil)
        trainer = make_trainer(SonarMoEStrategy(mode=mode, check=check), callbacks=[index])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[01] training steps")
            trainer.fit(module, loader(data))
        finite = all(value.isfinite().all() for value in snapshot(trainer, module).values())
        seen[check] = finite, trainer.strategy.skipped_steps, trainer.strategy.skipped_tensors > 0
    # Unseen, the NaN is in the weights, and then in the next loss.
    assert seen == {"loss": (False, 1, False), "gradient": (True, 0, True)}


def test_both_counts_are_logged(tmp_path):
    module, index = LanguageModel(small_model(num_layers=1), fused()), Index()
    down = next(parameter for name, parameter in module.named_parameters() if name.endswith("down_proj"))
    down.register_hook(lambda grad: grad * NAN if index.now == 1 else grad)
    logger = CSVLogger(tmp_path)
    strategy = SonarMoEStrategy(check="gradient")
    trainer = make_trainer(strategy, logger=logger, log_every_n_steps=1, callbacks=[index])
    with pytest.warns(UserWarning, match="0 training steps updated nothing.*and 1 updates of single tensors"):
        trainer.fit(module, loader(batches(4)))
    rows = [row.split(",") for row in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    column = rows[0].index("skipped_tensors")
    # What is logged in a step is what its earlier ones have left out.
    assert [float(row[column]) for row in rows[1:] if row[column]] == [0.0, 0.0, 1.0, 1.0]
    assert strategy.skipped_tensors == 1


@pytest.mark.slow
def test_the_command_reports_both_counts(tmp_path, monkeypatch):
    from config_space import run as run_command  # heavy: the whole command

    own, seen = LanguageModel.loss, []

    def loss(self, batch):
        seen.append(None)
        return own(self, batch) * (NAN if len(seen) == 2 else 1.0)

    monkeypatch.setattr(LanguageModel, "loss", loss)
    small = ["trainer.max_steps=3", "trainer.limit_val_batches=1", "model.num_layers=1", "data.max_records=200"]
    outcome = run_command(
        [*small, "data.seq_len=64", "callbacks=none", "trainer.log_every_n_steps=1"], tmp_path / "run"
    )
    assert outcome.code == 0, outcome
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["skipped_steps"], result["skipped_tensors"], result["steps"]) == (1, 0, 3)
    assert result["heldout_loss"] > 0
    header, *rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("skipped_steps")
    assert [row.split(",")[column] for row in rows if row.split(",")[column]] == ["0.0", "0.0", "1.0"]
