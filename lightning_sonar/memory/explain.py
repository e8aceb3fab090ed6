"""Tell a user why a fit ran out of memory: on the exception, in the log, and in files."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl

from lightning_sonar.memory.diagnosis import diagnose
from lightning_sonar.memory.fit import expert_ids
from lightning_sonar.memory.ledger import Ledger
from lightning_sonar.memory.out_of_memory import OutOfMemory
from lightning_sonar.memory.report import write_json
from lightning_sonar.memory.snapshot import possible, write_snapshot

log = logging.getLogger(__name__)


def explain(
    exception: BaseException,
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *,
    dirpath: Path | None,
    advise: Callable[[OutOfMemory], list[str]] | None,
    phase: str,
    step: int,
    ledger: Ledger | None,
    resident_bytes: int,
) -> OutOfMemory:
    """Diagnose the failure and leave the message as a note on the exception, which stays what it is.

    Args:
        exception: what ended the fit.
        trainer: the trainer of the fit; nothing has been torn down yet.
        module: what it trains.
        dirpath: folder for ``out_of_memory.json`` and on CUDA ``out_of_memory_snapshot.pickle``; None writes nothing.
        advise: says what a planner knows.
        phase: see `OutOfMemory`.
        step: see `OutOfMemory`.
        ledger: the book of the step, if it was watched.
        resident_bytes: see `diagnose`.
    """
    strategy, rank = trainer.strategy, trainer.global_rank
    engine = getattr(strategy, "in_backward", None)
    failure = diagnose(
        exception,
        module=module,
        optimizers=trainer.optimizers,
        device=strategy.root_device,
        experts=expert_ids(engine, module),
        engine=engine,
        phase=phase,
        step=step,
        accumulating=max(trainer.accumulate_grad_batches, getattr(strategy, "microbatches", 1)) > 1,
        ledger=ledger,
        resident_bytes=resident_bytes,
    )
    if advise is not None:
        try:
            advice = list(advise(failure))
        except Exception as trouble:
            # The arithmetic is worth having without the planner.
            advice = [f"no plan, because advise raised {type(trouble).__name__}: {trouble}"]
        failure = dataclasses.replace(failure, advice=advice)
    exception.add_note(failure.message)
    log.error("%s%s", "" if trainer.world_size == 1 else f"[rank {rank}] ", failure.message)
    if dirpath is not None:
        ending = f"_rank{rank}" if rank else ""
        write_json(dirpath / f"out_of_memory{ending}.json", failure.to_dict())
        if possible(strategy.root_device):
            write_snapshot(dirpath / f"out_of_memory_snapshot{ending}.pickle")
    return failure
