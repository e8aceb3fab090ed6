"""Several ranks with shards of the model, as two gloo processes; see `distributed_cases`."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed_cases import CASES, QUICK, quick, thorough
from distributed_run import data_of, launch, resumable
from helpers import PRECISION, AutomaticLM, differing, fused, make_trainer, small_model, snapshot

from lightning_sonar import SonarMoEFSDPStrategy, SonarMoEStrategy
from lightning_sonar.strategies.sharding import FreedCheck


def case(name):
    """A case that every run runs, or one that takes longer."""
    return pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)


def ranks_of(name):
    return [rank[name] for rank in (quick() if name in QUICK else thorough())]


EQUAL = [name for name in CASES if name.startswith("fsdp_") and not name.endswith(("memory", "not_freed"))]


@pytest.mark.parametrize("name", [case(name) for name in EQUAL])
def test_two_ranks_are_bitwise_one_process_or_plain_fsdp(name):
    ranks = ranks_of(name)
    for rank in ranks:
        found, expected = rank["found"], rank["expected"]
        assert differing(found["values"], expected["values"]) == []
        assert found["skipped"] == expected["skipped"]
        assert found["hooks"] == 0
        if expected["norms"] and not found["skipped"]:
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert differing(ranks[0]["found"]["values"], ranks[1]["found"]["values"]) == []


def test_gradients_on_several_meshes_are_clipped_by_one_norm():
    for rank in quick():
        found = rank["two_meshes"]
        assert found["plain"]
        assert torch.stack(found["norms"]).tolist() == pytest.approx([float(found["norms"][1])] * 3, rel=1e-6)
        for value, expected in zip(found["grads"], found["expected"], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def test_experts_layers_and_root_are_units_of_their_own():
    for rank in quick():
        found = rank["units"]
        assert found["units"] == [
            *("", "model.layers.0", "model.layers.0.mlp.experts", "model.layers.1", "model.layers.1.mlp.experts")
        ]
        assert found["sharded"] == found["all"]
        assert "sharded already" in found["again"]


@pytest.mark.slow
def test_experts_that_share_a_unit_with_others_are_refused_because_nothing_is_freed():
    for rank in thorough():
        message = rank["fsdp_not_freed"]["message"]
        assert "The gradients of 4 tensors were used inside backward but their memory was not freed" in message
        assert "shard_moe_(model, mesh)" in message


@pytest.mark.slow
def test_one_layers_expert_gradients_are_alive_at_a_time_on_each_rank():
    for rank in thorough():
        plain, sonar = rank["fsdp_memory"]["plain"], rank["fsdp_memory"]["sonar"]
        experts = plain["split"]["expert_gradients"]
        assert plain["peak_expert_gradient_bytes_per_rank"] == [experts, experts]
        assert sonar["peak_expert_gradient_bytes_per_rank"] == [experts // 2, experts // 2]
        assert plain["peak_per_phase"]["clip"] - sonar["peak_per_phase"]["clip"] == experts
        assert sonar["peak_bytes"] < plain["peak_bytes"]
        # The graph that the second pass needs outweighs what is saved in a model as small as this one.
        assert rank["fsdp_memory"]["exact"]["peak_expert_gradient_bytes_per_rank"] == [experts // 2, experts // 2]


@pytest.mark.slow
def test_transformers_expert_parallelism_trains_with_in_backward_updates():
    ranks = ranks_of("expert_parallel")
    for rank in ranks:
        sonar, standard = rank["sonar"], rank["standard_no_expert_clip"]
        # Three of six experts on each rank, each whole.
        assert sonar["shapes"] == [[3, 32, 32], [3, 32, 16]] * 2
        assert differing(sonar["values"], standard["values"]) == []
        assert sonar["norms"] == standard["norms"] == pytest.approx(rank["one_process"]["norms"], rel=1e-5)
        # Tokens of both ranks meet in one sum here, which rounds otherwise than the sum of two ranks' sums.
        for name, value in rank["one_process"]["values"].items():
            torch.testing.assert_close(sonar["values"][name], value, rtol=1e-4, atol=1e-5)
        assert sonar["expert_gradients"] == [half // 2 for half in standard["expert_gradients"]]
    assert differing(ranks[0]["sonar"]["values"], ranks[1]["sonar"]["values"]) == []


@functools.cache
def saved():
    """Checkpoints of two ranks, and what one rank and two ranks read from them."""
    kinds = ("ddp", "sharded", "full")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = launch([f"save_{kind}" for kind in kinds], folder)
        alone = folder / "alone"
        alone.mkdir()
        (read,) = launch([f"load_{kind}" for kind in kinds], alone, world=1)
        single = {kind: on_one_device(folder / f"{kind}.ckpt") for kind in ("ddp", "full")}
        wider = folder / "wider"
        wider.mkdir()
        three = launch([f"load_{kind}" for kind in kinds], wider, world=3)
    return pair, read, single, three


def on_one_device(path):
    module = AutomaticLM(small_model(seed=7), fused())
    trainer = make_trainer(SonarMoEStrategy(), 2, PRECISION[torch.float32], max_epochs=-1)
    trainer.fit(module, resumable(data_of(0, 8)), ckpt_path=path, weights_only=True)
    return snapshot(trainer, module)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "sharded", "full"])
def test_a_resumed_run_ends_bitwise_as_an_undisturbed_one(kind):
    for rank in saved()[0]:
        found = rank[f"save_{kind}"]
        assert differing(found["found"]["values"], found["expected"]["values"]) == []
        assert found["is_folder"] == (kind == "sharded")
        assert found["left"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "sharded", "full"])
def test_another_number_of_ranks_reads_every_checkpoint_bitwise(kind):
    pair, read, single, three = saved()
    expected = pair[0][f"save_{kind}"]["saved"]["values"]
    assert differing(read[f"load_{kind}"]["values"], expected) == []
    for rank in three:
        assert differing(rank[f"load_{kind}"]["values"], expected) == []
    if kind in single:
        assert differing(single[kind], expected) == []


def test_one_hook_an_expert_is_refused_where_a_shard_holds_some_experts_only():
    with pytest.raises(ValueError, match="one hook an expert"):
        SonarMoEFSDPStrategy(mode="sonar_per_expert")


def test_gradients_that_are_still_in_memory_when_the_clip_begins_are_named(monkeypatch):
    class Sharded:
        """A DTensor, as far as the check looks at one."""

        def __init__(self):
            self.part = torch.ones(4)

        def to_local(self):
            return self.part

    monkeypatch.setattr("lightning_sonar.strategies.sharding.DTensor", Sharded)
    freed, kept = (SimpleNamespace(grad=Sharded(), shape=(4,)) for _ in range(2))
    check = FreedCheck({id(freed): "experts.up", id(kept): "experts.down"})
    for tensor in (freed, kept):
        check.on_gradient(tensor)
    freed.grad = None
    check.on_phase("backward")
    with pytest.raises(RuntimeError, match="gradients of 1 tensors .* not freed, experts.down among them"):
        check.on_phase("clip")
    check.on_phase("clip")  # only the first step is looked at
