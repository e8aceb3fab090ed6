"""Named cases for several gloo processes; run as a script by each of them.

Importing torch takes seconds, so a pair of processes runs many cases, one after the other, and leaves what it found
in one file a rank.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from distributed_host import host_cases
from distributed_low_bit import low_bit_cases
from distributed_run import (
    SOON,
    Poisoned,
    Sleeper,
    fit,
    one_process,
    run_once,
)
from distributed_sharding import Replicated, expert_parallel, not_freed, two_meshes, units
from helpers import fused, small_model
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

from lightning_sonar import (
    MemoryProfiler,
    SonarMoEDDPStrategy,
    SonarMoEFSDPStrategy,
)
from lightning_sonar.strategies.averaging import RankAverage
from lightning_sonar.strategies.groups import OwnGroup

TESTS = Path(__file__).resolve().parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pair(mode: str, dtype: torch.dtype = torch.float32, strategy: Any = SonarMoEDDPStrategy, **options: Any) -> dict:
    """A fit on all ranks and the same training in one process."""
    fits = {key: value for key, value in options.items() if key not in ("average_each", "strategy_options")}
    made = strategy(mode=mode, log_grad_norm=True, **options.get("strategy_options", {}))
    found = fit(made, dtype, **fits)
    return {"found": found, "expected": one_process(mode, dtype, **options)}


def average(folder: Path) -> dict[str, Any]:
    """Four tensors, of which each rank gets some gradients, in an order of its own; two backwards."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensors = {name: nn.Parameter(torch.zeros(2, 3)) for name in "abcd"}
    names = {id(tensor): name for name, tensor in tensors.items()}
    averaged = RankAverage(tensors, OwnGroup(), find_unused=True)
    found: list[list[str]] = []
    values: list[Tensor] = []
    for arriving in ("acb", "cb") if rank == 0 else ("cb", "abc"):
        order: list[str] = []
        for name in arriving:
            # Transposed on one rank: what counts is the element, not its place in memory.
            made = torch.arange(6.0).reshape(2, 3) * (rank + 1)
            tensors[name].grad = made.t().contiguous().t() if rank else made
            order += [names[id(done)] for done in averaged.take(tensors[name])]
        order += [names[id(done)] for done in averaged.finish()]
        found.append(order)
        values += [torch.zeros(0) if t.grad is None else t.grad.clone() for t in tensors.values()]
        for tensor in tensors.values():
            tensor.grad = None
    return {"order": found, "values": values}


def average_left(folder: Path) -> dict[str, Any]:
    """A gradient that earlier microbatches have accumulated and the last one has not reached, on one rank or both."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensors = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
    averaged = RankAverage(tensors, OwnGroup(), find_unused=True)
    tensors["a"].grad = torch.full((2,), rank + 1.0)
    if rank == 0:
        tensors["b"].grad = torch.full((2,), 4.0)
    averaged.finish()
    return {name: tensor.grad for name, tensor in tensors.items()}


class Buckets(L.Callback):
    """How many bytes DDP's buckets take."""

    nbytes = 0

    def on_train_end(self, trainer, pl_module):
        model = trainer.strategy.model
        if hasattr(model, "_get_ddp_logging_data"):
            sizes = model._get_ddp_logging_data()["bucket_sizes"]
            self.nbytes = sum(map(int, str(sizes).split(",")))


def memory(strategies: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What each strategy takes on each rank, in bytes."""
    found = {}
    for name, (strategy, options) in strategies.items():
        profiler, buckets = MemoryProfiler(warmup=1, steps=1, figure=False), Buckets()
        fit(strategy(), callbacks_more=[profiler, buckets], **{"clip": None, **options})
        report = profiler.report.to_dict()
        report["bucket_bytes"] = buckets.nbytes
        found[name] = report
    return found


def ddp_cases() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        made[f"ddp_sonar_{name}"] = lambda folder, d=dtype: pair("sonar", d)
        made[f"ddp_manual_accumulated_{name}"] = lambda folder, d=dtype: pair("sonar", d, manual=True, microbatches=2)
        made[f"ddp_plain_{name}"] = lambda folder, d=dtype: {
            "found": fit(SonarMoEDDPStrategy(mode="standard"), d),
            "expected": fit(DDPStrategy(), d),
        }
        made[f"ddp_plain_unclipped_{name}"] = lambda folder, d=dtype: {
            "found": fit(SonarMoEDDPStrategy(), d, clip=None, microbatches=2),
            "expected": fit(DDPStrategy(), d, clip=None, microbatches=2),
        }
    made["average"] = average
    made["average_left"] = average_left
    unused = {"find_unused_parameters": True}
    made["ddp_unused_on_one"] = lambda folder: pair("sonar", skipping=((1,), 1), strategy_options=unused)
    made["ddp_unused_on_all"] = lambda folder: pair("sonar", skipping=((0, 1), 1), strategy_options=unused)
    made["ddp_unused_refused"] = lambda folder: fit(SonarMoEDDPStrategy(timeout=SOON), skipping=((1,), 1))
    made["ddp_stuck"] = lambda folder: fit(SonarMoEDDPStrategy(timeout=SOON), callbacks_more=[Sleeper()])
    made["ddp_seeds"] = lambda folder: fit(SonarMoEDDPStrategy(), seed=int(os.environ["RANK"]))
    made["ddp_per_microbatch"] = lambda folder: fit(
        SonarMoEDDPStrategy(accumulation="per_microbatch"), microbatches=2, clip=None
    )
    made["ddp_by_value"] = lambda folder: {
        "found": fit(SonarMoEDDPStrategy(), clip=0.01, gradient_clip_algorithm="value"),
        "expected": fit(DDPStrategy(), clip=0.01, gradient_clip_algorithm="value"),
    }
    made["ddp_expert_clip_exact"] = lambda folder: {
        "found": fit(SonarMoEDDPStrategy(expert_clip="exact")),
        "expected": fit(DDPStrategy()),
    }
    for clip in ("per_tensor", "per_expert", "lagged"):
        made[f"expert_clip_{clip}"] = lambda folder, c=clip: {
            "ddp": fit(SonarMoEDDPStrategy(expert_clip=c), clip=0.05),
            "fsdp": fit(SonarMoEFSDPStrategy(expert_clip=c), clip=0.05),
        }
    made["ddp_memory"] = partial(memory, {"plain": (DDPStrategy, {}), "sonar": (SonarMoEDDPStrategy, {})})
    made["ddp_nan"] = lambda folder: pair("sonar", poisoned=1)
    for mode in ("standard_no_expert_clip", "in_backward_all", "sonar_per_expert"):
        clip = None if mode == "in_backward_all" else 0.5
        made[f"ddp_{mode}"] = lambda folder, m=mode, c=clip: pair(m, clip=c)
    return made


def fsdp_cases() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        made[f"fsdp_unclipped_{name}"] = lambda folder, d=dtype: pair(
            "sonar", d, SonarMoEFSDPStrategy, clip=None, average_each=True
        )
        made[f"fsdp_accumulated_{name}"] = lambda folder, d=dtype: pair(
            "sonar", d, SonarMoEFSDPStrategy, clip=None, microbatches=2, manual=True, average_each=True
        )
        made[f"fsdp_plain_{name}"] = lambda folder, d=dtype: {
            "found": fit(SonarMoEFSDPStrategy(mode="standard"), d),
            "expected": fit(plain_fsdp(), d, sharding=True),
        }
        made[f"fsdp_plain_exact_{name}"] = lambda folder, d=dtype: {
            "found": fit(SonarMoEFSDPStrategy(mode="sonar_exact_clip"), d, clip=0.05),
            "expected": fit(plain_fsdp(), d, clip=0.05, sharding=True),
        }
        made[f"fsdp_plain_dense_clip_{name}"] = lambda folder, d=dtype: {
            "found": fit(SonarMoEFSDPStrategy(), d, microbatches=2),
            "expected": fit(SonarMoEFSDPStrategy(mode="standard_no_expert_clip"), d, microbatches=2),
        }
    exact = {"clip": 0.05, "microbatches": 2}
    made["fsdp_exact_accumulated"] = lambda folder: {
        "found": fit(SonarMoEFSDPStrategy(expert_clip="exact"), manual=True, **exact),
        "expected": fit(plain_fsdp(), sharding=True, **exact),
    }
    made["fsdp_exact_mixed_checkpointed"] = lambda folder: {
        "found": fit(
            SonarMoEFSDPStrategy(expert_clip="exact"), clip=0.05, precision="bf16-mixed", module=checkpointed()
        ),
        "expected": fit(
            SonarMoEFSDPStrategy(mode="standard"), clip=0.05, precision="bf16-mixed", module=checkpointed()
        ),
    }
    made["fsdp_exact_replicated"] = lambda folder: {
        "found": fit(SonarMoEFSDPStrategy(expert_clip="exact"), clip=0.05, module=Replicated(small_model(), fused())),
        "expected": fit(SonarMoEFSDPStrategy(mode="standard"), clip=0.05, module=Replicated(small_model(), fused())),
    }
    made["fsdp_exact_nan"] = lambda folder: {
        name: fit(SonarMoEFSDPStrategy(mode=mode, check="gradient"), clip=0.05, poisoned=1)
        for name, mode in (("found", "sonar_exact_clip"), ("expected", "standard"))
    }
    made["fsdp_memory"] = partial(
        memory,
        {
            "plain": (plain_fsdp, {"sharding": True}),
            "sonar": (SonarMoEFSDPStrategy, {}),
            "exact": (partial(SonarMoEFSDPStrategy, expert_clip="exact"), {"clip": 0.05}),
        },
    )
    made["fsdp_not_freed"] = not_freed
    made["fsdp_by_value"] = lambda folder: {
        "found": fit(SonarMoEFSDPStrategy(log_grad_norm=True), clip=0.01, gradient_clip_algorithm="value"),
        "expected": one_process("standard", clip=0.01, by_value=True, average_each=True),
    }
    made["fsdp_replicated"] = lambda folder: {
        "found": fit(SonarMoEFSDPStrategy(log_grad_norm=True), clip=None, module=Replicated(small_model(), fused())),
        "expected": one_process("sonar", clip=None, average_each=True),
    }
    made["two_meshes"] = two_meshes
    made["units"] = units
    made["expert_parallel"] = expert_parallel
    made["fsdp_check_gradient"] = lambda folder: {
        "found": fit(SonarMoEFSDPStrategy(check="gradient")),
        "expected": fit(SonarMoEFSDPStrategy()),
    }
    made["fsdp_mixed"] = lambda folder: {
        "found": fit(SonarMoEFSDPStrategy(), precision="bf16-mixed"),
        "expected": fit(SonarMoEFSDPStrategy(mode="standard_no_expert_clip"), precision="bf16-mixed"),
    }
    made["fsdp_nan"] = lambda folder: pair(
        "sonar", strategy=SonarMoEFSDPStrategy, clip=None, poisoned=1, average_each=True
    )
    return made


def saving(name: str, strategy: Any, folder: Path) -> dict[str, Any]:
    """Two steps and a checkpoint, two more from there, and four at once."""
    path = folder / f"{name}.ckpt"
    saved = fit(strategy(), steps=2, save=path)
    return {
        "saved": saved,
        "found": fit(strategy(), resume=path, seed=7),
        "expected": fit(strategy(), shuffle=True),
        "is_folder": path.is_dir(),
        "left": sorted(entry.name for entry in folder.glob(f"{name}.ckpt.*")),
    }


def loading(name: str, folder: Path) -> dict[str, Any]:
    """What another number of ranks reads from the checkpoints of `saving`."""
    return fit(SonarMoEFSDPStrategy(), steps=2, resume=folder.parent / f"{name}.ckpt", seed=7)


def checkpoint_cases() -> dict[str, Any]:
    kinds = {
        "ddp": SonarMoEDDPStrategy,
        "sharded": SonarMoEFSDPStrategy,
        "full": partial(SonarMoEFSDPStrategy, save_distributed_checkpoint=False),
    }
    made: dict[str, Any] = {}
    for name, strategy in kinds.items():
        made[f"save_{name}"] = partial(saving, name, strategy)
        made[f"load_{name}"] = partial(loading, name)
    return made


def checkpointed() -> Poisoned:
    model = small_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Poisoned(model, fused())


def plain_fsdp() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)


def quick() -> list[dict[str, Any]]:
    """The results of the cases that every run of the tests runs."""
    return run_once(tuple(QUICK))


def thorough() -> list[dict[str, Any]]:
    """The results of the cases that take longer."""
    return run_once(
        tuple(name for name in CASES if name not in (*QUICK, *FAILING) and not name.startswith(("load_", "low_bit_")))
    )


QUICK = [
    *("average", "average_left", "ddp_sonar_fp32", "ddp_plain_bf16", "ddp_nan"),
    *("fsdp_unclipped_fp32", "fsdp_plain_bf16", "two_meshes", "units"),
]
FAILING = ["ddp_unused_refused", "ddp_stuck"]
CASES: dict[str, Any] = {
    **ddp_cases(),
    **fsdp_cases(),
    **checkpoint_cases(),
    **host_cases(saving, plain_fsdp),
    **low_bit_cases(),
}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    found = {name: CASES[name](folder) for name in names}
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main(Path(sys.argv[1]), sys.argv[2:])
