"""Fits on several gloo processes, the same training in one process, and how such processes are started."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from helpers import PRECISION, AutomaticLM, batches, fused, loader, make_trainer, small_model, snapshot
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor, nn

from lightning_sonar import (
    find_expert_tensors,
    shard_moe_,
)
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.losses import response_cross_entropy
from lightning_sonar.modes import MODES

SCRIPT = Path(__file__).resolve().parent / "distributed_cases.py"
WORLD = 2
SOON = timedelta(seconds=8)


def start(cases: list[str], folder: Path, world: int = WORLD) -> list[subprocess.Popen]:
    """Begin to run the cases on `world` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "MKL_CBWR": "AVX2,STRICT",
        }
        with (folder / f"log{rank}.txt").open("w") as log:
            command = [sys.executable, str(SCRIPT), str(folder), *cases]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return processes


def wait(processes: list[subprocess.Popen], folder: Path, timeout: float) -> tuple[list[int], str]:
    """Exit codes of all processes, and what they said; an error if one is still there after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    try:
        codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return codes, "\n".join((folder / f"log{rank}.txt").read_text()[-4000:] for rank in range(len(processes)))


def launch(cases: list[str], folder: Path, world: int = WORLD, timeout: float = 500) -> list[dict[str, Any]]:
    """Run the cases on `world` processes, wait for all of them, and return what each rank found, by case."""
    codes, logs = wait(start(cases, folder, world), folder, timeout)
    assert codes == [0] * world, logs
    return results(folder, world)


def results(folder: Path, world: int = WORLD) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


@functools.cache
def run_once(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """As `launch`, in a folder that is gone afterwards; once a session for the same cases."""
    with tempfile.TemporaryDirectory() as folder:
        return launch(list(names), Path(folder))


Skipping = tuple[tuple[int, ...], int]
"""The ranks that leave a layer out, and in which step."""


def data_of(
    rank: int, count: int, poisoned: int | None = None, skipping: Skipping | None = None
) -> list[dict[str, Tensor]]:
    made = batches(count, seed=100 + rank)
    for index, batch in enumerate(made):
        batch["poison"] = torch.tensor(float("nan") if index == poisoned and rank == 1 else 0.0)
        if skipping is not None:
            batch["skips"] = torch.tensor(index == skipping[1] and rank in skipping[0])
    return made


class Poisoned(AutomaticLM):
    """Its loss is NaN where the batch says so."""

    def training_step(self, batch, batch_idx):
        return loss_of(self.model, batch)


class Sharding(Poisoned):
    """Shards itself, as Lightning's own strategy asks."""

    def configure_model(self):
        shard_moe_(self.model, self.device_mesh["data_parallel"])


class PoisonedManual(LanguageModel):
    def training_step(self, batch, batch_idx):
        return self.finish_step(loss_of(self.model, batch))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    layer = model.model.layers[0]
    if batch.get("skips"):
        layer.forward = lambda hidden, *args, **kwargs: hidden
    try:
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    finally:
        vars(layer).pop("forward", None)
    return response_cross_entropy(output.logits, batch["labels"])[0] + batch["poison"]


class Logged(L.Callback):
    """Keeps what was logged in every step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if "grad_norm/total" in trainer.callback_metrics:
            self.norms.append(float(trainer.callback_metrics["grad_norm/total"]))


class Sleeper(L.Callback):
    """Makes rank 1 hang in its second step, for much longer than the others wait."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            time.sleep(120)


def fit(
    strategy: Any,
    dtype: torch.dtype = torch.float32,
    *,
    manual: bool = False,
    steps: int = 4,
    microbatches: int = 1,
    clip: float | None = 0.5,
    poisoned: int | None = None,
    skipping: Skipping | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    module: L.LightningModule | None = None,
    seed: int = 0,
    sharding: bool = False,
    shuffle: bool = False,
    callbacks_more: Iterable[L.Callback] = (),
    **options: Any,
) -> dict[str, Any]:
    """Train on this rank's share of the data; returns parameters and state, norms and counts."""
    if module is None:
        kind = PoisonedManual if manual else Sharding if sharding else Poisoned
        module = kind(small_model(dtype=dtype, seed=seed), fused())
    logged = Logged()
    trainer = make_trainer(
        strategy,
        steps,
        options.pop("precision", PRECISION[dtype]),
        clip,
        devices=int(os.environ["WORLD_SIZE"]),
        accumulate_grad_batches=microbatches,
        use_distributed_sampler=False,
        max_epochs=-1,
        callbacks=[logged, *callbacks_more],
        **options,
    )
    rank = int(os.environ["RANK"])
    data = data_of(rank, 8 * microbatches, poisoned, skipping)
    batches_of_rank = resumable(data) if save or resume or shuffle else loader(data)
    trainer.fit(module, batches_of_rank, ckpt_path=resume, weights_only=True if resume else None)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "values": {name: whole(value) for name, value in snapshot(trainer, module).items()},
        "norms": logged.norms[::microbatches],
        "skipped": getattr(strategy, "skipped_steps", 0),
        "left_over": [name for name, value in vars(module).items() if "_ddp" in name]
        + [name for name, p in module.named_parameters() if hasattr(p, "_ddp_ignored")],
        "hooks": sum(bool(getattr(p, "_post_accumulate_grad_hooks", None)) for p in module.parameters()),
    }


def resumable(data: list[dict[str, Tensor]]) -> ResumableLoader:
    """The data in another order, from which a checkpoint goes on."""
    order = ShuffledBatches(len(data), 1, seed=0)
    return ResumableLoader(data, order, collate_fn=lambda examples: examples[0])


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor's whole value; any other itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_process(
    mode: str,
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = 4,
    microbatches: int = 1,
    clip: float | None = 0.5,
    poisoned: int | None = None,
    skipping: Skipping | None = None,
    average_each: bool = False,
    by_value: bool = False,
    seed: int = 0,
    **_: Any,
) -> dict[str, Any]:
    """The same training in one process, in plain torch: each rank's gradient is taken in turn, then their mean.

    `average_each` takes the mean after every microbatch, as FSDP does, and not of the sums.
    """
    world = int(os.environ["WORLD_SIZE"])
    model = small_model(dtype=dtype, seed=seed)
    precision = HalfPrecision("bf16-true") if dtype == torch.bfloat16 else None
    if precision is not None:
        precision.convert_module(model)  # which rounds buffers, too
    optimizer = fused()(model.parameters())
    experts = {id(tensor) for tensor in find_expert_tensors(model).values()}
    data = [data_of(rank, 8 * microbatches, poisoned, skipping) for rank in range(world)]
    parameters = list(model.parameters())
    norms: list[float] = []
    skipped = 0
    for step in range(steps):
        bad = False
        shares: list[list[Tensor | None]] = []
        chunks = [[m] for m in range(microbatches)] if average_each else [list(range(microbatches))]
        for chunk in chunks:
            for rank in range(world):
                for m in chunk:
                    batch = data[rank][step * microbatches + m]
                    if precision is None:
                        loss = loss_of(model, batch)
                    else:
                        with precision.forward_context():
                            loss = loss_of(model, precision.convert_input(batch))
                    bad = bad or not bool(loss.isfinite())
                    (loss / microbatches).backward()
                shares.append([None if p.grad is None else p.grad.mul(1.0 / world) for p in parameters])
                model.zero_grad(set_to_none=True)
        if bad:
            skipped += 1
            continue
        for index, p in enumerate(parameters):
            parts = [share[index] for share in shares]
            if all(part is None for part in parts):
                continue
            parts = [torch.zeros_like(p) if part is None else part for part in parts]
            sums = [sum(parts[i + 1 : i + world], parts[i]) for i in range(0, len(parts), world)]
            p.grad = sum(sums[1:], sums[0])
        squares = [p.grad.float().norm() for p in parameters if p.grad is not None]
        norms.append(float(torch.linalg.vector_norm(torch.stack(squares))))
        scope = [p for p in parameters if MODES[mode].clips(id(p) in experts)]
        if clip and by_value:
            nn.utils.clip_grad_value_(scope, clip)
        elif clip:
            nn.utils.clip_grad_norm_(scope, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    values = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            values[f"model.{name}.{key}"] = torch.as_tensor(value).clone()
    return {"values": values, "norms": norms, "skipped": skipped}
