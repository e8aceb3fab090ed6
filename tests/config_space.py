"""Compose, validate and train configurations of the command line in this process, and say how each ended."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from experiments import job
from experiments.launch import launch
from experiments.overrides import OverrideError, check_overrides
from lightning_sonar.config_dir import config_dir

CONF = config_dir()
SCRIPT = CONF.parent / "experiments" / "run.py"

SMALLEST = [
    *("model.size=tiny", "model.num_layers=1", "data.seq_len=32", "data.batch_size=1", "callbacks=none"),
    *("trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.enable_progress_bar=false"),
    *("trainer.accelerator=cpu", "logger=none"),
]
"""What makes a run take about a second. Overrides that come later win."""

WIDTHS = ["hidden_size=32", "intermediate_size=16", "num_attention_heads=2", "num_key_value_heads=2"]


GROUPS: dict[str, list[str]] = {
    "mode": ["standard", "standard_no_expert_clip", "in_backward_all", "sonar", "sonar_per_expert", "sonar_exact_clip"],
    "backend": ["auto", "grouped_mm", "eager", "batched_mm"],
    "model": ["olmoe", "granite", "olmoe", "granite", "hf"],
    "optimizer": ["fused_adamw", "torch_adamw", "bnb_adamw8bit", "bnb_adamw8bit_experts", "adamw4bit"],
    "scheduler": ["constant", "linear_warmup", "onecycle"],
    "trainer": ["default", "ddp", "fsdp"],
    "callbacks": ["none", "default", "checkpoint"],
    "logger": ["none", "csv"],
    "data": ["json", "builtin"],
}

UNAVAILABLE = [
    ("backend", "scattermoe"),
    ("backend", "sonicmoe"),
    ("optimizer", "flash_adamw"),
    ("logger", "tensorboard"),
]
"""Choices that cannot run on a CPU, or lack a package."""

VALUES: dict[str, tuple[list[str], list[str]]] = {
    "mode.expert_clip": (["none", "exact", "lagged", "per_tensor", "per_expert"], ["sometimes", "null", "1"]),
    "mode.accumulation": (["exact", "host", "per_microbatch"], ["never", "null", "0"]),
    "mode.expert_state_device": (["null", "cpu"], ["disk", "cuda:1", "-1"]),
    "mode.on_nonfinite": (["skip", "raise", "ignore"], ["stop", "null"]),
    "mode.check": (["loss", "gradient"], ["all", "1"]),
    "mode.log_grad_norm": (["true", "false", "1"], ["abc", "-2", "1.5", "null"]),
    "mode.experts": (["auto", "[gate_up_proj,down_proj]"], ["nothing_of_that_name", "['(']", "3", "null"]),
    "model.num_layers": (["1", "2"], ["0", "-1", "1.5", "two", "[1]"]),
    "model.loss": (["full", "chunked"], ["half", "null"]),
    "model.checkpointing": (["true", "false"], ["abc", "1", "null"]),
    "model.router_aux_loss": (["0.0", "0.01", "1"], ["-0.5", "nan", "inf", "abc", "null"]),
    "model.attn_implementation": (["null", "eager", "sdpa"], ["no_such_attention", "7", "true"]),
    "model.pretrained": (["null", "false"], ["true", "maybe"]),
    "model.id": (["null"], ["some/where", "5"]),
    "model.size": (["tiny", "auto"], ["huge", "null", "1"]),
    "model.overrides": (["{}"], ["null", "abc", "[1]"]),
    "data.batch_size": (["1", "2"], ["0", "-2", "two", "1.5", "null", "true"]),
    "data.seq_len": (["32", "64"], ["0", "-1", "7", "short", "12.5"]),
    "data.packing": (["true", "false"], ["abc", "1", "null"]),
    "data.pad_to_seq_len": (["true", "false"], ["abc", "null"]),
    "data.chat_template": (["auto", "none"], ["chatml", "null", "1"]),
    "data.max_records": (["null", "30"], ["1", "-1", "abc", "2.5"]),
    "data.heldout_size": (["4", "512"], ["0", "-1", "null"]),
    "data.num_workers": (["0"], ["-1", "abc", "null", "0.5"]),
    "data.source": ([], ["parquet", "null", "4"]),
    "optimizer.lr": (["null", "0", "1e-3"], ["-1", "abc", "nan", "inf", "[1]"]),
    "optimizer.betas": (["[0.8,0.9]"], ["[0.9]", "0.9", "[2,0.9]", "[a,b]", "null"]),
    "optimizer.eps": (["1e-6"], ["-1", "abc", "null"]),
    "optimizer.weight_decay": (["0", "0.1"], ["-0.1", "abc", "nan"]),
    "trainer.precision": (["bf16-true", "bf16-mixed", "32"], ["16-mixed", "fp8", "null", "64.5"]),
    "trainer.gradient_clip_val": (["null", "0", "0.5", "inf"], ["-1", "abc", "nan", "true"]),
    "trainer.gradient_clip_algorithm": (["norm", "value", "null"], ["max", "1"]),
    "trainer.accumulate_grad_batches": (["1", "2"], ["0", "-1", "1.5", "null", "abc"]),
    "trainer.log_every_n_steps": (["1", "5"], ["0", "-1", "null", "abc"]),
    "trainer.max_epochs": (["null"], ["abc", "-2", "0.5"]),
    "trainer.max_time": (["null", "'00:01:00:00'"], ["abc", "-1", "true"]),
    "trainer.devices": (["1", "auto"], ["0", "-3", "abc", "1.5", "null", "2"]),
    "trainer.num_nodes": (["1"], ["0", "abc", "null", "2"]),
    "trainer.accelerator": (["cpu"], ["gpu", "quantum", "null"]),
    "trainer.limit_val_batches": (["1", "0.5", "0"], ["-1", "abc", "1.5"]),
    "trainer.limit_train_batches": (["null", "1.0", "8"], ["-1", "2.5", "abc"]),
    "trainer.val_check_interval": (["null", "2"], ["-1", "abc", "0", "100000"]),
    "trainer.check_val_every_n_epoch": (["1", "2"], ["0", "-1", "abc"]),
    "trainer.num_sanity_val_steps": (["0", "1"], ["-2", "abc", "1.5"]),
    "trainer.overfit_batches": (["0.0", "2"], ["-1", "1.5", "abc"]),
    "trainer.fast_dev_run": (["false"], ["-1", "abc", "1.5", "null"]),
    "trainer.detect_anomaly": (["false", "true"], ["abc", "1", "null"]),
    "trainer.inference_mode": (["false", "true"], ["abc", "1", "null"]),
    "trainer.deterministic": (["null", "true", "warn"], ["abc", "2"]),
    "trainer.benchmark": (["null", "true"], ["abc", "2"]),
    "trainer.profiler": (["null"], ["abc", "3"]),
    "trainer.plugins": (["null", "[]"], ["abc", "3"]),
    "trainer.barebones": (["false"], ["abc", "1"]),
    "trainer.strategy": ([], ["ddp", "null", "3"]),
    "seed": (["0", "7"], ["-1", "abc", "1.5", "null", "nan"]),
    "ckpt_path": (["null", "auto"], ["last", "no/such.ckpt", "4", "''"]),
    "export": (["null", "hf"], ["onnx", "true"]),
    "objective": (["heldout_loss"], ["null", "4", "''"]),
    "size_defaults.tiny.lr": (["1e-3"], ["-1", "abc", "null"]),
    "size_defaults.tiny": ([], ["null", "abc", "3"]),
}
"""Key: values that are right, at least beside some others, and values that never are."""

LATE = {"mode.experts", "model.attn_implementation", "ckpt_path", "trainer.val_check_interval"}
"""Keys whose wrong values show only when the model is built or the fit begins."""

MISSPELT = ["trainer.max_step=2", "model.num_layer=1", "mod=sonar", "mode=sonnar", "optimizer=adamw9bit"]
MISSPELT += ["sede=1", "data.batchsize=1", "backend=eagre", "+trainer.no_such_argument=1", "mode={name:sonar}"]


@dataclass(frozen=True)
class Outcome:
    """How a configuration ended.

    Attributes:
        kind: ``validated``, ``trained``, ``refused`` or ``crashed``.
        message: what a user would read on stderr, or the traceback.
        code: the exit code.
    """

    kind: str
    message: str
    code: int


def write_records(path: Path, count: int = 40) -> Path:
    """Short records, of which some fit a row of 32 tokens."""
    lines = [json.dumps({"instruction": f"Say {i}", "output": f"It is {i}, then {i + 1}."}) for i in range(count)]
    path.write_text("\n".join(lines))
    return path


def composed(overrides: Sequence[str], folder: Path) -> DictConfig:
    """Compose as the command does; the run folder is ``folder``."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides), return_hydra_config=True)
    cfg.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg.hydra  # a job does not see it
    return cfg


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Leave this process as it was: what a run switches on holds for a process, and its warnings are the user's."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    arguments, dtype = sys.argv, torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_default_dtype(dtype)
            torch.autograd.set_detect_anomaly(False)
            torch.backends.cudnn.benchmark = False
            sys.argv = arguments
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def validated(cfg: DictConfig, folder: Path, monkeypatch: Any) -> Outcome:
    """The run's own path up to where it would read data."""
    monkeypatch.setattr(job, "train", job.prepare)
    said = io.StringIO()
    with contained(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = job.run_job(cfg, folder)
        except Exception:
            return Outcome("crashed", traceback.format_exc(), 1)
    return Outcome("refused" if code else "validated", said.getvalue(), code)


def checked(overrides: Sequence[str]) -> Outcome | None:
    """What the command says of overrides that do not compose; None if they do."""
    try:
        check_overrides(list(overrides), CONF)
    except OverrideError as error:
        return Outcome("refused", f"error: {error}", 2)
    except Exception:
        return Outcome("crashed", traceback.format_exc(), 1)
    return None


def run(overrides: Sequence[str], folder: Path) -> Outcome:
    """The literal command line, whole, in this process."""
    arguments = [*overrides, f"hydra.run.dir='{folder}'"]
    said = io.StringIO()
    with contained(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        sys.argv = [str(SCRIPT), *arguments]
        try:
            code = launch(SCRIPT, arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:
            return Outcome("crashed", traceback.format_exc(), 1)
    text = said.getvalue()
    if code == 0:
        return Outcome("trained", text, 0)
    return Outcome("refused" if code in (2, 3) else "crashed", text, code)


def steps_of(folder: Path) -> int:
    """How many steps a finished run took."""
    return int(json.loads((folder / "result.json").read_text())["steps"])


def with_data(place: Path, groups: dict[str, str], width: bool = True) -> list[str]:
    """The groups as overrides, and what each cannot be without, in the smallest size."""
    chosen = {"data": "json", "callbacks": "none", "logger": "none", **groups}
    small = [o for o in SMALLEST if o.split("=")[0] not in chosen]
    made = [*(f"{group}={name}" for group, name in chosen.items()), *small, f"data.cache_dir='{place}/cache'"]
    if chosen["data"] == "json":
        made.append(f"data.path='{place}/records.jsonl'")
    if chosen.get("trainer", "default") != "default":
        made.append("trainer.devices=1")
    if chosen.get("model") == "hf":
        made = [o for o in made if not o.startswith("model.size")]
        made += ["model.config=mixtral", "+model.overrides.num_local_experts=4", "+model.overrides.vocab_size=400"]
        made += ["+model.overrides.head_dim=16"]
    return made + [f"+model.overrides.{value}" for value in WIDTHS if width]


def some_groups(count: int) -> list[dict[str, str]]:
    """Choices of every group: each group's choices come in turn, and the groups are shuffled against one another."""
    chance = random.Random(0)
    columns = {}
    for group, names in GROUPS.items():
        column = (names * (count // len(names) + 1))[:count]
        chance.shuffle(column)
        columns[group] = column
    made = [{group: column[row] for group, column in columns.items()} for row in range(count)]
    for row, (group, name) in zip(made[-len(UNAVAILABLE) :], UNAVAILABLE, strict=True):
        row[group] = name
    return made


COMPOSED = some_groups(24)


def check_refusal(outcome: Outcome, keys: list[str]) -> None:
    """One message, with a key that was set in it, no traceback, exit code 2."""
    assert outcome.kind == "refused", outcome.message
    assert outcome.code == 2
    lines = outcome.message.strip().splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, outcome.message
    assert "Traceback" not in outcome.message
    names = {part for key in keys for part in (key, key.rpartition(".")[2])}
    assert any(name in outcome.message for name in names), (keys, outcome.message)


def named_by(values: dict[str, str], groups: dict[str, str]) -> list[str]:
    """What a refusal of these may name: the keys that were set, or a choice of a group."""
    choices = [text for group, name in groups.items() for text in (f"{group}={name}", f"{group} {name!r}")]
    apart = [name for group, name in groups.items() if (group, name) in UNAVAILABLE]
    sharded = ["FSDP2"] if groups.get("trainer") == "fsdp" else []
    return [*values, "data.seq_len", *choices, *apart, *sharded]
