"""The search: few simulations, the answers that many would give, and nothing in the list that was not simulated."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from helpers import FAMILY
from omegaconf import OmegaConf

from experiments.shape import state_bytes
from lightning_sonar import MemoryPlan, plan_memory
from lightning_sonar.config_dir import config_dir
from lightning_sonar.memory.search import BATCH_SIZES, MODE_ORDER, Candidate, Tally, search

GIB = 1 << 30
OPTIMIZERS = {"wide": 12, "narrow": 6, "narrowest": 3}  # GiB of states
KEPT = {"standard": 10, "sonar": 1, "in_backward_all": 0}  # GiB of gradients


@functools.cache
def any_plan() -> MemoryPlan:
    return plan_memory("olmoe", size="tiny", num_layers=1, **FAMILY["olmoe"])  # type: ignore[arg-type]


def activations(candidate: Candidate) -> float:
    return candidate.batch_size * {False: 1.0, True: 0.25}[candidate.checkpointing] * (1.5 if full(candidate) else 1)


def full(candidate: Candidate) -> bool:
    return candidate.loss == "full"


def need(candidate: Candidate) -> float:
    """GiB: what is there always, and gradients at the end or activations at the start of backward."""
    fixed = 8 + OPTIMIZERS[candidate.optimizer]
    return fixed + max(KEPT[candidate.mode], activations(candidate) + 0.2)


def simulate(candidate: Candidate) -> MemoryPlan:
    fixed, peak = 8 + OPTIMIZERS[candidate.optimizer], need(candidate)
    end = fixed + KEPT[candidate.mode]
    curve = {
        "position": [0.0, 1.0, 2.0],
        "live_bytes": [fixed * GIB, (fixed + activations(candidate) + 0.2) * GIB, end * GIB],
        "sharded_bytes": [fixed * GIB, (fixed + 0.2) * GIB, end * GIB],
    }
    size = int(peak * GIB)
    return dataclasses.replace(any_plan(), peak_bytes=size, reserved_bytes=size, curve=curve)


def by_hand(room: float, optimizers: list[str]) -> list[tuple]:
    """What trying everything gives."""
    found: list[tuple] = []
    for mode in MODE_ORDER:
        for optimizer in optimizers:
            reached = 0
            for ckpt in (False, True):
                for loss in ("full", "chunked"):
                    kinds = [Candidate(mode, optimizer, ckpt, loss, batch) for batch in BATCH_SIZES]
                    most = max((c.batch_size for c in kinds if need(c) <= room), default=0)
                    if most > reached:
                        found.append((mode, optimizer, ckpt, loss, most))
                        reached = most
    return found[:5]


@pytest.mark.parametrize("optimizers", [["wide"], ["wide", "narrow", "narrowest"]])
@pytest.mark.parametrize("room", [15, 21.5, 24, 28, 33, 45, 80])
@pytest.mark.parametrize("error", [0.6, 1.0, 1.7])
def test_few_simulations_find_what_trying_everything_finds(optimizers, room, error):
    tally = Tally()
    found = search(
        simulate,
        int(room * GIB),
        optimizers=optimizers,
        context_bytes=0,
        floor=lambda c: int((8 + OPTIMIZERS[c.optimizer] + 10 * (c.mode == "standard")) * GIB),
        activations=lambda c: int(error * activations(c) * GIB),
        states=lambda c: OPTIMIZERS[c.optimizer] * GIB,
        tally=tally,
    )
    assert [dataclasses.astuple(one.candidate) for one in found] == by_hand(room, optimizers)
    assert len(tally.simulated) <= 16  # of 84 kinds and batches for each optimizer
    assert {one.candidate for one in found} <= set(tally.simulated)
    assert all(one.plan.reserved_bytes <= room * GIB for one in found)


def test_what_cannot_fit_is_not_simulated_and_counted():
    tally = Tally()
    floor = functools.partial(lambda c: 100 * GIB)
    assert search(simulate, 80 * GIB, optimizers=["wide"], floor=floor, tally=tally) == []
    assert (tally.simulated, tally.pruned) == ([], 12 * len(BATCH_SIZES))


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ({"_target_": "lightning_sonar.FusedAdamW", "_partial_": True}, 4),
        ({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "momentum": 0.9}, 2),
        ({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}, 0),
        ({"_target_": "torch.optim.SGD", "_partial_": True, "lr": -1}, 0),
    ],
)
def test_states_are_counted_by_stepping_one_matrix(settings, nbytes):
    assert state_bytes(OmegaConf.create(settings), torch.bfloat16) == (nbytes, nbytes)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    # Two codes and two fp32 scales a block: of 256 elements with 8 bits, of 128 with 4.
    [("bnb_adamw8bit", 2 + 8 / 256), ("adamw8bit", 2 + 8 / 256), ("adamw4bit", 1 + 8 / 128)],
)
def test_low_bit_states_are_counted_by_their_models(name, nbytes):
    settings = OmegaConf.load(config_dir() / "optimizer" / f"{name}.yaml")
    settings.update(lr=1e-4, watch_every=0)
    dense, experts = state_bytes(settings, torch.bfloat16)
    assert dense == experts == pytest.approx(nbytes, rel=0.02)  # and the maps that all tensors share


def test_experts_and_dense_states_are_counted_apart():
    settings = OmegaConf.load(config_dir() / "optimizer" / "adamw8bit_experts.yaml")
    settings.update(lr=1e-4)
    settings.experts.watch_every = 0
    dense, experts = state_bytes(settings, torch.bfloat16)
    assert dense == 4
    assert experts < 2.1
