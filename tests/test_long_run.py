"""Two thousand steps: nothing grows but logs, and no step gets slower."""

from __future__ import annotations

import gc
import os
import statistics
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import FAMILY, batches, fused, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from experiments.result import History
from lightning_sonar import MemoryProfiler, SonarMoEStrategy, find_expert_tensors, models, release_in_backward
from lightning_sonar.data.loader import ResumableLoader, ShuffledBatches
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.losses import response_cross_entropy

STEPS = int(os.environ.get("STEPS", "2000"))
FIRST = min(100, STEPS // 4)
"""The step that the end is compared with."""

LAST = min(200, STEPS // 4)
"""Steps at the end whose time is compared with that of as many after `FIRST`."""

SLOWER = 1.3
"""How much longer the median of the last steps may be than of those after `FIRST`.

In processor time, since others may use the machine.
"""

NOISE = 8 * 2**20
"""Bytes by which a process may grow that keeps nothing: allocator arenas and caches of compiled regular expressions."""

# What Python and Lightning keep for themselves, a few of each, whenever.
UNSTEADY = 40
"""How many objects of one type may come and go. What is kept once in a hundred steps shows as 19 more."""


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return models.build("olmoe", "tiny", num_layers=1, backend="grouped_mm", dtype=torch.float32, **FAMILY["olmoe"])


def live_bytes() -> int:
    """Bytes of every storage that a tensor in this process holds."""
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout is torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts() -> Counter[str]:
    return Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects())


def sizes(thing: Any) -> dict[str, int]:
    """How many items each container has that an object holds."""
    found = {}
    for name, value in vars(thing).items():
        if isinstance(value, (list, dict, set, tuple)):
            found[name] = len(value)
    return found


class State:
    """What must not change between two moments."""

    def __init__(self, *holders: Any, folder: Path | None = None) -> None:
        for _ in range(3):
            gc.collect()
        self.live = live_bytes()
        self.resident = resident_bytes()
        self.counts = counts()
        self.sizes = {type(holder).__name__: sizes(holder) for holder in holders}
        files = [] if folder is None else [path for path in folder.rglob("*") if path.is_file()]
        self.files = len(files)
        self.bytes = {path.suffix: path.stat().st_size for path in files if path.suffix != ".csv"}

    def grown(self, before: State) -> dict[str, int]:
        """By how much each kind of object has become more, where that is more than comes and goes."""
        more = {name: self.counts[name] - before.counts[name] for name in self.counts}
        return {name: count for name, count in more.items() if count > UNSTEADY}


class Watch(L.Callback):
    """Looks at the process after step `FIRST` and at the end, and takes the time of every step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.times = array("d")
        self.begun = 0.0
        self.states: dict[int, State] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.begun = self.begun or time.process_time()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == len(self.times):
            return  # a microbatch that is not its step's last
        self.times.append(time.process_time() - self.begun)
        if step in (FIRST // 2, FIRST, STEPS):  # the first look leaves something behind itself
            self.states[step] = self.look(trainer)
        self.begun = 0.0

    def look(self, trainer: Any) -> State:
        handle = trainer.strategy.in_backward
        holders = [handle, handle._guard, handle._expert_clip, trainer.strategy]
        holders += [callback for callback in trainer.callbacks if callback is not self]
        return State(*holders, folder=self.folder)


def check(first: State, last: State, times: array[float]) -> dict[str, float]:
    assert last.live == first.live
    assert last.sizes == first.sizes
    assert last.grown(first) == {}
    assert last.files == first.files
    assert last.bytes == first.bytes
    grown = last.resident - first.resident
    assert grown < NOISE, f"{grown / 2**20:.1f} MiB"
    early = statistics.median(times[FIRST : FIRST + LAST])
    late = statistics.median(times[-LAST:])
    assert late / early < SLOWER
    return {"live": last.live, "grown": grown, "early_ms": early * 1e3, "late_ms": late * 1e3}


@pytest.fixture(autouse=True)
def without_gc_noise() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mode", "accumulation", "microbatches"),
    [("sonar", "exact", 1), ("sonar_exact_clip", "exact", 1), ("sonar", "exact", 2), ("sonar", "host", 2)],
)
def test_after_two_thousand_steps_nothing_has_grown_but_logs(tmp_path, capsys, mode, accumulation, microbatches):
    data = batches(8, batch_size=1, seq_len=8)
    loader = ResumableLoader(data, ShuffledBatches(len(data), 1, seed=0), collate_fn=lambda examples: examples[0])
    watch = Watch(tmp_path)
    saver = ModelCheckpoint(tmp_path, filename="step-{step}", every_n_train_steps=FIRST // 2)
    profiler = MemoryProfiler(warmup=2, steps=2, dirpath=tmp_path, figure=False)
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(
        SonarMoEStrategy(mode=mode, accumulation=accumulation, log_grad_norm=10),
        STEPS,
        max_epochs=-1,
        callbacks=[History(), profiler, saver, watch],
        enable_checkpointing=True,
        logger=logger,
        log_every_n_steps=5,
        accumulate_grad_batches=microbatches,
    )
    module = LanguageModel(tiny(), fused(lr=1e-3), lambda opt: torch.optim.lr_scheduler.ConstantLR(opt, 1.0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    assert trainer.global_step == STEPS == len(watch.times)
    found = check(watch.states[FIRST], watch.states[STEPS], watch.times)
    with capsys.disabled():
        print(f"\n{mode} {accumulation} x{microbatches}: {found}")


@pytest.mark.slow
def test_two_thousand_steps_of_a_plain_loop_leave_nothing_behind(capsys):
    model = tiny()
    optimizer = fused(lr=1e-3)(model.parameters())
    handle = release_in_backward(optimizer, find_expert_tensors(model), measure_norms=True)
    data, times, states = batches(8, batch_size=1, seq_len=8), array("d"), {}
    for step in range(1, STEPS + 1):
        begun = time.process_time()
        batch = data[step % len(data)]
        loss = response_cross_entropy(model(input_ids=batch["input_ids"], use_cache=False).logits, batch["labels"])[0]
        handle.train_step(loss, max_norm=0.5)
        times.append(time.process_time() - begun)
        del loss
        if step in (FIRST // 2, FIRST, STEPS):
            states[step] = State(handle, handle._guard, optimizer)
    found = check(states[FIRST], states[STEPS], times)
    with capsys.disabled():
        print(f"\nplain loop: {found}")
