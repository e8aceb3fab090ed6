"""What `experiments/plan.py` does: compose, simulate each combination, say which card holds it."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.table import Table

from experiments.overrides import OverrideError, check_overrides
from experiments.plans import plan_of
from experiments.result import write_json
from experiments.settings import PRECISIONS, SettingsError, check_values, settle_defaults
from lightning_sonar import models
from lightning_sonar.config_dir import config_dir
from lightning_sonar.memory.cards import CARDS, CONTEXT_BYTES, GIB, fits, parse_bytes, smallest_card
from lightning_sonar.memory.figure import draw_plans
from lightning_sonar.memory.planner import MemoryPlan
from lightning_sonar.memory.search import BATCH_SIZES, Candidate, Found, search
from lightning_sonar.memory.sizing import training_requirement
from lightning_sonar.modes import MODES, resolve_mode

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)

USAGE = """usage: python experiments/plan.py [KEY=VALUE ...]

Predicts the peak memory of a training step, on fake tensors: nothing is allocated, no GPU is needed.

Takes the overrides of experiments/run.py; several values (KEY=A,B) give one row each. Without mode= every mode is
planned. model.size is full unless set. And:

  device_memory=24GiB    search for combinations of mode, checkpointing, loss and batch that fit, best first
  context_memory=0.7GB   what a CUDA process takes beside its tensors
  out=DIR                folder for plan.json and plan.png (default: outputs/plan/TIME)

  python experiments/plan.py model=olmoe
  python experiments/plan.py model=olmoe,granite backend=grouped_mm,sonicmoe mode=standard,sonar
  python experiments/plan.py model=olmoe data.batch_size=32 model.checkpointing=true,false model.loss=full,chunked
  python experiments/plan.py model=hf model.id=path/or/hub-id device_memory=80GiB
"""


def main(arguments: list[str]) -> int:
    """Run the command line and return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        own, overrides = _split(arguments)
        device = parse_bytes(own["device_memory"]) if "device_memory" in own else None
        context = parse_bytes(own.get("context_memory", CONTEXT_BYTES))
        folder = Path(own.get("out", f"outputs/plan/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"))
        check_overrides(overrides, config_dir())
        if device is not None:
            return _search(overrides, device, context, folder)
        return _table(overrides, context, folder)
    except (OverrideError, SettingsError, ValueError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2


OWN = ("device_memory", "context_memory", "out")


def _split(arguments: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    own: dict[str, str] = {}
    overrides: list[str] = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if key in OWN and separator:
            own[key] = value
        elif argument.startswith("-"):
            raise OverrideError(f"{argument}: plan.py has no such flag. See python experiments/plan.py --help.")
        else:
            overrides.append(argument)
    return own, overrides


def _table(overrides: list[str], context: int, folder: Path) -> int:
    plans = [_plan(cfg) for cfg in _configurations(overrides)]
    _show(plans, context)
    _write(plans, context, folder)
    return 0


def _configurations(overrides: list[str], sweep: bool = True) -> Iterator[DictConfig]:
    """One settled configuration for each combination of the values given."""
    if sweep and not any(_key(override) == "mode" for override in overrides):
        overrides = [*overrides, f"mode={','.join(MODES)}"]
    if not any(_key(override) == "model.size" for override in overrides):
        overrides = [*overrides, "model.size=full"]
    parsed: list[Override] = OverridesParser.create().parse_overrides(overrides)
    combinations: list[list[str]] = [[]]
    for override in parsed:
        values = [override.input_line or ""]
        if override.is_sweep_override():
            values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        combinations = [[*chosen, value] for chosen in combinations for value in values]
    for combination in combinations:
        yield _settled(combination)


def _settled(overrides: list[str]) -> DictConfig:
    try:
        with initialize_config_dir(config_dir=str(config_dir()), version_base="1.3"):
            # Run folders are Hydra's own, and there is no job here.
            cfg = compose(
                "config", overrides=[*overrides, "trainer.default_root_dir=null", "callbacks=none", "logger=none"]
            )
    except HydraException as error:
        raise OverrideError(str(error)) from error
    modelled = cfg.backend.name if cfg.backend.name in ("sonicmoe",) else None
    with open_dict(cfg):
        if modelled is not None:
            cfg.backend.name = "auto"
        check_values(cfg)
        settle_defaults(cfg, cfg.model.size)
        cfg.backend.name = modelled or ("grouped_mm" if cfg.backend.name == "auto" else cfg.backend.name)
        cfg.size_defaults = None
    return cfg


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _plan(cfg: DictConfig) -> MemoryPlan:
    try:
        return plan_of(cfg)
    except OSError as error:
        raise SettingsError(f"model.id={cfg.model.id}: no configuration could be loaded: {error}") from error


def _search(overrides: list[str], device: int, context: int, folder: Path) -> int:
    given = {_key(override): override.split("=", 1)[1] for override in overrides if "=" in override}

    def choices(key: str, default: Iterable[Any]) -> list[Any]:
        return given[key].split(",") if key in given else list(default)

    rest = [o for o in overrides if _key(o) not in ("mode", "model.checkpointing", "model.loss", "data.batch_size")]

    def overrides_of(candidate: Candidate) -> list[str]:
        return [
            *rest,
            f"mode={candidate.mode}",
            f"optimizer={candidate.optimizer}",
            f"model.checkpointing={str(candidate.checkpointing).lower()}",
            f"model.loss={candidate.loss}",
            f"data.batch_size={candidate.batch_size}",
        ]

    def configuration(candidate: Candidate) -> DictConfig:
        return next(_configurations(overrides_of(candidate), sweep=False))

    tried: list[MemoryPlan] = []

    def simulate(candidate: Candidate) -> MemoryPlan:
        tried.append(_plan(configuration(candidate)))
        console.print(f"  tried {_name(candidate)}: {tried[-1].reserved_bytes / 1e9:.1f} GB")
        return tried[-1]

    counts: list[tuple[int, int]] = []
    floors: list[int] = []

    def floor(candidate: Candidate) -> int:
        cfg = configuration(candidate)
        if not counts:
            counts.append(_count(cfg))
        need = training_requirement(*counts[0], resolve_mode(candidate.mode), PRECISIONS[str(cfg.trainer.precision)])
        floors.append(need.parameters + need.states + need.gradients)
        return floors[-1]

    console.print(f"searching for what fits {device / GIB:.1f} GiB ({context / 1e9:.1f} GB of it for the process)")
    found = search(
        simulate,
        device,
        modes=choices("mode", ("standard", "sonar", "in_backward_all")),
        optimizers=choices("optimizer", ("fused_adamw",)),
        checkpointing=[str(c).lower() == "true" for c in choices("model.checkpointing", (False, True))],
        losses=choices("model.loss", ("full", "chunked")),
        batch_sizes=[int(b) for b in choices("data.batch_size", BATCH_SIZES)],
        context_bytes=context,
        floor=floor,
    )
    _write([one.plan for one in found], context, folder)
    if not found:
        least = min((plan.reserved_bytes for plan in tried), default=min(floors))
        console.print(
            f"nothing fits {device / GIB:.1f} GiB: the least of what was tried needs {(least + context) / 1e9:.1f} GB. "
            "Try a larger device, a shorter data.seq_len, or fewer layers (model.num_layers)."
        )
        return 1
    _show_found(found, device, context, overrides_of)
    return 0


def _count(cfg: DictConfig) -> tuple[int, int]:
    config = models.build_config(
        cfg.model.name,
        cfg.model.size,
        num_layers=cfg.model.num_layers,
        model_id=cfg.model.id,
        trust_remote_code=cfg.model.trust_remote_code,
        **OmegaConf.to_container(cfg.model.overrides),  # type: ignore[arg-type]
    )
    return models.count_parameters(config, cfg.model.trust_remote_code)


def _name(candidate: Candidate) -> str:
    parts = [candidate.mode, candidate.optimizer]
    parts += ["checkpointing"] if candidate.checkpointing else []
    parts += ["chunked loss"] if candidate.loss == "chunked" else []
    return f"{', '.join(parts)}, batch {candidate.batch_size}"


def _show(plans: list[MemoryPlan], context: int) -> None:
    """Rows by what they hold, and the smallest card that holds them."""
    first = plans[0]
    table = Table(title="predicted peak of one training step (GB = 1,000,000,000 bytes)", title_justify="left")
    varying = [name for name in NAMES if len({str(getattr(plan, name)) for plan in plans}) > 1 or name == "mode"]
    for name in varying:
        table.add_column(name.replace("_", " "))
    saved = [_saved(plan, plans) for plan in plans]
    for name in ("peak GB", *(["saved"] if any(saved) else []), "params", "states", "expert grads", "dense grads"):
        table.add_column(name, justify="right")
    for name in ("activ.", "temp."):
        table.add_column(name, justify="right")
    table.add_column("peak in")
    table.add_column("expert grads alive", justify="right")
    table.add_column("reserved GB", justify="right")
    table.add_column("fits from", justify="right")
    for plan, saving in zip(plans, saved, strict=True):
        card = smallest_card(plan.reserved_bytes, context)
        table.add_row(
            *(_text(getattr(plan, name)) for name in varying),
            f"{plan.peak_bytes / 1e9:.2f}",
            *([saving] if any(saved) else []),
            *(f"{value / 1e9:.2f}" for value in plan.split.values()),
            f"{plan.peak_phase}, {plan.peak_op.removeprefix('aten.').removesuffix('.default')}",
            str(plan.peak_expert_grads),
            f"{plan.reserved_bytes / 1e9:.2f}",
            "none" if card is None else f"{card} GiB",
        )
    console.print(table)
    fixed = [f"{name.replace('_', ' ')} {_text(getattr(first, name))}" for name in NAMES if name not in varying]
    console.print("all rows: " + ", ".join(fixed))
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        console.print(f"note: {note}")
    _show_cards(plans, varying, context)


NAMES = ("model", "size", "mode", "backend", "optimizer", "batch_size", "seq_len", "checkpointing", "loss", "precision")


def _show_cards(plans: list[MemoryPlan], varying: list[str], context: int) -> None:
    table = Table(title="which card holds it", title_justify="left")
    table.add_column(", ".join(name.replace("_", " ") for name in varying))
    for card in CARDS:
        table.add_column(f"{card} GiB", justify="center")
    for plan in plans:
        holds = [fits(plan.reserved_bytes, card * GIB, context) for card in CARDS]
        table.add_row(", ".join(_text(getattr(plan, name)) for name in varying), *("yes" if h else "-" for h in holds))
    console.print(table)
    console.print(
        f"A card holds a row if what the caching allocator would reserve (an estimate) and {context / 1e9:.1f} GB for "
        "the process's CUDA context and workspaces (an assumption; context_memory=...) fit together."
    )


def _saved(plan: MemoryPlan, plans: list[MemoryPlan]) -> str:
    """Against the standard row of the same setting."""
    same = [name for name in NAMES if name != "mode"]
    for other in plans:
        if other.mode == "standard" and all(getattr(other, name) == getattr(plan, name) for name in same):
            return f"{1 - plan.peak_bytes / other.peak_bytes:.1%}" if other is not plan else "0.0%"
    return ""


def _text(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _show_found(found: list[Found], device: int, context: int, overrides_of: Callable[[Candidate], list[str]]) -> None:
    table = Table(title=f"what fits {device / GIB:.1f} GiB, best first", title_justify="left")
    for name in ("mode", "optimizer", "checkpointing", "loss"):
        table.add_column(name)
    for name in ("batch", "tokens", "peak GB", "reserved GB", "left GB"):
        table.add_column(name, justify="right")
    table.add_column("gives up")
    for one in found:
        table.add_row(
            one.candidate.mode,
            one.candidate.optimizer,
            _text(one.candidate.checkpointing),
            one.candidate.loss,
            str(one.candidate.batch_size),
            str(one.plan.batch_size * one.plan.seq_len),
            f"{one.plan.peak_bytes / 1e9:.2f}",
            f"{one.plan.reserved_bytes / 1e9:.2f}",
            f"{(device - context - one.plan.reserved_bytes) / 1e9:.2f}",
            MODES[one.candidate.mode].gives_up,
        )
    console.print(table)
    console.print("to run the first:")
    sizes = [] if any(_key(o) == "model.size" for o in overrides_of(found[0].candidate)) else ["model.size=full"]
    console.print(
        "  python experiments/run.py " + " ".join([*overrides_of(found[0].candidate), *sizes]), soft_wrap=True
    )


def _write(plans: list[MemoryPlan], context: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for plan in plans:
        holds = [card for card in CARDS if fits(plan.reserved_bytes, card * GIB, context)]
        rows.append(plan.to_dict() | {"cards_gib": holds})
    write_json(folder / "plan.json", {"rows": rows, "context_bytes": context, "predicted": True})
    pair = _pair(plans)
    if pair:
        first = next(iter(pair.values()))
        draw_plans(
            {name: plan.curve for name, plan in pair.items()},
            folder / "plan.png",
            f"{first.model} ({first.size}), {first.backend}, batch {first.batch_size} x {first.seq_len} tokens: one "
            "training step, predicted",
        )
    console.print(f"written to {folder}")


def _pair(plans: list[MemoryPlan]) -> dict[str, MemoryPlan]:
    """Standard and sonar of the first setting that has both; else the first plan."""
    same = [name for name in NAMES if name != "mode"]
    for plan in plans:
        if plan.mode == "standard":
            for other in plans:
                if other.mode == "sonar" and all(getattr(other, name) == getattr(plan, name) for name in same):
                    return {"standard": plan, "sonar": other}
    return {plans[0].mode: plans[0]} if plans else {}
