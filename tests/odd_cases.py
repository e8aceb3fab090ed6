"""What is done to odd models in a training step, and the cases that are to train as ever; see `odd_models`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import torch
from odd_models import (
    Biased,
    Case,
    Complex,
    Growing,
    InLists,
    ListOfExperts,
    Reentrant,
    Shared,
    SharedCheckpointed,
    SomeLayers,
    TiedDense,
    TiedExperts,
    ZeroWide,
    experts_innermost,
    frozen,
    halve_in_place,
    laid_out,
    parametrized,
    replace_by_double,
    transposed,
    with_gaps,
    with_hook,
)
from test_in_backward import Toy, inputs
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils.parametrizations import weight_norm

from lightning_sonar import FusedAdamW


def at_step_two(change: Callable[[nn.Module, torch.optim.Optimizer], None]):
    def loss(model, optimizer, step):
        if step == 2:
            change(model, optimizer)
        return model(inputs(step).to(next(model.parameters()).dtype))

    return loss


def unfreeze(model, optimizer):
    model.first.requires_grad_(True)


def unfreeze_into_a_group(model, optimizer):
    model.first.requires_grad_(True)
    optimizer.add_param_group({"params": [model.first], "lr": 3e-2})


def grow(model, optimizer):
    model.third = nn.Parameter(torch.ones(4, 8, 8) / 9)
    optimizer.add_param_group({"params": [model.third]})


def replace_everywhere(model, optimizer):
    old, model.first = model.first, nn.Parameter(model.first.detach().clone())
    for group in optimizer.param_groups:
        group["params"] = [model.first if tensor is old else tensor for tensor in group["params"]]
    optimizer.state[model.first] = optimizer.state.pop(old)


def replace_in_the_model(model, optimizer):
    model.first = nn.Parameter(model.first.detach().clone())


def take_out(model, optimizer):
    for group in optimizer.param_groups:
        group["params"] = [tensor for tensor in group["params"] if tensor is not model.first]


def load_in_its_place(model, optimizer):
    model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()}, assign=True)


def new_data(model, optimizer):
    model.first.data = torch.ones(4, 8, 8) / 7


def add_hooks(model, optimizer):
    model.first.register_hook(lambda gradient: gradient * 0.5)
    model.second.register_post_accumulate_grad_hook(halve_in_place)
    model.first.register_post_accumulate_grad_hook(replace_by_double)


def on_again_off_again(model, optimizer, step):
    model.first.requires_grad_(step not in (1, 2))
    return model(inputs(step))


def penalty_on_inputs(model, optimizer, step):
    x = inputs(step).requires_grad_()
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def penalty_on_experts(model, optimizer, step):
    loss = model(inputs(step))
    (gradient,) = torch.autograd.grad(loss, model.first, create_graph=True)
    return loss + gradient.square().sum()


def gradients_by_hand(model, optimizer, step):
    loss = model(inputs(step))
    gradients = torch.autograd.grad(loss, [model.first, model.dense.weight], retain_graph=True)
    return loss * (1 + gradients[0].norm().detach())


def contrastive(model, optimizer, step):
    return model(inputs(step)) + model(inputs(step + 50)) * model(inputs(step + 70))


def misses_an_expert(model, optimizer, step):
    if step % 2:
        return model(inputs(step))
    return model.all_experts(model.dense(inputs(step)), model.first).square().mean()


def a_step_without_backward(model, optimizer, step):
    if step == 1:
        optimizer.step()
        return None
    return model(inputs(step))


def evaluates_in_between(model, optimizer, step):
    loss = model(inputs(step))
    with torch.no_grad():
        model(inputs(9))
    with torch.inference_mode():
        model(inputs(9))
    model.zero_grad(set_to_none=False)
    optimizer.zero_grad(set_to_none=False)
    return loss


def saves_on_cpu(model, optimizer, step):
    with torch.autograd.graph.save_on_cpu():
        return model(inputs(step))


def functional(model, optimizer, step):
    own = dict(model.named_parameters())
    gradients = grad(lambda given: functional_call(model, given, (inputs(step),)))(own)
    scale = 1 + torch.stack([each.norm() for each in gradients.values()]).sum().detach()
    return functional_call(model, own, (inputs(step),)) * scale


def averages_a_copy(model, optimizer, step):
    copied = copy.deepcopy(model)
    copied(inputs(step + 20)).backward()
    assert copied.first.grad is not None  # no hooks of ours on it
    return model(inputs(step)) * (1 + copied.first.grad.norm())


class Replicated(torch.autograd.Function):
    """Two copies of each tensor, whose gradients are added up: what DataParallel does."""

    @staticmethod
    def forward(ctx, *tensors):
        return tuple(tensor.clone() for tensor in tensors for _ in range(2))

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(one + other for one, other in zip(gradients[::2], gradients[1::2], strict=True))


def replicas(model, optimizer, step):
    own = dict(model.named_parameters())
    copies = Replicated.apply(*own.values())
    halves = [functional_call(model, dict(zip(own, copies[k::2], strict=True)), (inputs(step + k),)) for k in range(2)]
    return torch.stack(halves).mean()


def forward_in_a_thread(model, optimizer, step):
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(inputs(step))))
    thread.start()
    thread.join()
    return found[0]


def torch_adamw(**options):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def trained_only(model):
    return FusedAdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=1e-2)


CASES = {
    "experts shared by two layers": Case(Shared),
    "shared experts, checkpointed": Case(SharedCheckpointed),
    "reentrant checkpointing": Case(Reentrant, without=("sonar_exact_clip",)),
    "one tensor under two names": Case(TiedExperts),
    "tied dense weights": Case(TiedDense),
    "experts on some layers": Case(SomeLayers),
    "biases and a router": Case(Biased),
    "transposed": Case(laid_out(transposed)),
    "transposed, torch's fused": Case(laid_out(transposed), optimizer=torch_adamw(fused=True)),
    "experts innermost": Case(laid_out(experts_innermost)),
    "experts innermost, torch's fused": Case(laid_out(experts_innermost), optimizer=torch_adamw(fused=True)),
    "gaps in memory": Case(laid_out(with_gaps)),
    "gaps in memory, float64": Case(
        lambda: laid_out(with_gaps)().double(), lambda model, optimizer, step: model(inputs(step).double())
    ),
    "float64": Case(lambda: Toy().double(), lambda model, optimizer, step: model(inputs(step).double())),
    "complex": Case(Complex, optimizer=torch_adamw()),
    "one expert": Case(lambda: Toy(1)),
    "no expert at all": Case(lambda: Toy(0)),
    "many experts": Case(lambda: Toy(200)),
    "a tensor of no elements": Case(ZeroWide),
    "parametrized": Case(parametrized("first")),
    "weight norm": Case(lambda: weight_norm(Toy(), "first", dim=0)),
    "in lists": Case(InLists),
    "a list of modules": Case(ListOfExperts, experts=r"experts\..*weight", patterns=r"experts\.\d+\.weight"),
    "frozen": Case(frozen),
    "unfrozen": Case(frozen, at_step_two(unfreeze)),
    "unfrozen into a group": Case(frozen, at_step_two(unfreeze_into_a_group), trained_only),
    "frozen for a while": Case(Toy, on_again_off_again),
    "experts added": Case(Growing, at_step_two(grow)),
    "replaced everywhere": Case(Toy, at_step_two(replace_everywhere)),
    "replaced in the model": Case(Toy, at_step_two(replace_in_the_model)),
    "taken out of the optimizer": Case(Toy, at_step_two(take_out)),
    "loaded in its place": Case(Toy, at_step_two(load_in_its_place)),
    "new data": Case(Toy, at_step_two(new_data)),
    "cast to bfloat16": Case(Toy, at_step_two(lambda model, _: model.to(torch.bfloat16))),
    "cast to float64": Case(Toy, at_step_two(lambda model, _: model.double())),
    "somebody's hook before ours, in place": Case(with_hook(halve_in_place)),
    "somebody's hook before ours, new gradient": Case(with_hook(replace_by_double)),
    "somebody's hooks after ours": Case(Toy, at_step_two(add_hooks)),
    "gradient penalty on inputs": Case(Toy, penalty_on_inputs),
    "gradient penalty on experts": Case(Toy, penalty_on_experts),
    "gradients of experts by hand": Case(Toy, gradients_by_hand),
    "several forwards": Case(Toy, contrastive),
    "a loss that misses an expert": Case(Toy, misses_an_expert),
    "a step without backward": Case(Toy, a_step_without_backward),
    "evaluation in between, zeroed twice": Case(Toy, evaluates_in_between),
    "saved tensors on the host": Case(Toy, saves_on_cpu),
    "functional calls and func.grad": Case(Toy, functional),
    "a copy that is trained itself": Case(Toy, averages_a_copy),
    "replicas": Case(Toy, replicas),
    "forward in another thread": Case(Toy, forward_in_a_thread),
}
