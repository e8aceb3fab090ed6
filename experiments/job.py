"""One training job: settle, build, fit, validate, report."""

from __future__ import annotations

import logging
import shutil
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.panel import Panel

from experiments.result import collect, write_json
from experiments.settings import PRECISIONS, SettingsError, device_of, settle
from lightning_sonar import models
from lightning_sonar.data import DataError
from lightning_sonar.language_model import LanguageModel

console = Console(highlight=False)


def run_job(cfg: DictConfig, folder: Path) -> int:
    """Run the job and return its exit code; a user's mistake ends in one message, not in a traceback."""
    try:
        train(cfg, folder)
    except (SettingsError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        (folder / "error.txt").write_text(f"{error}\n")
        return 2
    except Exception:
        (folder / "error.txt").write_text(traceback.format_exc())
        raise
    return 0


def train(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """Train and measure; returns what ``result.json`` holds."""
    _quiet()
    settle(cfg, say=lambda text: console.print(Panel(text, title="model size", border_style="yellow")))
    OmegaConf.resolve(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg))
    L.seed_everything(cfg.seed, workers=True, verbose=False)

    data = instantiate(cfg.data, tokenizer=_tokenizer(cfg))
    data.setup("fit")
    model = models.build(
        cfg.model.name,
        cfg.model.size,
        num_layers=cfg.model.num_layers,
        pretrained=cfg.model.pretrained,
        model_id=cfg.model.id,
        backend=cfg.backend.name,
        dtype=PRECISIONS[str(cfg.trainer.precision)],
        device=device_of(cfg),
        low_memory=cfg.model.low_memory,
        attn_implementation=cfg.model.attn_implementation,
        checkpointing=cfg.model.checkpointing,
        trust_remote_code=cfg.model.trust_remote_code,
        **cfg.model.overrides,
    )
    module = LanguageModel(
        model, instantiate(cfg.optimizer), instantiate(cfg.scheduler), router_aux_loss=cfg.model.router_aux_loss
    )
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    loggers = [instantiate(logger) for logger in cfg.logger.values()]
    if any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        _check_disk(model, folder)
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False)
    trainer.fit(module, data)
    validation = trainer.validate(module, data, verbose=False)[0] if trainer.limit_val_batches else {}
    result = collect(cfg, trainer, model, dict(validation), folder)
    write_json(folder / "result.json", result)
    _show(result, folder)
    return result


def _tokenizer(cfg: DictConfig) -> Any:
    """The model's own tokenizer at full size; at tiny size the data trains one."""
    if cfg.model.size == "tiny":
        return None
    from transformers import AutoTokenizer

    source = cfg.model.id if cfg.model.name == "hf" else models.PRESETS[cfg.model.name].hub_id
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=cfg.model.trust_remote_code)
    except OSError as error:
        raise SettingsError(f"The tokenizer of {source} could not be loaded: {error}") from error


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
    for text in (
        "does not have many workers",
        "Experiment logs directory .* exists and is not empty",
        "The number of training batches .* is smaller than the logging interval",
        "`isinstance.treespec, LeafSpec.` is deprecated",
    ):
        warnings.filterwarnings("ignore", message=f".*{text}.*")


def _show(result: dict[str, Any], folder: Path) -> None:
    def number(value: float | None, form: str, unit: str = "") -> str:
        return "not measured" if value is None else f"{value:{form}}{unit}"

    peak = number(None if result["peak_memory_bytes"] is None else result["peak_memory_bytes"] / 1e9, ".3f", " GB")
    times = result["step_time_ms"]
    console.print(
        f"\n{result['model']} ({result['size']}, {result['params_total'] / 1e6:,.1f} M parameters, "
        f"{result['params_expert'] / result['params_total']:.0%} in experts), mode {result['mode']}, backend "
        f"{result['backend']}, {result['device']}\n"
        f"  peak memory    {peak} (phase: {result['peak_phase']})\n"
        f"  step time      {number(times['median'], '.1f', ' ms')}\n"
        f"  train loss     {number(result['train_loss_first'], '.3f')} -> {number(result['train_loss'], '.3f')} "
        f"after {result['steps']} steps\n"
        f"  held-out loss  {number(result['heldout_loss'], '.4f')}\n"
        f"  figures in     {folder}"
    )
