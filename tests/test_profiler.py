"""The memory callback: its figures, in every way of training, and that it leaves no trace."""

import gc
import json
import types

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_sonar.memory import MemoryProfiler, MemoryReport
from lightning_sonar.mixin import SonarMoEMixin
from lightning_sonar.strategies import SonarMoEStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Lightning 2.6 on torch 2.13.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Gradients are accumulated over several backwards"),
]

EXPERTS, HIDDEN, INNER, VOCAB, LAYERS = 4, 16, 32, 40, 3
PHASES = ["forward", "backward", "clip", "step", "done"]


@pytest.fixture(autouse=True)
def one_thread():
    # Tensors this small only wait for each other on several threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.1)  # [E, 2I, H]
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.1)  # [E, H, I]

    def forward(self, x, weights):  # [T, H], [T, E] -> [T, H]
        gate, up = torch.einsum("th,eih->eti", x, self.gate_up_proj).chunk(2, dim=-1)
        out = torch.einsum("eti,ehi->eth", nn.functional.silu(gate) * up, self.down_proj)
        return torch.einsum("eth,te->th", out, weights)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        return x + self.experts(x, self.router(x).softmax(-1))


class Automatic(pl.LightningModule):
    """A small MoE trained by Lightning's own loop."""

    checkpointing = False
    fail_at = -1

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def loss(self, ids):
        x = self.embed(ids.flatten())
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return nn.functional.cross_entropy(self.head(x), ids.flatten())

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fail_at:
            raise KeyError("broken on purpose")
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Manual(SonarMoEMixin, Automatic):
    """The same, trained by the mixin."""

    def training_step(self, batch, batch_idx):
        return self.sonar_step(self.loss(batch))


class ByHand(Automatic):
    """Manual optimization in plain Lightning."""

    def __init__(self, wrapped=True):
        super().__init__()
        self.automatic_optimization = False
        self.wrapped = wrapped

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=self.wrapped)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()


def loader(batches=100):
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randint(0, VOCAB, (8,), generator=generator) for _ in range(2 * batches)], 2)


def trainer_for(callback, **kwargs):
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": 8,
        "callbacks": [callback],
    }
    return pl.Trainer(**defaults | kwargs)


def fit(module, callback=None, batches=100, **kwargs):
    callback = callback or MemoryProfiler()
    trainer_for(callback, **kwargs).fit(module, loader(batches))
    assert _get_current_dispatch_mode() is None
    return callback.report


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def expert_tensors(module):
    return [p for layer in module.layers for p in layer.experts.parameters()]


def check(report, module):
    """What holds for any report of one of these models on a CPU."""
    assert report.device == "cpu"
    assert report.source == "storage tracker"
    assert report.peak_bytes == max(report.peak_per_phase.values()) == sum(report.split.values())
    assert report.peak_bytes == report.peak_per_phase[report.peak_phase]
    assert report.peak_op
    assert report.split["parameters"] == nbytes(module.parameters())
    timeline = report.timeline
    assert max(timeline["live_bytes"]) == timeline["live_bytes"][timeline["peak_index"]] == report.peak_bytes
    sums = [sum(values) for values in zip(*timeline["by_label"].values(), strict=True)]
    assert sums == timeline["live_bytes"]
    assert timeline["time_ms"] == sorted(timeline["time_ms"])


@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_sonar_holds_one_expert_gradient_and_standard_holds_all(kind):
    module = kind()
    largest = max(nbytes([p]) for p in expert_tensors(module))
    sonar = fit(module, strategy=SonarMoEStrategy(), gradient_clip_val=1.0)
    check(sonar, module)
    assert list(sonar.peak_per_phase) == PHASES
    assert (sonar.peak_expert_gradients, sonar.peak_expert_gradient_bytes) == (1, largest)
    assert sonar.hooks_per_step == 2 * LAYERS
    states = nbytes(module.parameters()) * 2 + 4 * len(list(module.parameters()))
    assert sonar.split["optimizer_state"] == states
    assert sonar.step_time_ms["n"] == 8 - 3 - 2
    assert 0 < sonar.step_time_ms["p10"] <= sonar.step_time_ms["median"] <= sonar.step_time_ms["p90"]
    assert (sonar.warmup_steps, sonar.profiled_steps, sonar.notes) == (3, 2, [])
    assert sonar.profiled_step in (3, 4)

    module = kind()
    standard = fit(module, strategy=SonarMoEStrategy(mode="standard_no_expert_clip"), gradient_clip_val=1.0)
    check(standard, module)
    assert standard.peak_expert_gradients == 2 * LAYERS
    assert standard.peak_expert_gradient_bytes == nbytes(expert_tensors(module))
    assert standard.hooks_per_step == 0
    assert sonar.peak_bytes < standard.peak_bytes


def test_every_gradient_is_dense_where_there_are_no_experts():
    class Dense(Automatic):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))

    module = Dense()
    report = fit(module)
    check(report, module)
    assert report.peak_expert_gradient_bytes == report.split["expert_gradients"] == 0
    assert report.split["dense_gradients"] > 0


@pytest.mark.parametrize(("clip", "phases"), [(1.0, ["clip"]), (None, ["clip", "step"])])
def test_plain_lightning_is_measured_by_its_hooks(clip, phases):
    module = Automatic()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), foreach=True)
    report = fit(module, gradient_clip_val=clip)
    check(report, module)
    assert list(report.peak_per_phase) == ["forward", "backward", *phases, "done"]
    assert report.peak_expert_gradients == 2 * LAYERS
    assert report.hooks_per_step == 0


def test_plain_manual_optimization_tells_clip_from_step():
    module = ByHand()
    report = fit(module)
    check(report, module)
    assert list(report.peak_per_phase) == PHASES
    assert report.peak_expert_gradient_bytes == nbytes(expert_tensors(module))


def test_optimizers_that_step_unseen_do_not_keep_the_watch_open():
    report = fit(ByHand(wrapped=False), max_steps=-1, max_epochs=1)
    assert report is not None
    assert report.profiled_steps == 2
    assert report.step_time_ms["n"] > 20


def test_a_step_with_accumulation_is_all_its_batches():
    module = Automatic()
    report = fit(module, accumulate_grad_batches=3, strategy=SonarMoEStrategy(), max_steps=6)
    check(report, module)
    phases = [phase["phase"] for phase in report.timeline["phases"]]
    assert phases == ["forward", "backward", "done"] * 2 + PHASES
    assert report.peak_expert_gradients == 2 * LAYERS
    assert report.hooks_per_step == 2 * LAYERS
    assert report.step_time_ms["n"] == 1


def test_validation_in_between_is_no_part_of_the_step():
    class Validated(Automatic):
        def validation_step(self, batch, batch_idx):
            self.loss(batch)

    alone = fit(Automatic(), accumulate_grad_batches=2)
    callback = MemoryProfiler()
    trainer = trainer_for(callback, accumulate_grad_batches=2, val_check_interval=1)
    trainer.fit(Validated(), loader(), loader(5))
    assert callback.report.peak_per_phase == alone.peak_per_phase
    assert callback.report.split == alone.split


def test_activation_checkpointing_moves_memory_out_of_forward():
    plain, module = fit(Automatic(), strategy=SonarMoEStrategy()), Automatic()
    module.checkpointing = True
    report = fit(module, strategy=SonarMoEStrategy())
    check(report, module)
    assert report.peak_per_phase["forward"] < plain.peak_per_phase["forward"]
    assert report.peak_expert_gradients == 1


@pytest.mark.parametrize(("steps", "warmup", "watched"), [(1, 0, 1), (2, 1, 1), (3, 1, 2), (4, 2, 2)])
def test_a_short_fit_still_gives_a_report(steps, warmup, watched):
    module = Automatic()
    report = fit(module, max_steps=steps)
    check(report, module)
    assert (report.warmup_steps, report.profiled_steps) == (warmup, watched)
    assert "too short" in report.notes[0]
    assert report.step_time_ms["n"] == max(0, min(1, steps - watched))


def test_a_fit_limited_by_epochs_is_short_as_well():
    report = fit(Automatic(), batches=2, max_steps=-1, max_epochs=1)
    assert (report.warmup_steps, report.profiled_steps) == (1, 1)


def test_a_fit_without_a_watched_step_warns_and_reports_nothing(tmp_path):
    class Stops(Automatic):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    callback = MemoryProfiler(dirpath=tmp_path)
    with pytest.warns(UserWarning, match="watched no training step"):
        fit(Stops(), callback, max_epochs=1)
    assert callback.report is None
    assert not list(tmp_path.iterdir())


def test_a_fit_that_fails_leaves_no_report_no_file_and_no_mode(tmp_path):
    module, callback, strategy = Automatic(), MemoryProfiler(dirpath=tmp_path), SonarMoEStrategy()
    fit(module, callback, strategy=SonarMoEStrategy())
    assert callback.report is not None
    for path in tmp_path.iterdir():
        path.unlink()
    module.fail_at = 4
    with pytest.raises(KeyError, match="broken on purpose"):
        trainer_for(callback, strategy=strategy).fit(module, loader())
    assert _get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)
    assert callback.report is None
    assert not list(tmp_path.iterdir())


def test_each_fit_has_its_own_report():
    callback = MemoryProfiler()
    assert callback.current_peak_bytes is None
    trainer = trainer_for(callback, max_steps=6)
    trainer.fit(Automatic(), loader())
    first = callback.report
    assert callback.current_peak_bytes == first.peak_bytes
    trainer.fit_loop.epoch_loop.max_steps = 12
    trainer.fit(Automatic(), loader())
    second = callback.report
    assert second is not first
    assert second.peak_per_phase == first.peak_per_phase
    assert second.step_time_ms["n"] == 1


def test_files_hold_the_report(tmp_path):
    callback = MemoryProfiler(dirpath=tmp_path / "new" / "folder")
    report = fit(Automatic(), callback)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["memory.json", "memory.png"]
    assert json.loads((folder / "memory.json").read_text()) == report.to_dict()
    assert MemoryReport(**json.loads((folder / "memory.json").read_text())) == report
    assert (folder / "memory.json").stat().st_mode & 0o777 == (folder / "memory.png").stat().st_mode & 0o777

    fit(Automatic(), MemoryProfiler(dirpath=tmp_path / "plain", figure=False))
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["memory.json"]


def test_watching_changes_no_bit_of_the_training():
    watched, alone = Automatic(), Automatic()
    fit(watched, strategy=SonarMoEStrategy(), gradient_clip_val=1.0)
    fit(alone, MemoryProfiler(warmup=10**6), strategy=SonarMoEStrategy(), gradient_clip_val=1.0, max_steps=8)
    for (name, one), two in zip(watched.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_the_callback_keeps_no_model_alive():
    callback = MemoryProfiler()
    fit(Automatic(), callback, strategy=SonarMoEStrategy())
    # Lightning itself puts the module's log methods on every callback.
    reached, waiting = (
        set(),
        [value for name, value in vars(callback).items() if name not in ("log", "log_dict")],
    )
    while waiting:
        thing = waiting.pop()
        if id(thing) in reached or isinstance(thing, (type, types.ModuleType, types.FunctionType)):
            continue
        reached.add(id(thing))
        assert not isinstance(thing, (nn.Module, torch.Tensor, pl.Trainer)), type(thing)
        waiting.extend(gc.get_referents(thing))


def test_a_long_timeline_is_thinned_and_keeps_its_peak():
    class Long(Automatic):
        def loss(self, ids):
            loss = super().loss(ids)
            for _ in range(3000):
                loss = loss * 1.0
            return loss

    module = Long()
    report = fit(module)
    check(report, module)
    assert len(report.timeline["time_ms"]) <= 2000
    assert max(report.timeline["by_label"]["expert_gradients"]) == report.peak_expert_gradient_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_parts_are_named_in_the_report():
    module = Automatic()
    module.layers[0].compile(backend="eager")
    report = fit(module)
    assert "Parts of the model are compiled" in report.notes[0]


@pytest.mark.parametrize("arguments", [{"warmup": -1}, {"steps": 0}, {"warmup": 1.5}])
def test_wrong_arguments_are_named(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"MemoryProfiler\\({name}="):
        MemoryProfiler(**arguments)
