"""Runs the ScatterMoE backend in Triton's interpreter for test_scattermoe.py, in a process of its own; prints JSON.

Whether a Triton kernel is interpreted is settled by TRITON_INTERPRET when it is decorated, so it must be set.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from scattermoe_helpers import (
    BF16,
    EXPERTS,
    TOKENS,
    TOP_K,
    WIDTH,
    doubled,
    errors,
    experts,
    forward,
    gradients,
    inputs,
    run,
)
from torch import Tensor, nn

from lightning_sonar.backends.scattermoe import functional


def family_case(family: str, tokens: int = TOKENS) -> Callable[[], Any]:
    def case() -> Any:
        module, given = experts(family), inputs(tokens=tokens)
        result = {"fp32": errors(run(module, "scattermoe", given), run(module, "eager", given))}
        module, given = experts(family, BF16), inputs(BF16, tokens)
        ours, theirs = run(module, "scattermoe", given), run(module, "eager", given)
        exact = run(module.double(), "eager", doubled(given))
        result |= {"bf16": errors(ours, exact), "eager_bf16": errors(theirs, exact)}
        result["dtypes"] = sorted({str(value.dtype) for value in ours.values()})
        result["contiguous"] = all(value.is_contiguous() for value in ours.values())
        empty = {name: float(ours[name][-1].abs().max()) for name, _ in module.named_parameters()}
        return {**result, "empty": empty}

    return case


def routing_case(**options: int) -> Callable[[], Any]:
    def case() -> Any:
        module, given = experts("olmoe"), inputs(**options)
        ours, theirs = run(module, "scattermoe", given), run(module, "eager", given)
        exact = run(module.double(), "eager", doubled(given))
        return {"ours": errors(ours, exact), "eager": errors(theirs, exact)}

    return case


def twice() -> Any:
    module, given = experts("gpt_oss", BF16), inputs(BF16, tokens=4)
    first, second = run(module, "scattermoe", given), run(module, "scattermoe", given)
    return [name for name in first if not torch.equal(first[name], second[name])]


def other_ranks(elsewhere_is: int) -> Any:
    """Ids of no expert here, with a weight that would show, on a module with biases."""
    module, given = experts("gpt_oss"), inputs()
    elsewhere = torch.rand(given["index"].shape, generator=torch.Generator().manual_seed(2)) < 0.4
    elsewhere[0] = True
    given["index"][elsewhere] = elsewhere_is
    ours = run(module, "scattermoe", given)
    # The eager loop has no word for such ids here, so they go to an expert with weight zero.
    plain = {**given, "index": given["index"].clamp(0, EXPERTS - 1), "weights": given["weights"].clone()}
    plain["weights"][elsewhere] = 0
    theirs = run(module, "eager", plain)
    theirs["weights"][elsewhere] = 0
    return {"errors": errors(ours, theirs), "lonely": float(ours["out"][0].abs().max())}


def autocast() -> Any:
    module, given = experts("olmoe"), inputs()
    exact = run(module, "eager", given)
    with torch.autocast("cpu", dtype=BF16):
        ours, theirs = run(module, "scattermoe", given), run(module, "eager", given)
    return {
        "ours": errors(ours, exact),
        "eager": errors(theirs, exact),
        "dtypes": sorted({str(value.dtype) for value in ours.values()}),
    }


def retained() -> Any:
    """Two backward passes over one graph add up to twice the gradient; a third asks for less and computes less."""
    module, given = experts("olmoe"), inputs(tokens=3)
    once = run(module, "scattermoe", given)
    out, leaves = forward(module, "scattermoe", given)
    module.zero_grad()
    for _ in range(2):
        out.backward(given["grad"], retain_graph=True)
    found = gradients(module, leaves)
    wrong = [name for name, value in found.items() if not torch.equal(value, 2 * once[name])]

    launched: list[str] = []
    wrapped = {name: getattr(functional, name) for name in ("product", "weight_grad")}
    for name, function in wrapped.items():
        setattr(functional, name, lambda *a, _f=function, _n=name, **k: (launched.append(_n), _f(*a, **k))[1])
    counts = {}
    for name, value in {**leaves, **dict(module.named_parameters())}.items():
        launched.clear()
        module.zero_grad()
        out.backward(given["grad"], inputs=[value], retain_graph=True)
        counts[name] = [launched.count("product"), launched.count("weight_grad")]
        if name in once and name not in leaves and not torch.equal(value.grad, once[name]):
            wrong.append(f"{name} alone")
    for name, function in wrapped.items():
        setattr(functional, name, function)
    return {"wrong": wrong, "counts": counts}


def checkpointed(reentrant: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    module, given = experts("olmoe"), inputs(tokens=5)
    plain = run(module, "scattermoe", given)
    module.zero_grad()
    hidden, weights = (given[name].clone().requires_grad_() for name in ("hidden", "weights"))
    checkpoint(module, hidden, given["index"], weights, use_reentrant=reentrant).backward(given["grad"])
    found = gradients(module, {"hidden": hidden, "weights": weights})
    return [name for name, value in found.items() if not torch.equal(value, plain[name])]


def second_derivative() -> Any:
    """What a gradient penalty is told: the incoming gradient needs none itself, so torch would not notice."""
    found = {}
    for part, which in {"up": "hidden", "down": "weights"}.items():
        module, given = experts("olmoe"), inputs(tokens=2)
        out, leaves = forward(module, "scattermoe", given)
        found[part] = message(lambda: torch.autograd.grad(out.sum(), leaves[which], create_graph=True))  # noqa: B023
    return found


def functorch() -> Any:
    module, given = experts("olmoe"), inputs(tokens=2)
    module.config._experts_implementation = "scattermoe"
    run_layer = torch.func.grad(lambda hidden: module(hidden, given["index"], given["weights"]).sum())
    return message(lambda: run_layer(given["hidden"]))


def kept() -> Any:
    """Bytes that forward keeps for backward beyond parameters, and what it should be."""
    module, given = experts("olmoe"), inputs()
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in parameters and value.is_floating_point():
            sizes[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        out, _ = forward(module, "scattermoe", given)
    hidden, inner = WIDTH.values()
    rows = TOKENS * TOP_K
    return {
        "kept": sum(sizes.values()),
        "expected": 4 * (TOKENS * hidden + rows * 2 * inner + rows),
        "shape": out.shape,
    }


def one_gradient_at_a_time() -> Any:
    """Whether down_proj's gradient is gone when gate_up_proj's is allocated."""
    module, given = experts("olmoe"), inputs()
    events: list[str] = []
    freed: list[weakref.ref[Any]] = []

    def hook(parameter: Tensor) -> None:
        name = next(n for n, p in module.named_parameters() if p is parameter)
        events.append(f"hook {name}")
        if parameter.grad is not None:
            freed.append(weakref.ref(parameter.grad.untyped_storage()))
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in module.parameters()]
    original = functional.weight_grad

    def allocate(*args: Any, **options: Any) -> Tensor:
        events.append(f"allocate, alive {sum(ref() is not None for ref in freed)}")
        return original(*args, **options)

    functional.weight_grad = allocate
    out, _ = forward(module, "scattermoe", given)
    out.backward(given["grad"])
    functional.weight_grad = original
    for handle in handles:
        handle.remove()
    return events


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as failure:
        return str(failure)
    return ""


def changed_weight() -> Any:
    module, given = experts("olmoe"), inputs()
    out, _ = forward(module, "scattermoe", given)
    with torch.no_grad():
        module.down_proj.mul_(2)
    return message(lambda: out.backward(given["grad"]))


def refusals() -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    found = {}

    def refuse(name: str, change: Callable[[Any], Any]) -> None:
        module = experts("olmoe")
        change(module)
        found[name] = message(lambda: forward(module, "scattermoe", inputs(module.down_proj.dtype)))

    def sharded(module: Any) -> None:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        module.down_proj = nn.Parameter(distribute_tensor(module.down_proj.detach(), mesh, [Replicate()]))

    refuse("norm", lambda module: setattr(module, "has_post_expert_norm", True))
    refuse("activation", lambda module: setattr(module, "act_fn", nn.PReLU()))
    refuse("half", lambda module: module.half())
    refuse("count", lambda module: setattr(module, "num_experts", EXPERTS + 1))
    refuse("sharded", sharded)
    torch.distributed.destroy_process_group()
    module = experts("olmoe")
    with torch.autocast("cpu", dtype=torch.float16):
        found["autocast"] = message(lambda: forward(module, "scattermoe", inputs()))
    return found


def fake() -> Any:
    """Shapes alone, as a memory plan runs the model."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = inputs()
    module = experts("olmoe")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(mode.from_tensor(parameter.detach())))
        out, _ = forward(module, "scattermoe", {name: mode.from_tensor(value) for name, value in given.items()})
        out.backward(torch.ones_like(out))
    return {name: list(parameter.grad.shape) for name, parameter in module.named_parameters()}


def train() -> Any:
    """Two steps of a one-layer OLMoE on rows of 16 tokens: losses and weights, by backend."""
    from helpers import batches, small_model

    from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward
    from lightning_sonar.backends import resolve_backend

    losses: dict[str, list[float]] = {}
    weights = {}
    for backend in ("eager", "scattermoe"):
        model = small_model("olmoe", backend=resolve_backend(backend, "cpu"), num_layers=1)
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        handle = release_in_backward(optimizer, find_expert_tensors(model))
        losses[backend] = []
        for batch in batches(2, batch_size=1, seq_len=16):
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss
            handle.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[backend].append(loss.item())
        handle.remove()
        weights[backend] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moved = small_model("olmoe", num_layers=1).state_dict()
    return {
        "losses": losses,
        "errors": errors(weights["scattermoe"], weights["eager"]),
        "moved": [n for n, value in weights["scattermoe"].items() if not torch.equal(value, moved[n])],
    }


# Tokens of each. With fewer, the bf16 error of a gradient of a few numbers is a matter of luck.
FAMILIES = {"olmoe": 24, "granitemoe": 11, "mixtral": 11, "qwen3_moe": 11, "gpt_oss": 24, "nemotron_h": 24}
CASES: dict[str, Callable[[], Any]] = {
    **{family: family_case(family, tokens) for family, tokens in FAMILIES.items()},
    "one_token": routing_case(tokens=1),
    "one_expert": routing_case(tokens=18, top_k=1, spread=1),
    "every_expert": routing_case(tokens=3, top_k=4, spread=4),
    "top_one": routing_case(tokens=17, top_k=1, spread=4),
    "twice": twice,
    "other_ranks": lambda: other_ranks(EXPERTS),
    "negative_ids": lambda: other_ranks(-1),
    "autocast": autocast,
    "retained": retained,
    "checkpointed": lambda: {str(kind): checkpointed(kind) for kind in (False, True)},
    "second_derivative": second_derivative,
    "functorch": functorch,
    "kept": kept,
    "one_gradient_at_a_time": one_gradient_at_a_time,
    "changed_weight": changed_weight,
    "refusals": refusals,
    "fake": fake,
    "train": train,
}


if __name__ == "__main__":
    names = sys.argv[1:] or list(CASES)
    print(json.dumps({name: CASES[name]() for name in names}))
