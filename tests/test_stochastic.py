"""Stochastic rounding keeps small updates, and its random bits depend on nothing but where an element is."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import batches, differing, fit, fused, make_trainer, small_model, snapshot
from torch import Tensor, nn

from lightning_sonar import FusedAdamW, SonarMoEStrategy
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.memory.tracker import StorageTracker
from lightning_sonar.optim import reference, step_slice, step_tensor
from lightning_sonar.optim.reference import adamw_reference_
from lightning_sonar.optim.stochastic import StochasticRounding, global_offset, philox, round_to_bf16
from lightning_sonar.optim.update import adamw_

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
ROUNDING = StochasticRounding(seed=11, position=2)


def tensors(shape: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """Parameter, moments and step in bf16 in mid-training; and a gradient."""
    generator = torch.Generator().manual_seed(0)
    p, m, v, g = (torch.randn(shape, generator=generator).to(BF16) for _ in range(4))
    return [p, m * 0.1, v.square() * 0.01, torch.tensor(3.0)], g


def updated(values: list[Tensor], grad: Tensor, **settings: Any) -> list[Tensor]:
    values = [value.clone() for value in values]
    adamw_(values[0], grad, *values[1:], **{**SETTINGS, "rounding": ROUNDING, **settings})
    return values


# The bits


# From the known answers that come with Random123.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox(key[0] | key[1] << 32, *(torch.tensor(word) for word in counter))
    assert [int(word) for word in words] == answer


def test_bits_of_a_part_are_those_of_the_whole() -> None:
    step = torch.tensor(5.0)
    bits = ROUNDING.bits_for(torch.empty(4, 6, 5), step)
    for e in range(4):
        part = dataclasses.replace(ROUNDING, offset=30 * e)
        assert torch.equal(part.bits_for(torch.empty(6, 5), step), bits[e])
    # An element's place is its place in memory: every second column, and the other order of dimensions.
    gaps = dataclasses.replace(ROUNDING, offset=1)
    assert torch.equal(gaps.bits_for(torch.empty(4, 6, 5)[..., 1::2], step), bits[..., 1::2])
    assert torch.equal(ROUNDING.bits_for(torch.empty(4, 30).t(), step), bits.view(4, 30).t())


def test_bits_differ_between_seeds_parameters_steps_and_elements() -> None:
    like = torch.empty(100_000)
    first = ROUNDING.bits_for(like, torch.tensor(1.0))
    others = [
        StochasticRounding(12, 2).bits_for(like, torch.tensor(1.0)),
        StochasticRounding(11 + 2**40, 2).bits_for(like, torch.tensor(1.0)),
        StochasticRounding(11, 3).bits_for(like, torch.tensor(1.0)),
        StochasticRounding(11, 2, 2**36).bits_for(like, torch.tensor(1.0)),
        ROUNDING.bits_for(like, torch.tensor(2.0)),
    ]
    for a, b in itertools.combinations([first, *others], 2):
        # 1 in 65,536 agrees by chance: 1.5 of 100,000.
        assert int((a == b).sum()) < 12
    assert first.min() >= 0
    assert first.max() < 2**16
    # Of 2**16 values, 100,000 uniform draws leave out 1 in exp(100,000 / 2**16), 14,246, with a deviation of 80 or so.
    assert 2**16 - first.unique().numel() == pytest.approx(14_246, abs=500)


# The rounding


def test_rounding_is_unbiased_and_lands_on_a_neighbour() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(64, generator=generator) * torch.logspace(-20, 20, 64)
    rounds = 4096
    bits = ROUNDING.bits_for(torch.empty(rounds, 64), torch.tensor(1.0))
    rounded = round_to_bf16(value.expand(rounds, 64).contiguous(), bits).double()
    down = (value.view(torch.int32) & ~0xFFFF).view(FP32).double()
    up = ((value.view(torch.int32) & ~0xFFFF) + 0x10000).view(FP32).double()
    assert ((rounded == down) | (rounded == up)).all()
    gap = (up - down).abs()
    # Up with a probability within (0, 1): the mean of 4,096 lies within 5 standard errors of at most 1/2 / 64.
    assert ((rounded.mean(0) - value.double()).abs() <= 5 * gap / 2 / rounds**0.5).all()
    nearest = value.to(BF16).double()
    assert ((nearest - value.double()).abs() > 5 * gap / 2 / rounds**0.5).any(), "rounding to nearest would pass too"


def test_what_bf16_holds_exactly_stays_as_it_is() -> None:
    special = [0.0, -0.0, 1.0, -3.0, float("inf"), -float("inf"), 2.0**-133, 3.3895313892515355e38]
    value = torch.tensor(special)
    for bits in (0, 1, 0xFFFF):
        rounded = round_to_bf16(value, torch.full(value.shape, bits))
        assert torch.equal(rounded.float().view(torch.int32), value.view(torch.int32))
    # A NaN whose mantissa lies below the cut.
    nan = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(FP32)
    for bits in (0, 0xFFFF):
        assert round_to_bf16(nan, torch.full(nan.shape, bits)).isnan().all()


def test_small_updates_survive_and_are_lost_when_rounded_to_nearest() -> None:
    def moved(dtype: torch.dtype, stochastic: bool) -> Tensor:
        weight = nn.Parameter(torch.full((2048,), 1.5, dtype=dtype))
        # With beta2 = 0.999 bf16 loses the increments of the second moment too, which is not the subject here.
        settings = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.01}
        optimizer = FusedAdamW([weight], **settings, stochastic_rounding=stochastic)
        for _ in range(1000):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach().double() - 1.5

    true = moved(FP32, stochastic=False).mean()
    assert true < -0.009
    assert (moved(BF16, stochastic=False) == 0).all()
    assert moved(BF16, stochastic=True).mean() == pytest.approx(true.item(), rel=0.05)


# The update


def test_a_tensor_in_chunks_equals_the_tensor_at_once_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    values, grad = tensors((3, 7, 50))
    total, in_chunks = torch.tensor(0.0), torch.tensor(0.0)
    whole = [value.clone() for value in values]
    adamw_reference_(whole[0], grad, *whole[1:], **SETTINGS, rounding=ROUNDING, grad_sq_sum=total)
    monkeypatch.setattr(reference, "CHUNK", 100)
    parts = updated(values, grad, grad_sq_sum=in_chunks)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)
    assert in_chunks.item() == pytest.approx(total.item(), rel=1e-6)
    assert not torch.equal(whole[0], updated(values, grad, rounding=None)[0])


def test_temporaries_do_not_grow_with_the_tensor() -> None:
    def peak(n: int) -> int:
        weight = nn.Parameter(torch.ones(n, dtype=BF16))
        weight.grad = torch.ones_like(weight)
        optimizer = FusedAdamW([weight], stochastic_rounding=True)
        optimizer.init_state()
        with StorageTracker() as tracker:
            optimizer.step()
        return tracker.ledger.peak_bytes

    assert peak(2 * reference.CHUNK) <= peak(reference.CHUNK) + 1024
    assert peak(reference.CHUNK) <= 41 * reference.CHUNK


def test_only_the_weights_are_rounded_at_random() -> None:
    values, grad = tensors((64, 32))
    rounded = updated(values, grad)
    plain = [value.clone() for value in values]
    adamw_reference_(plain[0], grad, *plain[1:], **SETTINGS)
    assert not torch.equal(rounded[0], plain[0])
    for a, b in zip(rounded[1:], plain[1:], strict=True):
        assert torch.equal(a, b)


def test_memory_order_strides_and_gaps_change_nothing() -> None:
    values, grad = tensors((64, 32))
    right = updated(values, grad)
    turned = grad.t().contiguous().t()
    assert torch.equal(updated(values, turned)[0], right[0])
    moved = [values[0], values[1].t().contiguous().t(), *values[2:]]
    got = [value.clone() for value in moved]
    adamw_(got[0], grad, *got[1:], **SETTINGS, rounding=ROUNDING)
    assert torch.equal(got[0], right[0])


def test_nothing_moves_while_the_flag_is_up() -> None:
    values, grad = tensors((64, 32))
    total = torch.tensor(1.0)
    after = updated(values, grad, found_inf=torch.tensor(1.0), grad_sq_sum=total)
    for a, b in zip(values, after, strict=True):
        assert torch.equal(a, b)
    assert total.item() == 1.0
    down = updated(values, grad, found_inf=torch.tensor(0.0))
    for a, b in zip(updated(values, grad), down, strict=True):
        assert torch.equal(a, b)


def test_an_empty_shard_still_counts_its_steps() -> None:
    values, grad = tensors((0, 4))
    assert updated(values, grad)[3].item() == 4


def test_fp32_weights_are_not_affected() -> None:
    def trained(**options: Any) -> Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 100))
        optimizer = FusedAdamW([weight], **options)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weight

    assert torch.equal(trained(stochastic_rounding=True), trained())


# The optimizer


SHAPES = [(6, 8, 8), (5, 7), (6, 5, 7), (1,)]


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(BF16)) for shape in SHAPES]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()
        optimizer.zero_grad()


def in_two_groups(params: list[nn.Parameter], **options: Any) -> FusedAdamW:
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 1e-2}]
    return FusedAdamW(groups, lr=1e-3, stochastic_rounding=True, **options)


def assert_same(left: list[nn.Parameter], right: list[nn.Parameter]) -> None:
    for i, (p, q) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(p, q), i


@pytest.mark.parametrize("how", ["tensors", "slices"])
def test_stepping_parts_in_any_order_equals_stepping_all_bitwise(how: str) -> None:
    ours, theirs = make_params(), make_params()
    a, b = in_two_groups(ours), in_two_groups(theirs)
    train(a, ours, range(3))
    for step in range(3):
        set_grads(theirs, step)
        for i in reversed(range(len(theirs))):
            group = b.param_groups[min(i, 1)]
            if how == "tensors" or theirs[i].dim() < 3:
                step_tensor(b, group, theirs[i])
                continue
            pending: dict[str, Any] = {}
            for index in (2, 0, 3, 5, 1, 4):
                step_slice(b, group, theirs[i], index, pending)
    assert_same(ours, theirs)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"])


def test_runs_repeat_themselves_and_differ_by_seed() -> None:
    runs = []
    for seed in (0, 0, 1):
        params = make_params()
        train(in_two_groups(params, seed=seed), params, range(2))
        runs.append(params)
    assert_same(runs[0], runs[1])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_equal_tensors_at_different_positions_get_different_bits() -> None:
    params = [nn.Parameter(torch.full((1000,), 1.5, dtype=BF16)) for _ in range(2)]
    optimizer = FusedAdamW(params, lr=1e-3, stochastic_rounding=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(*params)


def test_a_parameter_put_in_place_of_another_takes_its_position() -> None:
    ours, theirs = make_params(), make_params()
    a, b = in_two_groups(ours), in_two_groups(theirs)
    train(a, ours, range(1))
    train(b, theirs, range(1))
    other = nn.Parameter(theirs[2].detach().clone())
    b.state[other] = b.state.pop(theirs[2])
    b.param_groups[1]["params"][1] = theirs[2] = other
    train(a, ours, range(1, 2))
    train(b, theirs, range(1, 2))
    assert_same(ours, theirs)


@pytest.mark.parametrize("keep", [True, False], ids=["same options", "options from the checkpoint"])
def test_a_loaded_run_goes_on_bitwise(keep: bool) -> None:
    ours, theirs = make_params(), make_params()
    a = in_two_groups(ours, seed=5)
    train(a, ours, range(2))
    saved = copy.deepcopy(a.state_dict())
    with torch.no_grad():
        for p, q in zip(theirs, ours, strict=True):
            p.copy_(q)
    groups = [{"params": theirs[:1]}, {"params": theirs[1:]}]
    b = in_two_groups(theirs, seed=5) if keep else FusedAdamW(groups)
    b.load_state_dict(saved)
    train(a, ours, range(2, 4))
    train(b, theirs, range(2, 4))
    assert_same(ours, theirs)


def test_copies_go_on_like_the_original() -> None:
    ours = make_params()
    a = in_two_groups(ours, seed=5)
    train(a, ours, range(2))
    b = copy.deepcopy(a)
    theirs = [p for group in b.param_groups for p in group["params"]]
    b.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert b.param_groups[-1]["seed"] == 5
    train(a, ours, range(2, 4))
    train(b, theirs, range(2, 4))
    assert_same(ours, theirs)


def test_its_checkpoint_loads_into_plain_adamw_and_the_other_way() -> None:
    ours, theirs, third = make_params(), make_params(), make_params()
    a = in_two_groups(ours, seed=5)
    train(a, ours, range(2))
    assert {tuple(state) for state in a.state.values()} == {("step", "exp_avg", "exp_avg_sq")}
    plain = torch.optim.AdamW([{"params": theirs[:1]}, {"params": theirs[1:]}], fused=True)
    plain.load_state_dict(copy.deepcopy(a.state_dict()))
    train(plain, theirs, range(2, 3))
    for p, q in zip(ours, theirs, strict=True):
        assert plain.state[q]["step"] == a.state[p]["step"] + 1
    # AdamW's own state says nothing of rounding: what the optimizer was made with stays.
    fresh = torch.optim.AdamW([{"params": theirs[:1]}, {"params": theirs[1:]}], fused=True)
    c = in_two_groups(third, seed=5)
    c.load_state_dict(fresh.state_dict())
    assert [(g["stochastic_rounding"], g["seed"]) for g in c.param_groups] == [(True, 5)] * 2


def test_a_group_chooses_for_itself() -> None:
    params = make_params()
    groups = [{"params": params[:1], "stochastic_rounding": True}, {"params": params[1:]}]
    optimizer = FusedAdamW(groups, seed=9)
    assert [(g.get("stochastic_rounding", False), g.get("seed")) for g in optimizer.param_groups] == [
        (True, 9),
        (False, None),
    ]
    others = make_params()
    plain = FusedAdamW(others)
    train(optimizer, params, range(1))
    train(plain, others, range(1))
    assert not torch.equal(params[0], others[0])
    assert_same(params[1:], others[1:])


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, None, "7"])
@pytest.mark.parametrize("where", ["constructor", "group", "live group"])
def test_a_seed_out_of_range_is_refused(seed: Any, where: str) -> None:
    params = make_params()
    optimizer = FusedAdamW(params[:1], stochastic_rounding=True)
    before = params[0].clone()

    def give() -> None:
        if where == "constructor":
            FusedAdamW(params, stochastic_rounding=True, seed=seed)
        elif where == "group":
            optimizer.add_param_group({"params": params[1:], "stochastic_rounding": True, "seed": seed})
        else:
            optimizer.param_groups[0]["seed"] = seed
            train(optimizer, params, range(1))

    with pytest.raises(ValueError, match=r"seed=.*expected a whole number from 0 to 2\*\*63 - 1"):
        give()
    assert len(optimizer.param_groups) == 1
    assert torch.equal(params[0], before)


def test_switched_on_in_a_live_group_it_takes_the_optimizers_seed_bitwise() -> None:
    ours, theirs = make_params(), make_params()
    live, given = FusedAdamW(ours, seed=9), FusedAdamW(theirs, stochastic_rounding=True, seed=9)
    live.param_groups[0]["stochastic_rounding"] = True
    train(live, ours, range(2))
    train(given, theirs, range(2))
    assert_same(ours, theirs)


# Whole training


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("automatic", [False, True], ids=["manual", "automatic"])
def test_every_mode_matches_standard_without_expert_clip_bitwise(automatic: bool) -> None:
    def trained(mode: str, **options: Any) -> dict[str, Tensor]:
        model = small_model(dtype=BF16)
        return snapshot(*fit(model, mode, automatic=automatic, steps=4, optimizer=fused(1e-3, **options)))

    on = {"stochastic_rounding": True, "seed": 3}
    standard = trained("standard_no_expert_clip", **on)
    for mode in ("sonar", "sonar_per_expert"):
        assert differing(standard, trained(mode, **on)) == [], mode
    assert len(differing(standard, trained("sonar"))) > len(standard) / 4


@pytest.mark.usefixtures("deterministic")
def test_a_run_broken_off_in_one_mode_resumes_in_another_bitwise(tmp_path: Path) -> None:
    data = batches(6)
    made = fused(1e-3, stochastic_rounding=True, seed=3)

    def run(mode: str, steps: int, ckpt: Path | None = None) -> tuple[L.Trainer, L.LightningModule]:
        module = LanguageModel(small_model(dtype=BF16), made)
        trainer = make_trainer(SonarMoEStrategy(mode=mode), steps, "bf16-true", max_epochs=-1)
        order = ShuffledBatches(len(data), 1, seed=0)
        shuffled = ResumableLoader(data, order, collate_fn=lambda examples: examples[0])
        trainer.fit(module, shuffled, ckpt_path=ckpt, weights_only=True if ckpt else None)
        assert trainer.global_step == steps
        return trainer, module

    whole = snapshot(*run("sonar", 10))
    first, _ = run("sonar_per_expert", 4)
    first.save_checkpoint(tmp_path / "some.ckpt")
    assert differing(whole, snapshot(*run("sonar", 10, tmp_path / "some.ckpt"))) == []


# Shards


@pytest.fixture
def world():
    """Start a world of `size` in which this process is `rank`; nothing is communicated."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rows", [6, 5, 1])
def test_shards_get_the_bits_of_their_place_in_the_whole(world, rows: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = (rows, 5, 7)
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(shape, generator=generator).to(BF16) for _ in range(2))

    def stepped(weight: nn.Parameter, gradient: Tensor) -> Tensor:
        dense = nn.Parameter(torch.ones(3))
        optimizer = FusedAdamW([dense, weight], lr=1e-3, stochastic_rounding=True, seed=5)
        weight.grad = gradient
        optimizer.step()
        return weight.detach()

    whole = stepped(nn.Parameter(start.clone()), grad)
    pieces = []
    for rank in range(8):
        world(rank, 8)
        # DTensor remembers what it has seen of equal meshes, the rank included: a name of its own for each.
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", f"shards of {rank}"))

        def sharded(tensor: Tensor, rank: int = rank, mesh: Any = mesh) -> Tensor:
            chunks = tensor.chunk(4)
            mine = chunks[rank % 4] if rank % 4 < len(chunks) else tensor[:0]
            placements = [Replicate(), Shard(0)]
            return DTensor.from_local(
                mine.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )

        pieces.append(stepped(nn.Parameter(sharded(start)), sharded(grad)).to_local())
    assert torch.equal(torch.cat(pieces[:4]), whole)
    assert torch.equal(torch.cat(pieces[4:]), whole)


def test_other_shardings_are_refused_with_the_remedy(world) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    world(1, 4)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    local = torch.ones(2, 4, 4)
    assert global_offset(local) == 0
    assert global_offset(DTensor.from_local(local, flat, [Replicate()], run_check=False)) == 0
    for mesh, placements in ((flat, [Shard(1)]), (square, [Shard(0), Shard(0)])):
        other = DTensor.from_local(local, mesh, placements, run_check=False)
        with pytest.raises(NotImplementedError, match=r"sharded as .*Shard with Shard\(0\), or set stochastic_r"):
            global_offset(other)
