"""Train a small model of every Mixture-of-Experts family of transformers in two modes and compare bit for bit.

python experiments/families.py
python experiments/families.py mixtral qwen3_moe --dtype float32
python experiments/families.py --write docs/families.md --write families.json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning as L
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from experiments.family_shapes import FAMILIES, PATTERNS, SIZES
from experiments.measuring import deterministic
from lightning_sonar import FusedAdamW, SonarMoEStrategy, find_expert_tensors, models
from lightning_sonar.data import DataError, check_packing
from lightning_sonar.language_model import LanguageModel

STEPS = 2
_BATCH = (2, 12)  # records, tokens
_PRECISION = {"float32": "32-true", "bfloat16": "bf16-true"}
COMMAND = "python experiments/families.py --write docs/families.md"


class FamilyError(Exception):
    """Why a family does not work, as the table says it."""


@dataclass
class Family:
    """One row of the table.

    Attributes:
        family: transformers' ``model_type``.
        backend: the expert kernel: ``grouped_mm``, or ``own`` where the model runs expert code of its own.
        tensors: number of expert tensors of the small model; 0 if it could not be built.
        share: share of the small model's parameters that are expert parameters.
        default_total: number of parameters of the default configuration; ``None`` if it makes no MoE.
        default_share: share of those in experts.
        default_note: why the default configuration makes no MoE.
        experts: what had to be passed as ``experts``.
        dtype: of weights and states in the comparison that ``works`` is about.
        packs: whether the records of a packed row stay apart.
        works: whether two steps of ``sonar`` and ``standard_no_expert_clip`` gave the same bits.
        reason: why not.
        seconds: time taken, for the small model only.
    """

    family: str
    backend: str = ""
    tensors: int = 0
    share: float = 0.0
    default_total: int | None = None
    default_share: float | None = None
    default_note: str = ""
    experts: str = "auto"
    dtype: str = "bfloat16"
    packs: bool = False
    works: bool = False
    reason: str = ""
    seconds: float = 0.0


class _Gradients(L.Callback):
    """Which expert tensors still had a gradient when a backward was over."""

    def __init__(self, experts: Sequence[Tensor]) -> None:
        self.experts = experts
        self.kept: list[int] = []

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.kept.append(sum(tensor.grad is not None for tensor in self.experts))


def shape_of(family: str) -> dict[str, Any]:
    """The configuration values of a family's small model."""
    default = transformers.AutoConfig.for_model(family)
    return {key: value for key, value in SIZES.items() if models.has_value(default, key)} | FAMILIES[family]


def small_model(family: str, dtype: torch.dtype) -> tuple[torch.nn.Module, str]:
    """The small model and the kernel that its experts run; the same weights at each call."""
    shape = shape_of(family)
    config = models.build_config("hf", "full", config=family, **shape)
    backend = "grouped_mm" if models.takes_backend(config) else "eager"
    torch.manual_seed(0)
    model = models.build("hf", "full", config=family, dtype=dtype, backend=backend, **shape)
    return model, backend if models.takes_backend(config) else "own"


def _records() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(2, SIZES["vocab_size"], _BATCH, generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


def train(model: torch.nn.Module, mode: str, experts: str, precision: str) -> tuple[dict[str, Tensor], list[int]]:
    """Train `STEPS` steps.

    Returns:
        Every weight and optimizer state by name, and for each step how many expert tensors had a gradient after
        backward.
    """
    gradients = _Gradients(find_expert_tensors(model, experts).tensors)
    module = LanguageModel(model, lambda parameters: FusedAdamW(parameters, lr=1e-2, weight_decay=0.1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SonarMoEStrategy(mode=mode, experts=experts),
        max_steps=STEPS,
        precision=precision,  # type: ignore[arg-type]
        gradient_clip_val=0.05,
        callbacks=[gradients],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(2)  # dropout and a router's noise
    trainer.fit(module, DataLoader(_records(), batch_size=None))  # type: ignore[arg-type]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    values |= dict(model.named_buffers())
    for parameter, state in trainer.optimizers[0].state.items():
        values |= {f"{names[id(parameter)]}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return values, gradients.kept


def compare(family: str, dtype: str = "bfloat16") -> Family:
    """Train a family's small model in both modes and compare; what goes wrong stands in the row.

    A model that cannot run in bfloat16 at all is tried in float32; the row says so.
    """
    row = Family(family, experts=PATTERNS.get(family, "auto"))
    start = time.perf_counter()
    for row.dtype in dict.fromkeys([dtype, "float32"]):
        try:
            with deterministic():
                _compare(row)
            row.works = True
            break
        except FamilyError as error:
            row.reason = str(error)
            break
        except Exception as error:  # whatever a family's code may raise is what the table is to say
            row.reason = row.reason or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    row.seconds = time.perf_counter() - start
    return row


def _compare(row: Family) -> None:
    dtype = row.dtype
    model, row.backend = small_model(row.family, getattr(torch, dtype))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    experts = find_expert_tensors(model, row.experts)
    row.tensors, row.share = len(experts), experts.numel / experts.total_numel
    with suppress(DataError):
        check_packing(model, rows=1)
        row.packs = True
    inside, kept = train(model, "sonar", row.experts, _PRECISION[dtype])
    if any(kept):
        raise FamilyError(f"{max(kept)} expert tensors kept their gradient until the end of backward")
    still = [name for name in experts if torch.equal(before[name], inside[name])]
    if still:
        raise FamilyError(f"{len(still)} expert tensors were not updated, {still[0]} for one")
    twin, _ = small_model(row.family, getattr(torch, dtype))
    after, kept = train(twin, "standard_no_expert_clip", row.experts, _PRECISION[dtype])
    if min(kept) == 0:
        raise FamilyError("standard_no_expert_clip left no expert gradient, so nothing was compared")
    if inside.keys() != after.keys():
        raise FamilyError(f"the modes have different states: {sorted(inside.keys() ^ after.keys())[:3]}")
    other = [name for name in inside if not torch.equal(inside[name], after[name])]
    if other:
        raise FamilyError(f"{len(other)} of {len(inside)} weights and states differ, {other[0]} for one")


def count_default(row: Family) -> None:
    """Fill in what the family's default configuration holds, counted without allocating it."""
    try:
        total, experts = models.count_parameters(
            models.build_config("hf", "full", config=row.family), experts=row.experts
        )
    except ValueError as error:
        row.default_note = _default_note(error)
        return
    row.default_total, row.default_share = total, experts / total


def _default_note(error: ValueError) -> str:
    cause = error.__cause__
    if cause is not None:
        return f"transformers has no default for all values ({type(cause).__name__})"
    return "the default has no experts"


def known(families: Sequence[str]) -> list[str]:
    """Those of the families that the installed transformers has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return [family for family in families if family in CONFIG_MAPPING]


def markdown(rows: Sequence[Family], dtype: str) -> str:
    """The table and what it says, as a page."""
    works = sum(row.works for row in rows)
    otherwise = sum(row.works and row.dtype != dtype for row in rows)
    but = f" ({otherwise} of them, which cannot run in it, in float32)" if otherwise else ""
    lines = [
        "# Mixture-of-Experts families of transformers",
        "",
        f"{works} of {len(rows)} families train with in-backward updates bit for bit as they do without. Of each, a",
        f"small random model takes {STEPS} steps in `sonar` and in `standard_no_expert_clip`, in "
        f"{dtype}{but} on a CPU,",
        "dense clipping at work; weights, buffers and optimizer states are compared. In `sonar` no expert tensor may",
        "hold a gradient after backward, and each must have changed. Packing: whether `data.packing=true` keeps the",
        "records of a row apart in the small model; where it does not, it is refused.",
        "",
        f"Made with transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]} by",
        "",
        f"    {COMMAND}",
        "",
        "`family` is what `model.config` takes: `python experiments/run.py model=hf model.config=mixtral`. The default",
        "is the architecture's default configuration in transformers, counted on the meta device. The small model is",
        "what was trained; `tensors` are its expert tensors. `own` under kernel: the model has expert code of its own.",
        "",
        "| family | kernel | default: parameters | in experts | small: tensors | in experts | packing | works |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        total = row.default_note if row.default_total is None else f"{row.default_total / 1e9:.2f} B"
        share = "" if row.default_share is None else f"{row.default_share:.1%}"
        how = "yes" if row.experts == "auto" else f"yes, with `experts={row.experts}`"
        if row.works and row.reason:
            how += f", in {row.dtype}; not in {dtype}: {row.reason}"
        how = (how if row.works else f"no: {row.reason}").replace("|", "\\|")
        lines.append(
            f"| {row.family} | {row.backend} | {total} | {share} | {row.tensors} | {row.share:.1%} | "
            f"{'yes' if row.packs else 'no'} | {how} |"
        )
    return "\n".join(lines) + "\n"


def _quiet() -> None:
    """Silence what says nothing about a family."""
    transformers.logging.set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*efined a `validation_step` but have no `val_dataloader`.*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a family does not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all by default")
    parser.add_argument(
        "--dtype", choices=list(_PRECISION), default="bfloat16", help="of weights and states (default: %(default)s)"
    )
    parser.add_argument(
        "--write", action="append", type=Path, default=[], metavar="FILE", help="a table, FILE.md or FILE.json"
    )
    parser.add_argument("--list", action="store_true", help="only name the families")
    options = parser.parse_args(arguments)
    wrong = [name for name in options.families if name not in FAMILIES]
    if wrong:
        parser.error(f"no such family: {', '.join(wrong)}. Choose from {', '.join(FAMILIES)}.")
    if any(path.suffix not in (".md", ".json") for path in options.write):
        parser.error("--write: expected a file that ends in .md or .json")
    wanted = options.families or list(FAMILIES)
    if options.list:
        print("\n".join(wanted))
        return 0
    _quiet()
    rows = []
    there = known(wanted)
    for name in wanted:
        if name not in there:
            reason = f"transformers {transformers.__version__} has no such architecture"
            rows.append(Family(name, reason=reason))
        else:
            rows.append(compare(name, options.dtype))
            count_default(rows[-1])
        row = rows[-1]
        verdict = f"bitwise equal in {row.dtype}" if row.works else row.reason
        print(f"{name:20} {row.backend:10} {row.tensors:3} tensors  {row.seconds:5.2f} s  {verdict}", flush=True)
    page = markdown(rows, options.dtype)
    print(f"\n{page}")
    for path in options.write:
        path.write_text(page if path.suffix == ".md" else json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.works for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
