"""Models built in ways that updates inside backward might not survive, and the ordinary loop they are held against."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from test_in_backward import Toy, inputs
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward

STEPS = 4
CLIP = 0.05


def plain_loss(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor | None:
    return model(inputs(step))


@dataclass(frozen=True)
class Case:
    """A model, the loss of a step (which may change the model first), an optimizer, and which names are experts'."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.optim.Optimizer, int], Tensor | None] = plain_loss
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: FusedAdamW(model.parameters(), lr=1e-2)
    experts: str = "first|second|third"
    patterns: str = "auto"
    without: tuple[str, ...] = ()


def ordinary(case: Case, clips: Callable[[bool], bool]) -> dict[str, Tensor]:
    """Plain PyTorch: backward, clip the tensors that ``clips`` says, step. Knows of experts by name only."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.optimizer(model)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = case.loss(model, optimizer, step)
        if loss is None:
            continue
        loss.backward()
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        chosen = [t for t in held if clips(bool(re.search(case.experts, names.get(id(t), "none"))))]
        torch.nn.utils.clip_grad_norm_(chosen, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, optimizer)


def in_backward(case: Case, mode: str, **options) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = case.build()
    optimizer = case.optimizer(model)
    handle = release_in_backward(optimizer, find_expert_tensors(model, case.patterns), mode=mode, **options)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = case.loss(model, optimizer, step)
        if loss is not None:
            handle.train_step(loss, max_norm=0.0 if mode == "in_backward_all" else CLIP)
    return outcome(model, optimizer)


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    values = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for name, tensor in model.named_parameters():
        for key, value in optimizer.state.get(tensor, {}).items():
            values[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return values


def released(case: Case, mode: str = "sonar", **options):
    model = case.build()
    optimizer = case.optimizer(model)
    handle = release_in_backward(optimizer, find_expert_tensors(model, case.patterns), mode=mode, **options)
    return model, optimizer, handle


# How a model is built.


class Shared(Toy):
    """The same experts in two layers."""

    checkpointing: bool | None = None

    def forward(self, x):
        x = self.dense(x)
        for _ in range(2):
            x = self.layer(x) if self.checkpointing is None else checkpoint(self.layer, x, use_reentrant=False)
        return self.all_experts(x, self.second).square().mean()

    def layer(self, x):
        return self.all_experts(x, self.first).tanh()


class SharedCheckpointed(Shared):
    checkpointing = True


class Reentrant(Toy):
    def forward(self, x):
        x = checkpoint(lambda x: self.all_experts(x, self.first).tanh(), self.dense(x), use_reentrant=True)
        return self.all_experts(x, self.second).square().mean()


class TiedExperts(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.second = self.first


class TiedDense(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.dense.weight = self.head.weight

    def forward(self, x):
        x = self.all_experts(self.dense(x), self.first).tanh()
        return self.head(self.all_experts(x, self.second)).square().mean()


class Complex(Toy):
    def __init__(self) -> None:
        super().__init__()
        for tensor in (self.first, self.second):
            tensor.data = tensor.data.to(torch.complex64)

    def forward(self, x):
        x = self.all_experts(self.dense(x).to(torch.complex64), self.first)
        return self.all_experts(x, self.second).abs().square().mean()


class Biased(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.third_bias = nn.Parameter(torch.zeros(4, 8))
        self.router = nn.Parameter(torch.ones(4, 8))  # [E, H], and dense

    def forward(self, x):
        weights = (self.dense(x) @ self.router.T).softmax(-1)
        x = torch.einsum("ti,eio,te->teo", x, self.first, weights) + self.third_bias
        return self.all_experts(x.sum(1).tanh(), self.second).square().mean()


class ZeroWide(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Parameter(torch.zeros(4, 0, 8))

    def forward(self, x):
        return super().forward(x) + self.third.sum()


class SomeLayers(nn.Module):
    """A dense layer between two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), nn.Linear(8, 8), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Layer(Toy):
    def forward(self, x):
        return self.all_experts(self.all_experts(self.dense(x), self.first).tanh(), self.second)


class Growing(Toy):
    """Has a third layer of experts as soon as somebody puts one in."""

    third: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("third", None)

    def forward(self, x):
        x = self.all_experts(self.dense(x), self.first).tanh()
        x = x if self.third is None else self.all_experts(x, self.third).tanh()
        return self.all_experts(x, self.second).square().mean()


class ListOfExperts(nn.Module):
    """Each expert a module, most of which get no token in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        x = self.dense(x)
        chosen = x.argmax(1)
        parts = [self.experts[int(e)](x[chosen == e]).square().sum() for e in chosen.unique()]
        return torch.stack(parts).sum() / 9


class InLists(Toy):
    """Experts in a ParameterList and in a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.first_list = nn.ParameterList([self.first])
        self.second_dict = nn.ParameterDict({"only": self.second})
        del self.first, self.second

    def forward(self, x):
        x = self.all_experts(self.dense(x), self.first_list[0]).tanh()
        return self.all_experts(x, self.second_dict["only"]).square().mean()


class Times(nn.Module):
    def forward(self, x):
        return 1.5 * x


def laid_out(arrange: Callable[[Tensor], Tensor], width: int = 8) -> Callable[[], Toy]:
    """The model with its expert tensors in another memory layout."""

    def build() -> Toy:
        model = Toy()
        for name in ("first", "second"):
            setattr(model, name, nn.Parameter(arrange(getattr(model, name).detach())))
        return model

    return build


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def experts_innermost(tensor: Tensor) -> Tensor:
    return tensor.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1).flatten(2)[..., ::2]


def frozen() -> Growing:
    model = Growing()
    model.first.requires_grad_(False)
    return model


def with_hook(hook: Callable[[Tensor], None]) -> Callable[[], Toy]:
    def build() -> Toy:
        model = Toy()
        model.first.register_post_accumulate_grad_hook(hook)
        return model

    return build


def halve_in_place(tensor: Tensor) -> None:
    if tensor.grad is not None:
        tensor.grad.mul_(0.5)


def replace_by_double(tensor: Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad = (2 * tensor.grad).mT.contiguous().mT


def parametrized(*names: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Toy()
        for name in names:
            parametrize.register_parametrization(model, name, Times())
        return model

    return build
