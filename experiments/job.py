"""One training job: settle, build, fit, validate, report."""

from __future__ import annotations

import logging
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.panel import Panel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from experiments.advice import adviser
from experiments.checks import SettingsError, device_of, ranks_of
from experiments.endings import could_not_write, how_to_go_on, note, stopped_by
from experiments.environment import environment_references, with_references
from experiments.folder import CHECKPOINTS, set_aside
from experiments.outputs import keep_inside
from experiments.plans import model_values
from experiments.rank_memory import rank_bytes
from experiments.refusals import refusal
from experiments.result import History, collect, task_overrides, write_json, write_losses
from experiments.resume import find_checkpoint, warn_if_over
from experiments.settings import build_device_of, is_sharded, plan_at, settle
from experiments.status import write_text
from experiments.sweep import settings_sha256
from experiments.trying import cause_of, make_trainer
from experiments.typed import show
from lightning_sonar import models
from lightning_sonar.data import DataError, check_packing
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.memory import MemoryProfiler
from lightning_sonar.memory.out_of_memory import is_out_of_memory
from lightning_sonar.memory.planner import PRECISIONS
from lightning_sonar.output_head import OutputHeadError
from lightning_sonar.strategies.checkpoints import CheckpointError
from lightning_sonar.strategies.children import end_children
from lightning_sonar.strategies.sharding import has_sharded_parameters

# Other ranks run the same command; one of them speaks and writes.
RANK = int(getattr(rank_zero_only, "rank", None) or 0)
FIRST = RANK == 0
console = Console(highlight=False, quiet=not FIRST, markup=False)  # paths may hold what looks like markup

OUT_OF_MEMORY = 3
"""Exit code of a run that went out of memory: its settings are not wrong (that is 2), but too large for the machine."""


def run_job(cfg: DictConfig, folder: Path) -> int:
    """Run the job and return its exit code; a user's mistake ends in one message, not in a traceback."""
    if FIRST:
        for old in folder.glob("error*.txt"):  # of a run before this one in the same folder
            old.unlink(missing_ok=True)
    report = folder / ("error.txt" if FIRST else f"error_rank{RANK}.txt")
    try:
        train(cfg, folder)
    except (SystemExit, KeyboardInterrupt) as error:
        stopped = stopped_by(error)
        if stopped is None:
            raise
        name, code = stopped
        note(report, f"stopped by {name}\n")
        print(f"stopped by {name}. {how_to_go_on(folder)}", file=sys.stderr)
        return code
    except Exception as error:
        cause = cause_of(error)
        if isinstance(cause, (SettingsError, DataError, CheckpointError, OutputHeadError)):
            print(f"error: {cause}", file=sys.stderr)
            # What raised it may be a fault of this program's, after all.
            note(report, f"{cause}\n" + (f"\n{traceback.format_exc()}" if cause.__cause__ else ""))
            return 2
        note(report, traceback.format_exc())
        if could_not_write(cause, folder):
            print(f"error: {cause}: the run in {folder} could not be written. {how_to_go_on(folder)}", file=sys.stderr)
            return 1
        if is_out_of_memory(cause):
            # The note is MemoryProfiler's; without one the exception has to do.
            notes = getattr(cause, "__notes__", None) or [f"Out of memory. {cause}"]
            print("error: " + "\n".join(notes), file=sys.stderr)
            return OUT_OF_MEMORY
        raise
    return 0


def prepare(cfg: DictConfig, folder: Path) -> tuple[L.Trainer, list[L.Callback]]:
    """Everything that can be refused before data is read: settle the configuration and make the Trainer.

    Returns:
        The Trainer and its callbacks, of which the first is the `History`.

    Raises:
        SettingsError: naming the key, its value and what would work.
    """
    _quiet()
    settle(cfg, say=lambda text: console.print(Panel(text, title="model size", border_style="yellow")))
    OmegaConf.resolve(cfg)
    keep_inside(cfg, folder)
    return make_trainer(cfg, [History()])


def train(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """Train and measure; returns what ``result.json`` holds."""
    # Before the configuration is settled: a sweep, which looks for finished jobs, has it as composed.
    sha256 = settings_sha256(cfg, folder.absolute())
    hidden = environment_references(cfg)
    trainer, callbacks = prepare(cfg, folder)
    settings = with_references(cfg, hidden)
    history = next(callback for callback in callbacks if isinstance(callback, History))
    resume = find_checkpoint(cfg.ckpt_path, folder)
    if FIRST:
        aside = set_aside(folder, resume)
        if aside:
            console.print(f"kept from an earlier run in {folder}: {', '.join(aside)}")
        write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(settings)))
    if cfg.model.trust_remote_code:
        console.print(
            f"model.trust_remote_code=true: Python code that lies beside {cfg.model.id or cfg.model.get('config')} may "
            "run, with your rights."
        )
    L.seed_everything(cfg.seed, workers=True, verbose=False)

    tokenizer = _tokenizer(cfg)
    data = instantiate(cfg.data, tokenizer=tokenizer, **({} if tokenizer else _fits(cfg)))
    data.setup("fit")
    model = _build(cfg)
    if getattr(data, "packing", False) and is_sharded(cfg):
        check_packing(model, cfg.data.batch_size)  # sharded, it could not be checked
    module = LanguageModel(
        model,
        instantiate(cfg.optimizer),
        instantiate(cfg.scheduler),
        router_aux_loss=cfg.model.router_aux_loss,
        loss=cfg.model.loss,
        settings=settings,
    )
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    if saves:
        _check_disk(model, folder)
    if resume is not None:
        console.print(f"resuming from {resume}", soft_wrap=True)
    predicted = _predict(cfg, callbacks)
    with _together(trainer):
        try:
            trainer.fit(module, data, ckpt_path=resume, weights_only=True if resume else None)
        except Exception as error:
            told = refusal(error, cfg, resume, trained=bool(history.losses))
            if told is None:
                raise
            raise told from error
        if not history.losses:
            warn_if_over(resume, trainer.global_step, trainer.max_steps)
        if saves:
            trainer.save_checkpoint(folder / CHECKPOINTS / "last.ckpt", weights_only=False)
        if cfg.export == "hf":
            _export(model, data.tokenizer, folder / "hf")
        validation = trainer.validate(module, data, verbose=False)[0] if trainer.limit_val_batches else {}
        losses = trainer.strategy.reduce(torch.tensor(history.losses, device=trainer.strategy.root_device)).tolist()
    result = collect(cfg, trainer, model, dict(validation), losses, predicted)
    result |= {"settings_sha256": sha256, "overrides": task_overrides()}
    if FIRST:
        try:
            write_losses(folder / "losses.csv", losses, history.first)
            write_json(folder / "result.json", result)
        finally:
            places = {"figures in": folder}
            places |= {"checkpoint in": folder / CHECKPOINTS / "last.ckpt"} if saves else {}
            places |= {"model in": folder / "hf"} if cfg.export == "hf" else {}
            _show(result, places)
    return result


@contextmanager
def _together(trainer: L.Trainer) -> Iterator[None]:
    """On an error end the ranks, too, that this process has started: one that is stuck would outlive the job."""
    try:
        yield
    except BaseException:
        end_children(trainer.strategy.launcher)
        raise


def _export(model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder; of a sharded model every rank has to call it."""
    weights = None
    if has_sharded_parameters(model):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
    if FIRST:
        model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)


def _predict(cfg: DictConfig, callbacks: list[L.Callback]) -> int | None:
    """The planned peak in bytes, told to the profiler, which compares; None where nothing compares it.

    Of several ranks it is each one's, by arithmetic: an estimate, which the profiler is not told, since it would warn.
    The profiler also learns whom to ask what would fit when the run goes out of memory.
    """
    profiler = next((callback for callback in callbacks if isinstance(callback, MemoryProfiler)), None)
    if profiler is None or not FIRST:
        return None
    device, ranks = device_of(cfg), ranks_of(cfg)
    try:
        if ranks > 1:
            return rank_bytes(plan_at(cfg, cfg.model.size, device), ranks, is_sharded(cfg), device.type)
        profiler.advise = profiler.advise or adviser(cfg, device)
        profiler.predicted_peak_bytes = plan_at(cfg, cfg.model.size, device).peak_bytes
    except SettingsError as error:
        # The model has been built by now: what keeps it from being planned does not keep it from training.
        warnings.warn(f"No peak was predicted for this run: {error}", stacklevel=2)
    return profiler.predicted_peak_bytes


def _build(cfg: DictConfig) -> torch.nn.Module:
    try:
        return models.build(
            cfg.model.name,
            cfg.model.size,
            num_layers=cfg.model.num_layers,
            pretrained=cfg.model.pretrained,
            model_id=cfg.model.id,
            backend=cfg.backend.name,
            dtype=PRECISIONS[str(cfg.trainer.precision)],
            device=build_device_of(cfg),
            low_memory=cfg.model.low_memory,
            attn_implementation=cfg.model.attn_implementation,
            checkpointing=cfg.model.checkpointing,
            trust_remote_code=cfg.model.trust_remote_code,
            **model_values(cfg),
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # transformers' classes meet wrong values with whatever exception these happen to cause.
        given = OmegaConf.to_container(cfg.model.overrides)
        values = f" with model.overrides={show(given)}" if given else ""
        kind = "" if isinstance(error, (ValueError, ImportError, OSError)) else f"{type(error).__name__}: "
        raise SettingsError(f"The model could not be built{values}: {kind}{error}") from error


def _tokenizer(cfg: DictConfig) -> Any:
    """The model's own tokenizer at full size; at tiny size the data trains one."""
    if cfg.model.size == "tiny":
        return None
    from transformers import AutoTokenizer

    made = cfg.model.get("config")
    source = cfg.model.id or made if cfg.model.name == "hf" else models.PRESETS[cfg.model.name].hub_id
    try:
        if made and not Path(made).is_dir():
            raise OSError("an architecture or a config.json brings none")
        return AutoTokenizer.from_pretrained(source, trust_remote_code=cfg.model.trust_remote_code)
    except (OSError, ValueError) as error:
        if cfg.model.name != "hf" or cfg.model.pretrained:
            raise SettingsError(f"The tokenizer of {source} could not be loaded: {error}") from error
        first = str(error).partition("\n")[0]
        console.print(
            f"{source} has no tokenizer ({first}). As its weights are random, a small byte-level BPE is trained on the "
            "data in its place."
        )
        return None


def _fits(cfg: DictConfig) -> dict[str, int]:
    """The most tokens of a tokenizer that is trained for a model whose vocabulary is given."""
    config = models.build_config(cfg.model.name, cfg.model.size, model_id=cfg.model.id, **model_values(cfg))
    vocab_size = config.get_text_config().vocab_size
    return {"vocab_size": vocab_size} if vocab_size < 4096 else {}


def _check_disk(model: torch.nn.Module, folder: Path) -> None:
    need = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    free = shutil.disk_usage(folder).free
    if need > free:
        raise SettingsError(
            f"A checkpoint with AdamW's state needs about {need / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB "
            "free. Free some disk, set hydra.run.dir to another one, or use callbacks=default, which writes none."
        )


def _quiet() -> None:
    """Silence what a user of this command cannot act on."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for name in ("torchao", "torch.utils._pytree"):  # how an installed torchao loads, with which optimizer ever
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning_sonar.memory.explain").setLevel(logging.CRITICAL)  # `run_job` prints it
    for text in (
        "does not have many workers",
        "It is recommended to use .self.log\\(.*sync_dist=True",  # said of held-out figures, which gather themselves
        "Experiment logs directory .* exists and is not empty",
        "Using ModelCheckpoint with manual optimization",  # after the optimizer's step is what is wanted
        "The number of training batches .* is smaller than the logging interval",
        "The dirpath has changed from",  # a run that goes on has a folder of its own
        "`isinstance.treespec, LeafSpec.` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=f".*{text}.*")


def _show(result: dict[str, Any], places: dict[str, Path]) -> None:
    def number(value: float | None, form: str, unit: str = "") -> str:
        return "not measured" if value is None else f"{value:{form}}{unit}"

    peak = number(None if result["peak_memory_bytes"] is None else result["peak_memory_bytes"] / 1e9, ".3f", " GB")
    planned = result["predicted_peak_bytes"]
    word = "estimated for each rank" if result["ranks"] > 1 else "predicted"
    said = [] if result["peak_phase"] is None else [f"phase: {result['peak_phase']}"]
    said += [] if planned is None else [f"{word}: {planned / 1e9:.3f} GB"]
    of_the_peak = f" ({'; '.join(said)})" if said else ""
    times = result["step_time_ms"]
    on = "" if result["expert_clip"] == "none" else f", expert_clip {result['expert_clip']}"
    on += "" if result["accumulation"] == "exact" else f", accumulation {result['accumulation']}"
    on += "" if result["expert_state_device"] is None else f", expert states on {result['expert_state_device']}"
    console.print(
        f"\n{result['model']} ({result['size']}, {result['params_total'] / 1e6:,.1f} M parameters, "
        f"{result['params_expert'] / result['params_total']:.0%} in experts), mode {result['mode']}{on}, backend "
        f"{result['backend']}, {result['device']}\n"
        f"  peak memory    {peak}{of_the_peak}\n"
        f"  step time      {number(times['median'], '.1f', ' ms')}\n"
        f"  train loss     {number(result['train_loss_first'], '.3f')} -> {number(result['train_loss'], '.3f')} "
        f"after {result['steps']} steps\n"
        f"  held-out loss  {number(result['heldout_loss'], '.4f')}\n"
        + "\n".join(f"  {name:<14} {path}" for name, path in places.items()),
        soft_wrap=True,  # a path that is cut cannot be copied
    )
