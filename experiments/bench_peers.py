"""Peers side by side: peak memory, step time, held-out loss, and what is right under each, on one mid-size MoE.

python experiments/bench_peers.py
python experiments/bench_peers.py --rounds 3 --peers lightning,optimi,sonar --json outputs/bench_peers/result.json
python experiments/bench_peers.py --write docs/peers.md

A 119 M parameter OLMoE (bf16, grouped_mm) is trained on the built-in data, and every peer goes on from there: the same
weights, batches and learning rate, in a process of its own for each measurement. Peers take turns over the rounds. The
peak is that of live storages in one step that is not timed. Needs `pip install 'lightning-sonar[bench]'`; what is not
installed, or does not run, is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.bench import MIDDLE, ratios, write

WARMUP = 2
PREPARED = ("parameters", "start_loss", "threads")
KEPT = ("checks", "heldout_loss", "peak_bytes")
"""Of a row, what a comparison that goes on does not measure again."""


@dataclass(frozen=True)
class Settings:
    """What the processes share.

    Attributes:
        folder: where the data and the weights that all start from lie.
        toy: sizes that take no time.
        steps: timed steps of a round.
        pretrain_steps: steps that made the weights that all start from.
        quality_steps: steps before the held-out loss.
        lr: AdamW's learning rate, which falls to 0 on a line.
    """

    folder: str
    toy: bool
    steps: int
    pretrain_steps: int
    quality_steps: int
    lr: float
    batch_size: int = 2
    seq_len: int = 64
    max_norm: float = 1.0

    def sizes(self) -> dict[str, Any]:
        """What the model's configuration is given."""
        from experiments.measuring import TOY

        # A byte-level tokenizer has 256 tokens before it has learnt any.
        return {**TOY["olmoe"], "num_hidden_layers": 1, "vocab_size": 512} if self.toy else MIDDLE


# In a process of its own.


def prepare(settings: Settings) -> dict[str, Any]:
    """Leave the batches, and the weights that all peers start from."""
    import torch

    from experiments.peers import PEERS, Observer, Plan
    from lightning_sonar import models
    from lightning_sonar.data import InstructionData

    sizes = settings.sizes()
    data = InstructionData(
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        heldout_size=16 if settings.toy else 256,
        vocab_size=sizes["vocab_size"],
        max_records=400 if settings.toy else None,
    )
    data.setup("fit")
    timed = WARMUP + settings.steps + 1
    needed = settings.pretrain_steps + max(settings.quality_steps, timed)
    epochs = chain.from_iterable(data.train_dataloader() for _ in range(needed))
    batches = [dict(batch) for batch in islice(epochs, needed)]
    torch.manual_seed(0)
    model = models.build("olmoe", "tiny", backend="grouped_mm", dtype=torch.bfloat16, **sizes)
    lrs = [settings.lr * 3] * settings.pretrain_steps
    first = [[batch] for batch in batches[: settings.pretrain_steps]]
    PEERS["sonar"].train(model, Plan(first, lrs, settings.max_norm), Observer())
    folder = Path(settings.folder)
    heldout = list(data.val_dataloader())
    torch.save({"train": batches[settings.pretrain_steps :], "heldout": heldout}, folder / "data.pt")
    torch.save(model.state_dict(), folder / "base.pt")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "start_loss": heldout_loss(model, heldout),
        "threads": torch.get_num_threads(),
    }


def heldout_loss(model: Any, batches: list[dict[str, Any]]) -> float:
    """The mean over all response tokens, in nats."""
    from experiments.planted_batch import evaluate

    model.eval()
    return evaluate(model, batches)


def train(name: str, settings: Settings, count: int, watch: int | None = None) -> tuple[Any, Any, Any]:
    """A peer's model after ``count`` steps, what observed them, and the held-out batches."""
    import torch

    from experiments.peers import PEERS, Observer, Plan
    from lightning_sonar import models

    recipe, folder = PEERS[name], Path(settings.folder)
    data = torch.load(folder / "data.pt")
    model = models.build("olmoe", "tiny", backend="grouped_mm", dtype=torch.bfloat16, **settings.sizes())
    model.load_state_dict(torch.load(folder / "base.pt"))
    model = recipe.prepare(model)
    lr = settings.lr * recipe.lr_factor
    plan = Plan(
        [[batch] for batch in data["train"][:count]],
        [lr * (1 - index / count) for index in range(count)],
        settings.max_norm if recipe.clips else None,
    )
    observer = Observer(watch)
    torch.manual_seed(0)
    recipe.train(model, plan, observer)
    return model, observer, data["heldout"]


def measure_time(name: str, settings: Settings) -> dict[str, Any]:
    """Milliseconds of each timed step, and the peak of one more."""
    count = WARMUP + settings.steps + 1
    _, observer, _ = train(name, settings, count, watch=count - 1)
    return {"ms": observer.ms[WARMUP:-1], "peak_bytes": observer.peak_bytes}


def measure_quality(name: str, settings: Settings) -> dict[str, Any]:
    """The held-out loss after training on."""
    model, _, heldout = train(name, settings, settings.quality_steps)
    return {"heldout_loss": heldout_loss(model, heldout)}


def measure(kind: str, name: str, settings: Settings) -> dict[str, Any]:
    """One measurement; ``failed`` says why there is none of a peer that cannot run this model."""
    from experiments.peers import PEERS
    from experiments.peers.base import CannotRunError
    from experiments.peers.checks import check

    if kind == "prepare":
        return prepare(settings)
    try:
        if kind == "checks":
            return {"checks": check(PEERS[name])}
        return measure_time(name, settings) if kind == "time" else measure_quality(name, settings)
    except CannotRunError as error:
        return {"failed": str(error)}


# Around them.


def spawn(kind: str, name: str, settings: Settings) -> dict[str, Any]:
    """`measure` in a process of its own; what ends that one otherwise is in ``failed``, too."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", kind, name, json.dumps(asdict(settings))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return {"failed": f"{kind} ended with code {done.returncode}: {last[0] if last else 'nothing was said'}"}


def run(
    names: Sequence[str],
    rounds: int,
    settings: Settings,
    path: Path,
    result: dict[str, Any],
    before: dict[str, Any],
) -> dict[str, Any]:
    """Measure all peers, write after each measurement, and return everything.

    What ``before`` holds is not measured again, except for the times of a round that some peer took no turn in: peers
    are compared with what ran beside them.
    """
    from experiments.peers import BASELINE, PEERS, versions

    rows: dict[str, dict[str, Any]] = {name: {"label": PEERS[name].label, "state": PEERS[name].state} for name in names}
    for name, row in rows.items():
        row["note"] = PEERS[name].note
        if missing := PEERS[name].missing():
            row["failed"] = missing
        row |= {key: value for key, value in before.get("rows", {}).get(name, {}).items() if key in KEPT}
    if before:
        result |= {key: before[key] for key in PREPARED}
    else:
        result |= spawn("prepare", "", settings)
    result |= {"rows": rows, "versions": versions(names)}
    if "failed" in result:
        raise SystemExit(f"the weights that all start from could not be made: {result['failed']}")

    def ask(kind: str, name: str) -> dict[str, Any]:
        found = spawn(kind, name, settings)
        if "failed" in found:
            rows[name]["failed"] = found["failed"]
            if name == BASELINE:
                raise SystemExit(f"{name}, which all are compared with, {found['failed']}")
        print(f"{name}, {kind}: {found.get('failed') or short(found)}", flush=True)
        return found

    def able() -> list[str]:
        return [name for name in names if "failed" not in rows[name]]

    times: dict[str, list[list[float]]] = {name: before.get("ms", {}).get(name, []) for name in names}
    result["ms"] = times
    write(path, result)
    for kind, figure in (("checks", "checks"), ("quality", "heldout_loss")):
        for name in able():
            if figure not in rows[name]:
                rows[name] |= ask(kind, name)
                write(path, result)
    whole = min(len(times[name]) for name in able())
    for done in times.values():
        del done[whole:]
    for turn in range(rounds):
        # Another one first in each round, so that a machine that slows down slows none in particular.
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            if "failed" in rows[name] or len(times[name]) > turn:
                continue
            found = ask("time", name)
            if "failed" not in found:
                times[name].append(found["ms"])
                rows[name]["peak_bytes"] = max(rows[name].get("peak_bytes", 0), found["peak_bytes"])
            write(path, result)
        for name, row in ratios({name: times[name][: turn + 1] for name in able()}, BASELINE).items():
            rows[name] |= row
        write(path, result)
    return result


def short(found: dict[str, Any]) -> str:
    """A measurement in a few words, for the terminal."""
    if "checks" in found:
        return ", ".join(f"{name} {cell['cell']}" for name, cell in found["checks"].items())
    if "heldout_loss" in found:
        return f"held-out loss {found['heldout_loss']:.4f}"
    return f"median {statistics.median(found['ms']):.1f} ms, peak {found['peak_bytes'] / 1e6:.1f} MB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that all take a turn (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=8, help="timed in a round, after two untimed (default: %(default)s)"
    )
    parser.add_argument(
        "--quality-steps", type=int, default=200, help="before the held-out loss (default: %(default)s)"
    )
    parser.add_argument("--pretrain-steps", type=int, default=200, help="that all start from (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="AdamW's; LoRA's is tenfold (default: %(default)s)")
    parser.add_argument("--peers", help="some of the rows, with commas; all by default")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("outputs/bench_peers/result.json"),
        metavar="PATH",
        help="file of the figures (default: %(default)s)",
    )
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the table as a Markdown page, too")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with an interrupted comparison, left in --json: with its peers and those of --peers",
    )
    parser.add_argument("--table", action="store_true", help="measure nothing: the table of what --json holds")
    parser.add_argument(
        "--toy", action="store_true", help="sizes that take no time, to see that it works; the figures mean nothing"
    )
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        kind, name, settings = options.measure
        print(json.dumps(measure(kind, name, Settings(**json.loads(settings)))))
        return 0

    from experiments.machine import processor
    from experiments.peers import BASELINE, PEERS
    from experiments.peers.before import earlier, read
    from experiments.peers.table import markdown, show, verdicts
    from experiments.status import INTERRUPTED

    names = list(PEERS) if options.peers is None else options.peers.split(",")
    unknown = [name for name in names if name not in PEERS]
    counts = (options.rounds, options.steps, options.quality_steps, options.pretrain_steps)
    if unknown or min(counts) < 1:
        parser.error(f"--peers takes some of {', '.join(PEERS)}; rounds and steps are at least 1")
    names = list(dict.fromkeys((BASELINE, *names)))
    if options.table:
        result = read(options.json)
    else:
        folder = options.json.parent
        folder.mkdir(parents=True, exist_ok=True)
        few = (3, 3) if options.toy else (options.pretrain_steps, options.quality_steps)
        settings = Settings(str(folder.resolve()), options.toy, options.steps, *few, options.lr)
        said = asdict(settings)
        del said["folder"]
        given = [str(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
        command = shlex.join(["python", "experiments/bench_peers.py", *given])
        result = {**said, "command": command, "processor": processor(), "rounds": options.rounds}
        before = earlier(options.json, {**said, "processor": result["processor"]}) if options.resume else {}
        names = list(dict.fromkeys((*names, *(name for name in before.get("rows", {}) if name in PEERS))))
        try:
            result = run(names, options.rounds, settings, options.json, result, before)
        except KeyboardInterrupt:
            print("stopped; the same command with --resume goes on", file=sys.stderr)
            return INTERRUPTED
        result["verdicts"] = [] if options.toy else verdicts(result["rows"])
        write(options.json, result)
    show(result)
    if not options.table:
        print(f"Written to {options.json}.")
    if options.write is not None:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(markdown(result))
        print(f"Written to {options.write}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
