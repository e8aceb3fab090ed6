"""Low-bit optimizers: inside backward as after it, in checkpoints, in chunks, and what is said of them.

torchao's update is compiled; here it runs as the same plain operations, and compiled where a test is slow.
"""

from __future__ import annotations

import functools
import importlib
import sys

import pytest
import torch
from helpers import AutomaticLM, batches, differing, fit, make_trainer, small_model, snapshot
from hydra import compose, initialize_config_dir
from low_bit_cases import BOTH, all_torchao, bnb, eager, needs_bitsandbytes, tensors, train, values  # noqa: F401

from experiments.settings import SettingsError, try_optimizer
from lightning_sonar import SonarMoEStrategy
from lightning_sonar.config_dir import config_dir
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.memory import MemoryProfiler
from lightning_sonar.memory.tracker import StorageTracker
from lightning_sonar.optim import (
    ao_adamw4bit,
    ao_adamw8bit,
    ao_adamw_fp8,
    bnb_adamw8bit,
    flash_adamw,
    is_element_wise,
    largest_update,
    make_states,
)
from lightning_sonar.optim.low_bit_base import class_of
from lightning_sonar.optim.quantised import block_of, chunks_of, is_quantised
from lightning_sonar.optim.states import state_tensors

pytestmark = pytest.mark.usefixtures("deterministic")

# -- the same step, whenever and however it is taken ---------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("needs_bitsandbytes")
def test_bitsandbytes_in_backward_is_bitwise_the_step_after_it(optimizer, automatic, dtype):
    options = {"automatic": automatic, "optimizer": optimizer, "steps": 4}
    after = snapshot(*fit(small_model(dtype=dtype), "standard_no_expert_clip", **options))
    inside = snapshot(*fit(small_model(dtype=dtype), "sonar", **options))
    assert differing(after, inside) == []
    codes = [value.dtype for name, value in inside.items() if name.endswith(".state1") and "experts" in name]
    assert codes == [torch.uint8] * 4


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_stepping_one_tensor_of_bitsandbytes_is_stepping_it_with_all():
    assert differing(train(bnb_adamw8bit)[0], train(bnb_adamw8bit, inside=True)[0]) == []


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_watched_steps_of_bitsandbytes_go_in_chunks_and_change_nothing():
    watched = functools.partial(bnb_adamw8bit, watch_every=1)
    plain, _ = train(functools.partial(bnb_adamw8bit, watch_every=0))
    for chunk in (None, 4096, 2048):
        chunked, optimizer = train(watched, chunk=chunk)
        assert differing(plain, chunked) == []
        assert 0 < largest_update(optimizer) < 0.1


@all_torchao
@pytest.mark.usefixtures("eager")
def test_chunks_and_single_tensors_of_torchao_are_bitwise_the_whole(make):
    whole, optimizer = train(make)
    assert any(is_quantised(value) for value in optimizer.state[optimizer.param_groups[0]["params"][0]].values())
    for options in ({"chunk": 2048}, {"inside": True}, {"chunk": 4096, "inside": True}):
        assert differing(whole, train(make, **options)[0]) == []


@all_torchao
@pytest.mark.usefixtures("eager")
def test_torchao_itself_gives_the_same(make):
    ours, optimizer = train(make, chunk=2048)
    library = functools.partial(optimizer.library)
    parameters = tensors()
    plain = library(parameters, lr=1e-2)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        plain.step()
    assert differing(ours, values(plain, parameters)) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching", "ignore:.*script_method.*:DeprecationWarning")
@all_torchao
def test_compiled_chunks_of_torchao_are_bitwise_the_compiled_whole(make):
    pytest.importorskip("torchao")
    assert differing(train(make)[0], train(make, chunk=4096, inside=True)[0]) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching", "ignore:.*script_method.*:DeprecationWarning")
def test_torchao_trains_compiled_inside_backward_under_the_tracker():
    pytest.importorskip("torchao")
    profiler = MemoryProfiler()
    optimizer = functools.partial(ao_adamw8bit, lr=1e-2)
    after = fit(small_model(dtype=torch.bfloat16), "standard_no_expert_clip", optimizer=optimizer, steps=2)
    inside = fit(small_model(dtype=torch.bfloat16), "sonar", optimizer=optimizer, steps=2, callbacks=[profiler])
    held = [values(trainer.optimizers[0], list(module.parameters())) for trainer, module in (after, inside)]
    assert differing(*held) == []
    with StorageTracker() as tracker:
        tracker.track(state_tensors(inside[0].optimizers[0]))
    assert profiler.report.split["optimizer_state"] == tracker.ledger.live_bytes


@pytest.mark.usefixtures("eager")
def test_what_a_compiled_update_takes_is_in_the_trackers_book():
    parameter = tensors()[0]
    optimizer = ao_adamw8bit([parameter], watch_every=0)
    optimizer.chunk = 4096
    make_states(optimizer)
    parameter.grad = torch.ones_like(parameter)
    with StorageTracker() as tracker:
        optimizer.step()
    counts = 2 * 4  # two chunks' counts of steps
    assert tracker.ledger.peak_bytes == 8 * 4096 + 2 * 4 * 4096 // 256 + counts
    assert tracker.ledger.peak_op == "TorchAOAdamW8bit's compiled update"


# -- chunks --------------------------------------------------------------------------------------------------------


def test_chunks_are_equal_and_of_whole_blocks():
    parameter = torch.empty(48, 64, 4)
    assert chunks_of(parameter, 256, parameter.numel()) == 1
    assert chunks_of(parameter, 256, 3000) == 6  # 8 experts of 256 elements each
    assert chunks_of(parameter, 256, 1) == 48  # an expert is the least
    assert chunks_of(torch.empty(48, 32, 4), 256, 256) == 24  # half a block an expert


def test_a_tensor_that_cannot_be_cut_is_stepped_whole_and_said_so():
    with pytest.warns(UserWarning, match=r"\[5, 100\] is updated whole.*blocks of 128 elements"):
        assert chunks_of(torch.empty(5, 100), 128, 128) == 1


@pytest.mark.usefixtures("eager")
def test_blocks_are_read_from_the_states():
    parameters = tensors()
    for make, block in ((ao_adamw8bit, 256), (ao_adamw4bit, 128), (functools.partial(ao_adamw8bit, block_size=64), 64)):
        optimizer = make(parameters)
        make_states(optimizer)
        assert [block_of(optimizer.state[p]) for p in parameters] == [block, block, 1]


# -- in company ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_the_planned_states_of_a_step_are_those_measured():
    """A real step under the tracker: states are there from the first one, and the update takes nothing."""
    model = small_model(dtype=torch.bfloat16)
    profiler = MemoryProfiler()
    trainer, _ = fit(model, "sonar", optimizer=functools.partial(bnb, watch_every=0), steps=3, callbacks=[profiler])
    with StorageTracker() as tracker:
        tracker.track(state_tensors(trainer.optimizers[0]))
    assert profiler.report.split["optimizer_state"] == tracker.ledger.live_bytes
    assert tracker.ledger.live_bytes < 0.6 * 4 * sum(p.numel() for p in model.parameters())


@BOTH
@pytest.mark.usefixtures("needs_bitsandbytes")
def test_a_loss_that_is_not_finite_updates_nothing(optimizer):
    data = batches(3)
    clean = snapshot(*fit(small_model(), "sonar", optimizer=optimizer, data=[data[0], data[2]], steps=2))
    module = AutomaticLM(small_model(), optimizer)
    step, losses = module.training_step, iter((1.0, torch.nan, 1.0))
    module.training_step = lambda batch, batch_idx: step(batch, batch_idx) * next(losses)
    trainer = make_trainer(SonarMoEStrategy(), 3)
    with pytest.warns(UserWarning, match="1 training steps updated nothing"):
        trainer.fit(module, ResumableLoader(data, ShuffledBatches(3, 1, seed=0), collate_fn=lambda one: one[0]))
    assert trainer.strategy.skipped_steps == 1
    counts = {state["step"] for state in trainer.optimizers[0].state.values() if "state1" in state}
    assert counts == {2}
    assert clean.keys() == snapshot(trainer, module).keys()


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_block_wise_states_are_no_slices_of_experts():
    parameters = tensors()
    assert not is_element_wise(bnb_adamw8bit(parameters))
    with pytest.raises(ValueError, match="BitsAndBytesAdamW8bit is not known to be one"):
        fit(small_model(), "sonar_per_expert", optimizer=bnb, steps=1)


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_overrides_by_position_do_not_reach_another_tensor():
    manager = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    before = dict(manager.index2config)
    manager.index2config[(0, 0)] = {"lr": 0.0, "optim_bits": 32}
    try:
        assert differing(train(bnb_adamw8bit)[0], train(bnb_adamw8bit, inside=True)[0]) == []
    finally:
        manager.index2config.clear()
        manager.index2config.update(before)


@pytest.mark.usefixtures("needs_bitsandbytes")
def test_optimizers_of_two_libraries_are_told_apart():
    pytest.importorskip("torchao")
    kinds = [type(make(tensors())) for make in (bnb_adamw8bit, ao_adamw8bit, ao_adamw4bit, ao_adamw_fp8)]
    assert len({(kind.__module__, kind.__qualname__) for kind in kinds}) == 4


@pytest.mark.parametrize(
    ("choice", "package"),
    [("bnb_adamw8bit_experts", "bitsandbytes"), ("adamw4bit", "torchao"), ("flash_adamw", "flashoptim")],
)
def test_a_run_names_the_extra_of_a_missing_package(choice, package, monkeypatch):
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
        cfg = compose("config", overrides=[f"optimizer={choice}", "optimizer.lr=1e-3"])
    class_of.cache_clear()
    try:
        with pytest.raises(SettingsError, match=rf"^optimizer=.*pip install 'lightning-sonar\[{package}\]'"):
            try_optimizer(cfg)
    finally:
        class_of.cache_clear()


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (bnb_adamw8bit, "bitsandbytes", "bitsandbytes"),
        (ao_adamw8bit, "torchao", "torchao"),
        (ao_adamw4bit, "torchao", "torchao"),
        (ao_adamw_fp8, "torchao", "torchao"),
        (flash_adamw, "flashoptim", "flashoptim"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(make, package, extra, monkeypatch):
    class_of.cache_clear()

    def missing(name, *args):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return importlib.import_module(name, *args)

    monkeypatch.setattr("lightning_sonar.optim.low_bit_base.import_module", missing)
    with pytest.raises(ImportError, match=rf"needs the package {package}.*pip install 'lightning-sonar\[{extra}\]'"):
        make([torch.nn.Parameter(torch.zeros(2))])
    class_of.cache_clear()


def test_flash_adamw_says_that_it_needs_a_gpu():
    pytest.importorskip("flashoptim")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="CUDA devices only"):
        flash_adamw([torch.nn.Parameter(torch.zeros(2))])
