"""Whether clipping, a scheduler, resuming and accumulation are right under a recipe: tried on a toy, in fp32.

A recipe's weights after a few steps are compared with those of ordinary training: backward, `clip_grad_norm_`, one step
of an ordinary optimizer. That is torch's AdamW, or the peer's own where the peer's is another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.measuring import batch_of, deterministic
from experiments.peers.base import Batch, CannotRunError, Observer, Plan, Recipe, shares, trained
from lightning_sonar import models
from lightning_sonar.experts import find_expert_tensors

CHECKS = ("clipping", "scheduler", "resume", "accumulation")
"""The columns, in their order."""

Scope = Literal["all", "dense", "none"]

SAME = 1e-5
"""Weights are the same if they are this far apart, as a share of how far training moved them."""

STEPS = 4
MAX_NORM = 0.05
CONSTANT = (1e-2,) * STEPS
CHANGING = (1e-2, 2e-3, 6e-3, 1e-3)

_SIZES: dict[str, Any] = {
    # Expert tensors have more than 4,096 elements, from where on 8-bit optimizers keep 8 bits.
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
}

Cell = dict[str, Any]


def toy(seed: int = 0) -> nn.Module:
    """OLMoE with two layers and six experts, fp32."""
    torch.manual_seed(seed)
    return models.build("olmoe", "tiny", dtype=torch.float32, attn_implementation="eager", **_SIZES)


def batches(count: int, model: nn.Module) -> list[Batch]:
    """Random tokens. Batches grow longer, so that gradients' norms differ from step to step."""
    return [batch_of(model, 2, 6 + 3 * index, torch.device("cpu"), seed=index + 1) for index in range(count)]


def run(recipe: Recipe, plan: Plan, seed: int = 0) -> dict[str, Tensor]:
    """The weights after a plan, trained by the recipe."""
    model = recipe.prepare(toy(seed))
    recipe.train(model, plan, Observer())
    return weights(model)


def reference(recipe: Recipe, plan: Plan, scope: Scope = "none") -> dict[str, Tensor]:
    """The weights after a plan, trained in the ordinary way, ``scope`` of the gradients clipped to its norm."""
    model = recipe.prepare(toy())
    optimizer = recipe.ordinary(trained(model))
    scheduler = LambdaLR(optimizer, plan.rate)
    clipped = trained(model) if scope == "all" else []
    if scope == "dense":
        experts = {id(tensor) for tensor in find_expert_tensors(model).tensors}
        clipped = [parameter for parameter in trained(model) if id(parameter) not in experts]
    for microbatches in plan.steps:
        for loss in shares(model, microbatches):
            loss.backward()
        if plan.max_norm and clipped:
            nn.utils.clip_grad_norm_(clipped, plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return weights(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what is trained, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def gap(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far two trainings ended apart, as a share of how far the second one moved. 0 is bitwise equal."""
    apart = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    moved = sum(float((wanted[name].double() - start[name].double()).square().sum()) for name in wanted)
    return (apart / moved) ** 0.5


def check_clipping(recipe: Recipe) -> Cell:
    """Which gradients the norm counts, and scales."""
    plan = _plan(CONSTANT, max_norm=MAX_NORM)
    start, found = weights(recipe.prepare(toy())), run(recipe, plan)
    scopes: tuple[Scope, ...] = ("all", "dense", "none") if _has_dense(recipe) else ("all", "none")
    gaps = {scope: gap(found, reference(recipe, plan, scope), start) for scope in scopes}
    said = {"all": "yes", "dense": "dense only", "none": "no (clips nothing)"}
    for scope, value in gaps.items():
        if value <= SAME:
            return {"cell": said[scope], "gap": value}
    return _differs(gaps["all"])


def check_scheduler(recipe: Recipe) -> Cell:
    """Whether a learning rate that changes is the one used."""
    plan = _plan(CHANGING)
    value = gap(run(recipe, plan), reference(recipe, plan), weights(recipe.prepare(toy())))
    return _same(value)


def check_accumulation(recipe: Recipe) -> Cell:
    """Whether two microbatches a step are one step on the mean of their gradients."""
    plan = _plan(CONSTANT, microbatches=2)
    value = gap(run(recipe, plan), reference(recipe, plan), weights(recipe.prepare(toy())))
    return _same(value)


def check_resume(recipe: Recipe) -> Cell:
    """Whether training that is saved in the middle and goes on in a fresh model ends bitwise where it would have."""
    value = _resumed(recipe, CHANGING)
    if value == 0:
        return {"cell": "yes", "gap": value}
    cell = _differs(value)
    if _resumed(recipe, CONSTANT) == 0:
        cell["cell"] = f"no (differs by {_percent(value)} where the learning rate changes)"
    return cell


def _resumed(recipe: Recipe, lrs: Sequence[float]) -> float:
    whole, half = _plan(lrs), STEPS // 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.ckpt"
        run(recipe, Plan(whole.steps[:half], lrs, save_to=path))
        # Other weights than those saved: what is not loaded shows.
        found = run(recipe, Plan(whole.steps[half:], lrs, done=half, resume_from=path), seed=1)
    return gap(found, run(recipe, whole), weights(recipe.prepare(toy())))


def check(recipe: Recipe) -> dict[str, Cell]:
    """Every check of a recipe, by name.

    Returns:
        Of each ``cell``, what stands in the table: "yes", "dense only", or "no" and what happened; ``gap``, None where
        nothing could be compared; and ``said``, the message of what was raised.

    Raises:
        CannotRunError: if the peer does not run this kind of model.
    """
    found = {}
    with deterministic():
        for name in CHECKS:
            test: Callable[[Recipe], Cell] = globals()[f"check_{name}"]
            try:
                found[name] = test(recipe)
            except CannotRunError:
                raise
            except Exception as error:  # whatever a peer raises is its answer
                found[name] = {"cell": f"no (raises {type(error).__name__})", "gap": None, "said": str(error)}
    return found


def _plan(lrs: Sequence[float], microbatches: int = 1, max_norm: float | None = None) -> Plan:
    made = batches(STEPS * microbatches, toy())
    steps = [made[index : index + microbatches] for index in range(0, len(made), microbatches)]
    return Plan(steps, lrs, max_norm)


def _has_dense(recipe: Recipe) -> bool:
    """Whether expert tensors themselves are trained, besides dense parameters."""
    model = recipe.prepare(toy())
    return all(parameter.requires_grad for parameter in model.parameters())


def _same(value: float) -> Cell:
    return {"cell": "yes", "gap": value} if value <= SAME else _differs(value)


def _differs(value: float) -> Cell:
    return {"cell": f"no (differs by {_percent(value)})", "gap": value}


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 1e-3 else f"{100 * share:.1g}%"
