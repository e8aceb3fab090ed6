"""Cases for several gloo processes: gradients and states in host memory; see `distributed_cases`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from distributed_run import fit, one_process
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_sonar import SonarMoEDDPStrategy, SonarMoEFSDPStrategy
from lightning_sonar.host import is_host
from lightning_sonar.sharded import local


class Where(L.Callback):
    """Which tensors have states in host memory when training ends."""

    def __init__(self) -> None:
        self.found: list[list[bool]] = []

    def on_train_end(self, trainer, pl_module):
        optimizer = trainer.optimizers[0]
        for tensor in trainer.strategy.in_backward.experts.values():
            moments = [local(optimizer.state[tensor][key]) for key in ("exp_avg", "exp_avg_sq")]
            self.found.append([is_host(moment.untyped_storage()) for moment in moments])


def where(saved: Path, strategy: Any) -> list[list[bool]]:
    """Where states are after a fit that was resumed."""
    look = Where()
    fit(strategy(expert_state_device="cpu"), steps=3, resume=saved, callbacks_more=[look])
    return look.found


HOST = {"accumulation": "host", "log_grad_norm": True}


def host_cases(saving: Callable[..., Any], plain_fsdp: Callable[[], ModelParallelStrategy]) -> dict[str, Any]:
    """Each finds what another way of training does, bit for bit."""
    made: dict[str, Any] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for kind, strategy in (("ddp", SonarMoEDDPStrategy), ("fsdp", SonarMoEFSDPStrategy)):
            made[f"{kind}_host_states_{name}"] = lambda folder, s=strategy, d=dtype: {
                "found": fit(s(expert_state_device="cpu"), d, clip=None),
                "expected": fit(s(), d, clip=None),
            }
    for kind, strategy in (("ddp", SonarMoEDDPStrategy), ("fsdp", SonarMoEFSDPStrategy)):
        made[f"{kind}_host_sums"] = lambda folder, s=strategy: {
            "found": fit(s(**HOST), microbatches=3),
            "expected": fit(s(log_grad_norm=True), microbatches=3),
        }
        made[f"{kind}_host_sums_manual"] = lambda folder, s=strategy: {
            "found": fit(s(**HOST, expert_state_device="cpu"), microbatches=2, manual=True),
            "expected": fit(s(log_grad_norm=True), microbatches=2, manual=True),
        }
        made[f"{kind}_host_nan"] = lambda folder, s=strategy: {
            "found": fit(s(accumulation="host"), microbatches=2, poisoned=2),
            "expected": fit(s(), microbatches=2, poisoned=2),
        }
        made[f"{kind}_host_resumed"] = partial(
            saving, f"{kind}_host", partial(strategy, expert_state_device="cpu", accumulation="host")
        )
    made["fsdp_host_resumed_full"] = partial(
        saving,
        "full_host",
        partial(SonarMoEFSDPStrategy, expert_state_device="cpu", save_distributed_checkpoint=False),
    )
    made["host_where"] = lambda folder: {
        "ddp": where(folder / "ddp_host.ckpt", SonarMoEDDPStrategy),
        "fsdp": where(folder / "fsdp_host.ckpt", SonarMoEFSDPStrategy),
    }
    exact = {"clip": 0.05, "microbatches": 2}
    made["ddp_host_exact_clip"] = lambda folder: {
        "found": fit(SonarMoEDDPStrategy(expert_clip="exact", accumulation="host"), **exact),
        "expected": fit(DDPStrategy(), **exact),
    }
    made["fsdp_host_exact_clip"] = lambda folder: {
        "found": fit(SonarMoEFSDPStrategy(expert_clip="exact", accumulation="host"), **exact),
        "expected": fit(plain_fsdp(), sharding=True, **exact),
    }
    # In the last microbatch of its first step one rank leaves a layer out whose sum it has already.
    unused = {"skipping": ((1,), 1), "microbatches": 2}
    made["ddp_host_unused"] = lambda folder: {
        "found": fit(SonarMoEDDPStrategy(**HOST, find_unused_parameters=True), **unused),
        "expected": one_process("sonar", **unused),
    }
    return made
