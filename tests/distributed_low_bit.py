"""Cases for several gloo processes: low-bit optimizers; see `distributed_cases`."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from distributed_run import PRECISION, Poisoned, data_of
from helpers import loader, make_trainer, small_model, snapshot
from lightning.pytorch.strategies import DDPStrategy
from low_bit_cases import bnb, bnb_experts
from torch import Tensor

from lightning_sonar import SonarMoEDDPStrategy, SonarMoEFSDPStrategy
from lightning_sonar.optim import ao_adamw8bit, largest_update
from lightning_sonar.sharded import local


def fit(
    strategy: Any, optimizer: Callable[..., Any], dtype: torch.dtype = torch.float32, clip: float = 0.5
) -> dict[str, Tensor]:
    """Four steps on this rank's data; every parameter and state."""
    module = Poisoned(small_model(dtype=dtype), optimizer)
    devices = int(os.environ["WORLD_SIZE"])
    trainer = make_trainer(strategy, 4, PRECISION[dtype], clip, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, loader(data_of(int(os.environ["RANK"]), 4)))
    return snapshot(trainer, module)


def watched(every: int) -> dict[str, Any]:
    """Two steps of torchao's under FSDP2: values, and the largest update of the last step."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    optimizer = functools.partial(ao_adamw8bit, lr=1e-2, block_size=64, watch_every=every)
    module = Poisoned(small_model(), optimizer)
    devices = int(os.environ["WORLD_SIZE"])
    trainer = make_trainer(
        SonarMoEFSDPStrategy(), 2, PRECISION[torch.float32], None, devices=devices, use_distributed_sampler=False
    )
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(module, loader(data_of(int(os.environ["RANK"]), 2)))
    made = trainer.optimizers[0]
    return {
        "values": {name: local(value).clone() for name, value in module.named_parameters()},
        "largest": largest_update(made),
    }


def refused(folder: Any) -> str:
    """What is said of bitsandbytes' states under FSDP2."""
    try:
        fit(SonarMoEFSDPStrategy(), bnb_experts)
    except ValueError as error:
        return str(error)
    return "nothing"


def low_bit_cases() -> dict[str, Any]:
    """Each finds what another way of training does, bit for bit."""
    after = "standard_no_expert_clip"
    return {
        "low_bit_ddp": lambda folder: {
            "found": fit(SonarMoEDDPStrategy(), bnb),
            "expected": fit(SonarMoEDDPStrategy(mode=after), bnb),
        },
        "low_bit_ddp_bf16": lambda folder: {
            "found": fit(SonarMoEDDPStrategy(), bnb, torch.bfloat16),
            "expected": fit(SonarMoEDDPStrategy(mode=after), bnb, torch.bfloat16),
        },
        "low_bit_ddp_parted": lambda folder: {
            "found": fit(SonarMoEDDPStrategy(), bnb_experts),
            "expected": fit(SonarMoEDDPStrategy(mode=after), bnb_experts),
        },
        "low_bit_ddp_exact": lambda folder: {
            "found": fit(SonarMoEDDPStrategy(mode="sonar_exact_clip"), bnb, clip=0.05),
            "expected": fit(DDPStrategy(), bnb, clip=0.05),
        },
        "low_bit_fsdp_watched": lambda folder: {"found": watched(1), "expected": watched(0)},
        "low_bit_fsdp": refused,
    }
