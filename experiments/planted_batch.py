"""One bad batch: what each way to clip experts does to the held-out loss, against standard training.

python experiments/planted_batch.py
python experiments/planted_batch.py --steps 100 --factor 1e5 --out outputs/planted_batch

A small OLMoE is trained on the built-in data; in the middle of the run one batch has random labels, and its loss is
multiplied by a large factor. All runs start from the same weights and see the same batches, so only the clip differs.
Leaves planted_batch.json, planted_batch.md and planted_batch.png in the output folder.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from experiments.measuring import deterministic
from experiments.result import versions, write_json
from lightning_sonar import FusedAdamW, find_expert_tensors, models, release_in_backward
from lightning_sonar.data import InstructionData
from lightning_sonar.losses import IGNORED, response_cross_entropy
from lightning_sonar.modes import ExpertClip

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Policy:
    """One line of the figure.

    Attributes:
        label: what it is called.
        mode: name of the mode.
        expert_clip: in the place of the mode's own; None keeps it.
        planted: whether the bad batch is in the data.
        style: of the line; shade, dashes and marker differ, so that print in black and white can be read.
    """

    label: str
    mode: str
    expert_clip: ExpertClip | None
    planted: bool
    style: dict[str, Any]


POLICIES = (
    Policy("standard, without the bad batch", "standard", None, False, {"color": "0.75", "lw": 1.5, "ls": ":"}),
    Policy("none, without the bad batch", "sonar", "none", False, {"color": "0.5", "lw": 1.5, "ls": (0, (1, 3))}),
    Policy("standard", "standard", None, True, {"color": "0.8", "lw": 6}),
    Policy("exact", "sonar", "exact", True, {"color": "black", "lw": 1.6, "ls": "--"}),
    Policy("lagged", "sonar", "lagged", True, {"color": "#b5460f", "lw": 1.4, "marker": "s", "ls": "-"}),
    Policy("per_tensor", "sonar", "per_tensor", True, {"color": "#1f5f8b", "lw": 1.4, "marker": "^", "ls": "-"}),
    Policy("per_expert", "sonar", "per_expert", True, {"color": "#6a9a3b", "lw": 1.4, "marker": "x", "ls": "-."}),
    Policy("none (sonar)", "sonar", "none", True, {"color": "black", "lw": 1.4, "marker": "o", "ls": "-"}),
)


@dataclass(frozen=True)
class Settings:
    """What all runs share; `MEANINGS` says what each value is."""

    steps: int = 80
    planted_at: int = 40
    factor: float = 1e4
    every: int = 5
    max_norm: float = 1.0
    lr: float = 3e-3
    layers: int = 2
    hidden: int = 128
    seq_len: int = 48
    batch_size: int = 4
    heldout: int = 64
    seed: int = 0


MEANINGS = {
    "steps": "of each run",
    "planted_at": "the step of the bad batch",
    "factor": "by which its loss is multiplied",
    "every": "steps between two held-out losses",
    "max_norm": "to which gradients are clipped",
    "lr": "learning rate",
    "layers": "of the model",
    "hidden": "the model's width",
    "seq_len": "tokens a sequence",
    "batch_size": "sequences a batch",
    "heldout": "records held out",
    "seed": "of weights and batches",
}


def train(
    policy: Policy, settings: Settings, batches: Sequence[Batch], heldout: Sequence[Batch], vocab: int
) -> dict[str, Any]:
    """Train once; returns the held-out losses by step, the norms that were clipped by, and the time."""
    torch.manual_seed(settings.seed)
    width: dict[str, Any] = {
        "hidden_size": settings.hidden,
        "intermediate_size": settings.hidden // 2,
        "vocab_size": vocab,
    }
    model = models.build("olmoe", "tiny", num_layers=settings.layers, backend="grouped_mm", **width)
    optimizer = FusedAdamW(model.parameters(), lr=settings.lr)
    handle = release_in_backward(
        optimizer, find_expert_tensors(model), mode=policy.mode, expert_clip=policy.expert_clip, measure_norms=True
    )
    losses = {0: evaluate(model, heldout)}
    norms: list[float] = []
    begun = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        if policy.planted and step == settings.planted_at:
            loss = loss_of(model, spoiled(batch, vocab)) * settings.factor
        else:
            loss = loss_of(model, batch)
        handle.train_step(loss, max_norm=settings.max_norm)
        norms.append(float(handle.grad_norms()["total"]))
        if step % settings.every == 0 or step in (settings.planted_at - 1, settings.planted_at):
            losses[step] = evaluate(model, heldout)
    seconds = time.perf_counter() - begun
    handle.remove()
    after = [loss for step, loss in losses.items() if step >= settings.planted_at]
    return {
        "policy": policy.label,
        "mode": policy.mode,
        "expert_clip": policy.expert_clip or "none",
        "planted": policy.planted,
        "heldout": {str(step): loss for step, loss in losses.items()},
        "before": losses[settings.planted_at - 1],
        "highest_after": max(after),
        "end": after[-1],
        "norms": norms,
        "seconds": seconds,
    }


def spoiled(batch: Batch, vocab: int) -> Batch:
    """The batch with wrong labels: tokens at random wherever one counted."""
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randint(0, vocab, batch["labels"].shape, generator=generator)
    return {**batch, "labels": torch.where(batch["labels"] == IGNORED, batch["labels"], wrong)}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the response tokens, 0-dim."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    return response_cross_entropy(output.logits, batch["labels"])[0]


@torch.no_grad()
def evaluate(model: nn.Module, heldout: Iterable[Batch]) -> float:
    """The held-out loss in nats a token."""
    total, count = 0.0, 0
    for batch in heldout:
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        loss, tokens = response_cross_entropy(output.logits, batch["labels"])
        total += float(loss) * int(tokens)
        count += int(tokens)
    return total / count


def table_of(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: held-out losses before the bad batch, at their worst after it, and at the end."""
    clean = next((result["end"] for result in results if not result["planted"]), None)  # of standard training
    lines = [
        "| expert clip | held-out loss before the bad batch | highest after | at the end | over standard without it |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        gap = "" if clean is None else f"{result['end'] - clean:+.3f}"
        figures = f"{result['before']:.3f} | {result['highest_after']:.3f} | {result['end']:.3f}"
        lines.append(f"| {result['policy']} | {figures} | {gap} |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[dict[str, Any]], settings: Settings, path: Path) -> None:
    """The held-out losses over the steps, one line a policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    styles = {policy.label: policy.style for policy in POLICIES}
    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for result in results:
        points = sorted((int(step), loss) for step, loss in result["heldout"].items())
        axes.plot(*zip(*points, strict=True), label=result["policy"], markersize=5, **styles[result["policy"]])
    axes.axvline(settings.planted_at, color="0.5", lw=0.8)
    axes.annotate(
        f"random labels, loss x {settings.factor:g}",
        (settings.planted_at, 1.0),
        (4, -12),
        ("data", "axes fraction"),
        "offset points",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats a token")
    axes.set_title("One bad batch, by how expert gradients are clipped")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def run(settings: Settings, out: Path, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Train with every policy and write the three files.

    Raises:
        ValueError: if the bad batch is not among the steps.
    """
    if not 1 < settings.planted_at <= settings.steps:
        raise ValueError(f"planted_at={settings.planted_at}: expected a step from 2 to {settings.steps}.")
    data = InstructionData(
        seq_len=settings.seq_len,
        batch_size=settings.batch_size,
        heldout_size=settings.heldout,
        seed=settings.seed,
        vocab_size=2048,
    )
    data.setup("fit")
    heldout = list(data.val_dataloader())
    batches = list(itertools.islice(itertools.cycle(data.train_dataloader()), settings.steps))
    out.mkdir(parents=True, exist_ok=True)
    results = []
    # Without it, the CPU's float32 backward of grouped_mm does not repeat itself, and equal runs would differ.
    with deterministic():
        for policy in POLICIES:
            results.append(train(policy, settings, batches, heldout, data.vocab_size))
            say(f"{policy.label}: held-out loss {results[-1]['end']:.3f} ({results[-1]['seconds']:.0f} s)")
    write_json(out / "planted_batch.json", {"settings": vars(settings), "results": results, "versions": versions()})
    (out / "planted_batch.md").write_text(table_of(results))
    draw(results, settings, out / "planted_batch.png")
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Settings()
    for name, value in vars(defaults).items():
        meaning = f"{MEANINGS[name]} (default: %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=meaning)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/planted_batch"),
        help="folder of the three files (default: %(default)s)",
    )
    values = vars(parser.parse_args(arguments))
    out = values.pop("out")
    print(table_of(run(Settings(**values), out)) + f"\nfiles in {out}")


if __name__ == "__main__":
    main()
