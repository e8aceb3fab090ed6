"""Steps with a bad number in them, and what each must equal: one cell is one training run with one fault planted.

The expected values come from a run without the fault: the whole step is left out, or the tensors whose gradient the
fault spoils get none in it.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from test_in_backward import Toy
from torch import Tensor

from lightning_sonar import FusedAdamW, find_expert_tensors, nonfinite, release_in_backward
from lightning_sonar.clipping import check_clip
from lightning_sonar.expert_clip import check_accumulation
from lightning_sonar.modes import MODES, Mode, resolve_mode
from lightning_sonar.optim.offload import check_state_device
from lightning_sonar.optim.parted import ExpertsAndDense

NAN, INF = float("nan"), float("inf")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.float32}
OPTIMIZERS = {
    "FusedAdamW": FusedAdamW,
    "stochastic": lambda p, lr: FusedAdamW(p, lr=lr, stochastic_rounding=True, seed=3),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "parted": lambda p, lr: ExpertsAndDense(p, experts=FusedAdamW, dense=torch.optim.AdamW, lr=lr),
}
STATES = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
MICRO = 2
STEPS = 3
# Where a bad number can be: the loss, the features, or one element of one gradient.
GRADIENTS = {"first": ("first",), "second": ("second",), "bias": ("dense.bias",)}


@dataclass(frozen=True)
class Cell:
    """One run. `step` and `micro` say when the bad `value` comes; `on_device` drives the path of a GPU."""

    mode: str = "sonar"
    expert_clip: str | None = None
    clip: str = "norm"
    optimizer: str = "FusedAdamW"
    dtype: str = "fp32"
    fault: str = "loss"
    value: float = NAN
    step: int = 1
    accumulation: str | None = None
    micro: int = 0
    check: str = "loss"
    on_device: bool = False
    state_device: str | None = None

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    @property
    def resolved(self) -> Mode:
        return resolve_mode(self.mode, self.expert_clip)  # type: ignore[arg-type]

    @property
    def judged_first(self) -> bool:
        """Whether all gradients are looked at before anything is updated."""
        two_passes = self.resolved.expert_clip == "exact" and self.clip == "norm"
        return two_passes or self.resolved.in_backward == "none"

    @property
    def allowed(self) -> bool:
        """Whether this combination is one that trains; what is refused has tests of its own."""
        try:
            mode = self.resolved
            check_clip(mode, 0.5 if self.clip != "none" else 0.0, self.clip)
            check_accumulation(mode, self.accumulation or "exact")
            check_state_device(mode, self.state_device)
        except ValueError:
            return False
        fused = self.optimizer in ("FusedAdamW", "stochastic", "AdamW fused")
        spoils_gradient = self.fault in GRADIENTS
        return (
            (fused or not self.on_device)
            and (self.optimizer != "stochastic" or self.dtype == "bf16")
            and (self.accumulation is not None or self.micro == 0)
            and (self.check == "gradient" or not spoils_gradient)
            and not (self.state_device and self.optimizer == "parted")
        )


class Faulty(Toy):
    """`Toy`, some of whose parameters can be kept from getting a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.without: set[str] = set()

    def weight(self, name: str) -> Tensor:
        tensor = self.get_parameter(name)
        return tensor.detach() if name in self.without else tensor

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight("dense.weight"), self.weight("dense.bias"))
        x = self.all_experts(x, self.weight("first")).tanh()
        return self.all_experts(x, self.weight("second")).square().mean()


class Run:
    """Trains one cell, with its fault or, `reference`, as it should have come out."""

    def __init__(self, cell: Cell, reference: bool, **options: Any) -> None:
        self.cell, self.reference = cell, reference
        self.model = Faulty().to(DTYPES[cell.dtype])
        self.optimizer = OPTIMIZERS[cell.optimizer](self.model.parameters(), lr=1e-2)
        self.handle = release_in_backward(
            self.optimizer,
            find_expert_tensors(self.model),
            mode=cell.mode,
            expert_clip=cell.expert_clip,  # type: ignore[arg-type]
            accumulation=cell.accumulation or "exact",  # type: ignore[arg-type]
            expert_state_device=cell.state_device,  # type: ignore[arg-type]
            **{"check": cell.check, **options},
        )
        self.max_norm = 0.0 if cell.clip == "none" else 0.02
        self._spoil = False
        if cell.fault in GRADIENTS and not reference:
            for name in GRADIENTS[cell.fault]:
                self.model.get_parameter(name).register_hook(self._spoiled)

    def _spoiled(self, grad: Tensor) -> Tensor:
        if not self._spoil:
            return grad
        grad = grad.clone()
        grad.view(-1)[grad.numel() // 2 + 1] = self.cell.value  # one element of one expert's row
        return grad

    def values(self) -> list[Tensor]:
        """Weights, and states in the order of their keys; a state that is not there yet counts as zeros."""
        found = [parameter.detach().clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            found += [_filled(state.get(key), parameter) for key in STATES]
        return found

    def loss(self, step: int, micro: int) -> Tensor:
        here = (step, micro) == (self.cell.step, self.cell.micro) and not self.reference
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + micro))
        if here and self.cell.fault == "input":
            x[2, 3] = self.cell.value
        cast = contextlib.nullcontext()
        if self.cell.dtype == "mixed":
            cast = torch.autocast("cpu", torch.bfloat16)
        with cast:
            loss = self.model(x.to(DTYPES[self.cell.dtype]))
        self._spoil = here
        return loss * self.cell.value if here and self.cell.fault == "loss" else loss

    @property
    def micros(self) -> range:
        return range(MICRO if self.cell.accumulation else 1)

    def train(self, step: int) -> None:
        if self.reference and step == self.cell.step:
            self._train_as_it_should_be(step)
            return
        for micro in self.micros:
            self._backward(step, micro)

    def _backward(self, step: int, micro: int) -> None:
        algorithm = "value" if self.cell.clip == "value" else "norm"
        last = micro == self.micros[-1]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients are accumulated")
            self.handle.train_step(self.loss(step, micro), max_norm=self.max_norm, algorithm=algorithm, last=last)

    def _train_as_it_should_be(self, step: int) -> None:
        cell, mode = self.cell, self.cell.resolved
        each = cell.accumulation == "per_microbatch" and mode.in_backward != "none"
        if cell.fault not in GRADIENTS:
            # All or nothing, but for experts that earlier microbatches have updated already.
            if each and cell.micro > 0:
                if mode.in_backward == "experts":
                    self.model.without = {"dense.weight", "dense.bias"}
                self._backward(step, 0)
                self.model.without = set()
                self.optimizer.step()
            return
        expert = cell.fault != "bias"
        if cell.judged_first:
            return  # every gradient was looked at before anything was updated
        lagged = self.handle.state_dict()
        for micro in self.micros:
            alone = expert or mode.in_backward == "all"
            if not each or micro == cell.micro or not alone:
                self.model.without = {*(GRADIENTS[cell.fault] if alone else ("dense.weight", "dense.bias"))}
            self._backward(step, micro)
            self.model.without = set()
        if mode.expert_clip == "lagged":
            self.handle.load_state_dict(lagged or {"global_norm": 0.0})

    def expected_counts(self) -> tuple[int, int]:
        """Skipped steps and skipped tensors."""
        cell, mode = self.cell, self.cell.resolved
        if cell.fault not in GRADIENTS:
            return 1, 0
        if cell.judged_first:
            return 0, 4
        return 0, 2 if cell.fault == "bias" and mode.in_backward != "all" else 1


def _filled(value: Any, parameter: Tensor) -> Tensor:
    value = torch.as_tensor(0.0 if value is None else value).detach().float()
    return (value if value.ndim else value.expand(parameter.shape)).clone()


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit; a NaN equals a NaN."""
    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in pairs
    )


def wrong_with(cell: Cell, **options: Any) -> str | None:
    """Run a cell; says what is not as it must be, None if all is well."""
    path = mock.patch.object(nonfinite, "_stays_on_device", return_value=True)
    with path if cell.on_device else contextlib.nullcontext():
        spoiled, wanted = Run(cell, reference=False, **options), Run(cell, reference=True)
        for step in range(STEPS):
            spoiled.train(step)
            wanted.train(step)
            if not same(spoiled.values(), wanted.values()):
                return f"values differ after step {step}"
    if not all(value.isfinite().all() for value in spoiled.values()):
        return "a value is not finite"
    found = spoiled.handle.skipped_steps, spoiled.handle.skipped_tensors
    if found != spoiled.expected_counts():
        return f"counted {found} steps and tensors, expected {spoiled.expected_counts()}"
    if any(parameter.grad is not None for parameter in spoiled.model.parameters()):
        return "a gradient is left"
    return None


def modes() -> list[dict[str, str | None]]:
    """Every named mode with every expert clip that it can have."""
    found: list[dict[str, str | None]] = []
    for mode, clip in itertools.product(MODES, (None, "lagged", "per_tensor", "per_expert", "exact")):
        if clip == "exact" and mode == "sonar":
            continue  # has a name of its own
        try:
            resolve_mode(mode, clip)  # type: ignore[arg-type]
        except ValueError:
            continue
        if clip is None or MODES[mode].expert_clip == "none":
            found.append({"mode": mode, "expert_clip": clip})
    return found


def grid(over: Iterable[dict[str, str | None]], **axes: tuple[Any, ...]) -> Iterator[Cell]:
    """All cells of these axes, over these modes, that are allowed."""
    for mode in over:
        base = Cell(**mode)  # type: ignore[arg-type]
        for chosen in itertools.product(*axes.values()):
            cell = replace(base, **dict(zip(axes, chosen, strict=True)))
            if cell.allowed:
                yield cell


def wrong(cells: Iterable[Cell]) -> dict[str, str]:
    """The cells that do not come out as they must, by name, and in what."""
    return {str(cell): found for cell in cells if (found := wrong_with(cell)) is not None}
