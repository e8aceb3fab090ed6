"""Several ranks with whole copies of the model, as two gloo processes; see `distributed_cases`."""

from __future__ import annotations

import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
from distributed_cases import CASES, QUICK, quick, thorough
from distributed_run import launch, start, wait
from helpers import differing

from lightning_sonar import MODES, SonarMoEDDPStrategy
from lightning_sonar.strategies.averaging import RankAverage


def case(name):
    """A case that every run runs, or one that takes longer."""
    return pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)


def ranks_of(name):
    return [rank[name] for rank in (quick() if name in QUICK else thorough())]


EQUAL = [
    name
    for name in CASES
    if name.startswith("ddp_")
    and not name.endswith(("memory", "refused", "stuck", "seeds", "per_microbatch"))
    and "load" not in name
]


@pytest.mark.parametrize("name", [case(name) for name in EQUAL])
def test_two_ranks_are_bitwise_one_process_or_plain_ddp(name):
    ranks = ranks_of(name)
    for rank in ranks:
        found, expected = rank["found"], rank["expected"]
        assert differing(found["values"], expected["values"]) == []
        assert found["skipped"] == expected["skipped"]
        # Everything is taken off again: hooks, and what hides parameters from DDP.
        assert found["hooks"] == 0
        assert found["left_over"] == []
        if expected["norms"] and not found["skipped"]:
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert differing(ranks[0]["found"]["values"], ranks[1]["found"]["values"]) == []


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    for rank in ranks_of("ddp_nan"):
        assert rank["found"]["skipped"] == 1
        assert all(value.isfinite().all() for value in rank["found"]["values"].values())


def test_gradients_are_averaged_in_one_order_whatever_the_order_they_come_in():
    first, second = (rank["average"] for rank in quick())
    assert first["order"] == second["order"] == [["c", "b", "a"], ["a", "c", "b"]]
    ramp = torch.arange(6.0).reshape(2, 3)
    mean, half, other = 1.5 * ramp, 0.5 * ramp, ramp
    #        a: rank 0  b: both  c: both  d: none;  then a: rank 1, b and c: both, d: none
    expected = [half, mean, mean, None, other, mean, mean, None]
    for rank in (first, second):
        for value, wanted in zip(rank["values"], expected, strict=True):
            assert value.numel() == 0 if wanted is None else torch.equal(value, wanted)


def test_what_earlier_microbatches_accumulated_is_averaged_where_the_last_one_does_not_reach_it():
    for rank in quick():
        found = rank["average_left"]
        assert found["a"].tolist() == [1.5, 1.5]
        assert found["b"].tolist() == [2.0, 2.0]
        assert found["c"] is None


@pytest.mark.slow
def test_ranks_that_begin_with_different_weights_train_those_of_rank_0():
    ranks = ranks_of("ddp_seeds")
    assert differing(ranks[0]["values"], ranks[1]["values"]) == []
    assert differing(ranks[0]["values"], ranks_of("ddp_plain_fp32")[0]["found"]["values"]) != []


@pytest.mark.slow
def test_updates_once_a_microbatch_keep_the_ranks_equal():
    ranks = ranks_of("ddp_per_microbatch")
    assert differing(ranks[0]["values"], ranks[1]["values"]) == []
    steps = {name: value for name, value in ranks[0]["values"].items() if name.endswith(".step")}
    assert {float(v) for n, v in steps.items() if "experts" in n} == {8.0}
    assert {float(v) for n, v in steps.items() if "experts" not in n} == {4.0}


@pytest.mark.slow
def test_expert_gradients_are_freed_one_by_one_and_none_is_in_a_bucket():
    for rank in thorough():
        plain, sonar = rank["ddp_memory"]["plain"], rank["ddp_memory"]["sonar"]
        experts = plain["split"]["expert_gradients"]
        assert plain["peak_expert_gradient_bytes_per_rank"] == [experts, experts]
        # Two layers of two tensors, the larger of two thirds. gloo's thread may hold the one before a moment longer.
        assert set(sonar["peak_expert_gradient_bytes_per_rank"]) <= {experts // 3, experts // 2}
        assert plain["bucket_bytes"] - sonar["bucket_bytes"] == experts
        assert sonar["peak_bytes"] < plain["peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["per_tensor", "per_expert", "lagged"])
def test_expert_clips_measure_the_averaged_gradient(clip):
    ranks = ranks_of(f"expert_clip_{clip}")
    assert differing(ranks[0]["ddp"]["values"], ranks[1]["ddp"]["values"]) == []
    for name, value in ranks[0]["ddp"]["values"].items():
        torch.testing.assert_close(ranks[0]["fsdp"]["values"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_tensor_that_one_rank_does_not_use_ends_all_ranks_with_its_name(tmp_path):
    codes, logs = wait(start(["ddp_unused_refused"], tmp_path), tmp_path, timeout=90)
    assert all(codes)
    assert "model.model.layers.0.mlp.experts" in logs
    assert "find_unused_parameters=True" in logs


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_the_timeout_with_an_error(tmp_path):
    processes = start(["ddp_stuck"], tmp_path)
    code = processes[0].wait(80)  # the other one sleeps for longer than that
    assert processes[1].poll() is None
    processes[1].kill()
    wait(processes, tmp_path, timeout=10)
    assert code != 0
    assert "8000ms" in (tmp_path / "log0.txt").read_text()


def test_the_trainer_knows_the_strategies_by_name():
    for name in ("sonar_moe_ddp", "sonar_moe_fsdp"):
        trainer = L.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        assert trainer.strategy.strategy_name == name


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_can_be_given(mode):
    assert SonarMoEDDPStrategy(mode=mode, find_unused_parameters=True).mode == MODES[mode]


@pytest.mark.slow
def test_one_rank_alone_trains_as_a_single_device_does(tmp_path):
    # In a process of its own: the process group would stay.
    (alone,) = launch(["ddp_sonar_fp32"], tmp_path, world=1)
    found = alone["ddp_sonar_fp32"]
    assert differing(found["found"]["values"], found["expected"]["values"]) == []
    assert math.isfinite(sum(found["found"]["norms"]))


@pytest.fixture
def other_rank(monkeypatch):
    """Rank 0 of two without the other process: it adds 1.0 to every sum, and has used every tensor."""

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
        assert group == "ours"
        tensor.copy_(torch.ones_like(tensor)) if op == dist.ReduceOp.MAX else tensor.add_(1.0)

    stand_in = SimpleNamespace(
        get_world_size=lambda group: 2,
        get_global_rank=lambda group, rank: rank,
        broadcast_object_list=lambda objects, src, group: None,
        all_reduce=all_reduce,
        ReduceOp=dist.ReduceOp,
    )
    monkeypatch.setattr("lightning_sonar.strategies.averaging.dist", stand_in)
    return SimpleNamespace(group="ours")


def test_an_average_is_the_sum_over_ranks_divided_by_their_number(other_rank):
    tensor = torch.nn.Parameter(torch.zeros(3))
    tensor.grad = torch.tensor([2.0, 4.0, 6.0])
    assert RankAverage({"a": tensor}, other_rank).take(tensor) == [tensor]
    assert tensor.grad.tolist() == [2.0, 3.0, 4.0]


def test_a_gradient_waits_for_those_before_it_and_what_is_missing_takes_part_with_zeros(other_rank):
    a, b, c = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    average = RankAverage({"a": a, "b": b, "c": c}, other_rank, find_unused=True)
    a.grad, c.grad = torch.full((2,), 4.0), torch.full((2,), 6.0)
    # The order is that of the parameters, backwards.
    assert average.take(a) == []
    assert [id(tensor) for tensor in average.take(c)] == [id(c)]
    assert [id(tensor) for tensor in average.finish()] == [id(b), id(a)]
    assert [tensor.grad.tolist() for tensor in (a, b, c)] == [[3.0, 3.0], [1.0, 1.0], [4.0, 4.0]]


def test_a_gradient_in_its_turn_is_averaged_without_looking_at_all_others(other_rank):
    tensors = {str(index): torch.nn.Parameter(torch.zeros(1)) for index in range(50)}
    average = RankAverage(tensors, other_rank)
    looked: list[object] = []
    average._order = [lambda ref=ref: looked.append(ref) or ref() for ref in average._order]
    for tensor in reversed(tensors.values()):
        tensor.grad = torch.ones(1)
        assert len(average.take(tensor)) == 1
    assert len(looked) <= 3 * len(tensors)
