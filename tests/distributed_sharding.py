"""Cases of sharded models: meshes, units, expert parallelism; for `distributed_cases`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_run import (
    WORLD,
    Poisoned,
    data_of,
    fit,
    one_process,
    whole,
)
from helpers import fused, loader, make_trainer, small_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lightning_sonar import (
    MemoryProfiler,
    SonarMoEFSDPStrategy,
    find_expert_tensors,
    shard_moe_,
)
from lightning_sonar.clipping import GradNorms, clip_norm_
from lightning_sonar.strategies.sharding import has_sharded_parameters


def two_meshes(folder: Path) -> dict[str, Any]:
    """Clips gradients that live on two meshes and on none, and the same in plain tensors."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    plain = [nn.Parameter(torch.randn(5, 4)) for _ in range(3)]
    for tensor in plain:
        tensor.grad = torch.randn(5, 4)
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=("a",)), init_device_mesh("cpu", (1, 2))]
    placements = [[Shard(0)], [Replicate(), Shard(0)]]
    mixed = [nn.Parameter(plain[2].detach().clone())]
    mixed[0].grad = plain[2].grad.clone()
    for tensor, mesh, placement in zip(plain[:2], meshes, placements, strict=True):
        mixed.append(nn.Parameter(distribute_tensor(tensor.detach(), mesh, placement)))
        mixed[-1].grad = distribute_tensor(tensor.grad, mesh, placement)
    norms = GradNorms()
    norms.released(mixed[1].grad, True)
    norms.gather([(mixed[0], False), (mixed[2], False)])
    expected = clip_norm_(plain, 0.5)
    found = clip_norm_(mixed, 0.5)
    return {
        "norms": [found, expected, norms.last["total"]],
        "grads": [whole(tensor.grad) for tensor in mixed],
        "expected": [plain[2].grad, plain[0].grad, plain[1].grad],
        "plain": type(found) is Tensor,
    }


class ExpertParallel(Poisoned):
    """Lets transformers give each rank a part of each layer's experts, as it loads them."""

    def __init__(self, source: Path, optimizer: Any) -> None:
        super().__init__(nn.Module(), optimizer)
        self.source = source

    def configure_model(self):
        if not next(self.model.parameters(), None):
            self.model = AutoModelForCausalLM.from_pretrained(
                self.source,
                distributed_config=DistributedConfig(fsdp_size=WORLD, ep_size=WORLD),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="grouped_mm",
            ).train()


def expert_parallel(folder: Path) -> dict[str, Any]:
    """In-backward training with transformers' expert parallelism, without it, and in one process."""
    source = folder / "hf"
    if os.environ["RANK"] == "0":
        small_model().save_pretrained(source)
    found: dict[str, Any] = {"one_process": one_process("sonar")}
    for mode in ("sonar", "standard_no_expert_clip"):
        profiler = MemoryProfiler(warmup=1, steps=1, figure=False)
        module = ExpertParallel(source, fused())
        strategy = SonarMoEFSDPStrategy(mode=mode, log_grad_norm=True)
        found[mode] = fit(strategy, module=module, callbacks_more=[profiler])
        experts = find_expert_tensors(module)
        found[mode]["shapes"] = [list(tensor.to_local().shape) for tensor in experts.tensors]
        found[mode]["expert_gradients"] = profiler.report.peak_expert_gradient_bytes_per_rank
    return found


class ShardingLayers(Poisoned):
    """Shards itself the usual way: each layer is a unit, its experts are none."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class Replicated(Poisoned):
    """Shards itself over a mesh of which the first dimension is of copies (HSDP)."""

    def configure_model(self):
        if not has_sharded_parameters(self):
            shard_moe_(self.model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards")))


def not_freed(folder: Path) -> dict[str, Any]:
    module = ShardingLayers(small_model(), fused())
    trainer = make_trainer(SonarMoEFSDPStrategy(), 2, devices=WORLD, use_distributed_sampler=False)
    try:
        trainer.fit(module, loader(data_of(int(os.environ["RANK"]), 2)))
    except RuntimeError as error:
        return {"message": str(error)}
    return {"message": ""}


def units(folder: Path) -> dict[str, Any]:
    """The modules that `shard_moe_` makes units of, and their parameters' placements."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = shard_moe_(small_model(), init_device_mesh("cpu", (2,)))
    try:
        shard_moe_(model)
    except ValueError as error:
        again = str(error)
    return {
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "sharded": {name for name, p in model.named_parameters() if isinstance(p, DTensor)},
        "all": {name for name, _ in model.named_parameters()},
        "again": again,
    }
