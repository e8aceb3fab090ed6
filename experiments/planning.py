"""What `experiments/plan.py` does: compose, simulate each combination, say which card holds it."""

from __future__ import annotations

import datetime
import difflib
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.checks import SettingsError, check_values
from experiments.overrides import OverrideError, check_overrides, key_of, values_of
from experiments.plan_tables import console, show_found, show_plans, show_ranks, write_plans
from experiments.plans import plan_of
from experiments.result import optimizer_name
from experiments.settings import check_model, settle_defaults
from experiments.shape import Shape
from lightning_sonar.config_dir import config_dir
from lightning_sonar.memory.cards import CONTEXT_BYTES, GIB, parse_bytes
from lightning_sonar.memory.planner import MemoryPlan
from lightning_sonar.memory.search import BATCH_SIZES, Candidate, Tally, search
from lightning_sonar.modes import MODES

USAGE = """usage: python experiments/plan.py [KEY=VALUE ...]

Predicts the peak memory of a training step, on fake tensors: nothing is allocated, no GPU is needed.

Takes the overrides of experiments/run.py; several values (KEY=A,B) give one row each. Without mode= every mode is
planned, and sonar with what makes it smaller still. model.size is full unless set. And:

  device_memory=24GiB    search for combinations of mode, optimizer, checkpointing, loss and batch that fit, best first
  context_memory=0.7GB   what a CUDA process takes beside its tensors
  ranks=2,8              what each rank needs under FSDP2, by arithmetic on the plan
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
        context = parse_bytes(own.get("context_memory", CONTEXT_BYTES), least=0)
        folder = Path(own.get("out", f"outputs/plan/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"))
        check_overrides(overrides, config_dir())
        _make(folder)  # before minutes are spent on what could not be written
        if device is not None and "ranks" in own:
            raise ValueError("ranks= and device_memory= do not go together: the search plans one device.")
        if device is not None:
            return _search(overrides, device, context, folder)
        return _table(overrides, context, folder, _ranks(own.get("ranks", "")))
    except (OverrideError, SettingsError, ValueError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2


OPTIMIZERS = ("fused_adamw", "bnb_adamw8bit", "adamw4bit")
"""Optimizer configurations that the search tries where none is named, best first."""

SMALLER = (["optimizer=bnb_adamw8bit"], ["optimizer=adamw4bit"], ["mode.expert_state_device=cpu"])
"""What makes sonar smaller still; planned beside the modes where neither modes nor optimizers are named."""

SEARCHED = ("mode", "optimizer", "model.checkpointing", "model.loss", "data.batch_size")
OWN = ("device_memory", "context_memory", "ranks", "out")


def _split(arguments: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    own: dict[str, str] = {}
    overrides: list[str] = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if key in OWN and separator:
            own[key] = value
        elif argument.startswith("-"):
            raise OverrideError(f"{argument}: plan.py has no such flag. See python experiments/plan.py --help.")
        elif "." not in key and key not in _roots() and (close := difflib.get_close_matches(key, OWN, n=1)):
            raise OverrideError(f"{argument}: there is no {key!r}. Did you mean {close[0]}=...?")
        else:
            overrides.append(argument)
    return own, overrides


def _roots() -> set[str]:
    """Keys that a configuration has at its top."""
    groups = {path.name for path in config_dir().iterdir() if path.is_dir()}
    return groups | {str(key) for key in OmegaConf.load(config_dir() / "config.yaml")}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out={folder}: the folder cannot be made ({error.strerror}). Choose another one.") from error


def _ranks(text: str) -> list[int]:
    values = [value for value in text.split(",") if value]
    if not all(value.isdigit() and int(value) > 0 for value in values):
        raise ValueError(f"ranks={text}: expected whole numbers above 0, such as ranks=2,8.")
    return [int(value) for value in values]


def _table(overrides: list[str], context: int, folder: Path, ranks: list[int]) -> int:
    plans, refused = _planned(_configurations(overrides))
    varying = show_plans(plans, context)
    for reason in refused:
        console.print(f"not planned: {reason}")
    if not any(key_of(override).split(".")[0] in ("mode", "optimizer") for override in overrides):
        smaller = [_plan(cfg) for more in SMALLER for cfg in _configurations([*overrides, "mode=sonar", *more])]
        console.print("\nAnd mode sonar with smaller states, or with its experts' states in host memory:\n")
        varying += [name for name in show_plans(smaller, context, against=plans) if name not in varying]
        plans += smaller
    if ranks:
        show_ranks(plans, varying, ranks)
    write_plans(plans, context, folder, ranks)
    return 0


def _planned(configurations: Iterable[DictConfig]) -> tuple[list[MemoryPlan], list[str]]:
    """The plans of what can be trained, and what is refused, with the reason.

    Raises:
        ValueError: the first reason, if nothing is left.
    """
    plans: list[MemoryPlan] = []
    refused: dict[str, ValueError] = {}
    for cfg in configurations:
        try:
            plans.append(_plan(cfg))
        except SettingsError:
            raise
        except ValueError as error:
            refused[f"mode {cfg.mode.name} with optimizer {optimizer_name(cfg.optimizer)}: {error}"] = error
    if not plans:
        raise next(iter(refused.values()))
    return plans, list(refused)


def _configurations(overrides: list[str], sweep: bool = True) -> Iterator[DictConfig]:
    """One settled configuration for each combination of the values given."""
    if sweep and not any(key_of(override) == "mode" for override in overrides):
        overrides = [*overrides, f"mode={','.join(MODES)}"]
    if not any(key_of(override) == "model.size" for override in overrides):
        overrides = [*overrides, "model.size=full"]
    parsed: list[Override] = OverridesParser.create().parse_overrides(overrides)
    combinations: list[list[str]] = [[]]
    for override in parsed:
        values = values_of(override, config_dir())
        if not values:
            raise OverrideError(f"{override.input_line}: plan.py needs single values, such as KEY=A,B.")
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
        if cfg.model.size == "auto":
            raise SettingsError("model.size=auto: a plan needs a size; choose full or tiny.")
        settle_defaults(cfg, cfg.model.size)
        cfg.backend.name = modelled or ("grouped_mm" if cfg.backend.name == "auto" else cfg.backend.name)
        cfg.size_defaults = None
    return cfg


def _plan(cfg: DictConfig) -> MemoryPlan:
    try:
        return plan_of(cfg)
    except OSError as error:
        raise SettingsError(f"model.id={cfg.model.id}: no configuration could be loaded: {error}") from error
    except ValueError:
        check_model(cfg)  # which says it better, if it is the model
        raise
    except (ImportError, RuntimeError) as error:
        raise SettingsError(f"model={cfg.model.name}: {error}") from error


def _search(overrides: list[str], device: int, context: int, folder: Path) -> int:
    parsed: list[Override] = OverridesParser.create().parse_overrides(overrides)
    given = {override.get_key_element(): values_of(override, config_dir()) for override in parsed}
    for override in parsed:
        if override.is_sweep_override() and override.get_key_element() not in SEARCHED:
            raise SettingsError(f"{override.input_line}: the search takes one value here. Run it once for each.")

    def choices(key: str, default: Iterable[Any]) -> list[Any]:
        return [value.split("=", 1)[1] for value in given[key]] if key in given else list(default)

    rest = [o for o in overrides if key_of(o) not in SEARCHED]
    batches = choices("data.batch_size", BATCH_SIZES)
    if not all(str(batch).isdigit() and int(batch) > 0 for batch in batches):
        raise SettingsError(
            f"data.batch_size={','.join(map(str, batches))}: expected whole numbers above 0, such as 1,2,4."
        )

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

    shape = Shape()
    floors: dict[Candidate, int] = {}

    def floor(candidate: Candidate) -> int:
        kind = replace(candidate, batch_size=1, checkpointing=False, loss="full")
        if kind not in floors:
            floors[kind] = shape.floor(configuration(kind))
        return floors[kind]

    @functools.cache
    def states(candidate: Candidate) -> int:
        return shape.states(configuration(candidate))

    @functools.cache
    def activations(candidate: Candidate) -> int:
        return shape.activations(configuration(candidate))

    tally = Tally()
    console.print(f"searching for what fits {device / GIB:.1f} GiB ({context / 1e9:.1f} GB of it for the process)")
    found = search(
        simulate,
        device,
        modes=choices("mode", ("standard", "sonar", "in_backward_all")),
        optimizers=choices("optimizer", OPTIMIZERS),
        checkpointing=[str(c).lower() == "true" for c in choices("model.checkpointing", (False, True))],
        losses=choices("model.loss", ("full", "chunked")),
        batch_sizes=sorted(int(batch) for batch in batches),
        context_bytes=context,
        floor=floor,
        activations=lambda one: one.batch_size * activations(replace(one, batch_size=1)),
        states=lambda one: states(replace(one, batch_size=1)),
        tally=tally,
    )
    console.print(f"{len(tally.simulated)} simulated, {tally.pruned} more ruled out by arithmetic")
    write_plans([one.plan for one in found], context, folder)
    if not found:
        least = min((plan.reserved_bytes for plan in tried), default=min(floors.values()))
        console.print(
            f"nothing fits {device / GIB:.1f} GiB: the least of what was tried needs {(least + context) / 1e9:.1f} GB. "
            "Try a larger device, a shorter data.seq_len, or fewer layers (model.num_layers)."
        )
        return 1
    show_found(found, device, context, overrides_of)
    return 0


def _name(candidate: Candidate) -> str:
    parts = [candidate.mode, candidate.optimizer]
    parts += ["checkpointing"] if candidate.checkpointing else []
    parts += ["chunked loss"] if candidate.loss == "chunked" else []
    return f"{', '.join(parts)}, batch {candidate.batch_size}"
