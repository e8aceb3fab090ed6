"""Parts 1 and 2 of the GPU check: the fused AdamW, and one layer of experts under each backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.measuring import build, copy_rate, matrix_rate, median_ms
from lightning_sonar.backends import BACKENDS
from lightning_sonar.experts import find_expert_tensors
from lightning_sonar.optim.reference import adamw_reference_
from lightning_sonar.optim.stochastic import StochasticRounding

GOAL_OF_COPY = 0.9
LAYER_BACKENDS = ("scattermoe", "grouped_mm", "sonicmoe")
SETTINGS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


class Emit(Protocol):
    """Hands a finding to the check, which prints and writes it at once."""

    def __call__(self, name: str, line: str, ok: bool | None = None, **figures: Any) -> None: ...


@dataclass(frozen=True)
class Check:
    """Where a job runs.

    Attributes:
        device: a GPU, or the CPU where there is none.
        toy: sizes at which a CPU and Triton's interpreter finish in seconds.
        emit: takes each finding as it is made.
    """

    device: torch.device
    toy: bool
    emit: Emit


def emit_bitwise(
    check: Check, name: str, what: str, reference: dict[str, Tensor], values: dict[str, Tensor], **more: Any
) -> None:
    """Report how many tensors, parameters and state by name, are equal to the bit."""
    different = [key for key in reference if not torch.equal(reference[key], values[key])]
    check.emit(
        name,
        f"{what}: {len(reference) - len(different)} of {len(reference)} tensors (parameters and state) equal to the bit"
        + (f", not {', '.join(different[:3])}" if different else ""),
        ok=not different,
        tensors=len(reference),
        different=different,
        **more,
    )


def runs_here(check: Check, backend: str) -> bool:
    """Whether a backend runs, with a record of what is missing if not."""
    missing = None if backend not in BACKENDS else BACKENDS[backend].missing(check.device)
    if missing is not None:
        check.emit(
            f"{backend}: missing", f"{backend} does not run here: it needs {missing}", backend=backend, missing=missing
        )
    return missing is None


def error(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm of the exact result; NaN where either holds one."""
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


# Part 1: the fused AdamW.


def _tensors(count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Parameter, gradient, both moments, and the step count of a second step."""
    generator = torch.Generator().manual_seed(2)
    param, grad, first, second = (torch.randn(count, generator=generator) for _ in range(4))
    values = [param, grad, 0.1 * first, 0.01 * second.square()]
    return [value.to(device, dtype) for value in values] + [torch.ones((), device=device)]


def _torch_fused(tensors: list[Tensor], settings: dict[str, Any]) -> None:
    param, grad, first, second, step = tensors
    step.add_(1.0)
    fused: Callable[..., Any] = torch._fused_adamw_
    fused([param], [grad], [first], [second], [], [step], amsgrad=False, maximize=False, grad_scale=None,
          found_inf=None, **settings)  # fmt: skip


def adamw(check: Check) -> None:
    """The kernel against the reference and against torch's fused AdamW, and its rate against a copy."""
    launch: Callable[..., None] = importlib.import_module("lightning_sonar.optim.kernels").launch_adamw
    for dtype in (torch.bfloat16, torch.float32):
        for variant in _variants(check.device, dtype):
            name = f"adamw {str(dtype).removeprefix('torch.')}" + (f" {variant}" if variant != "plain" else "")
            try:
                _adamw_bits(check, launch, name, dtype, variant)
            except Exception as problem:  # one variant's failure costs only itself
                check.emit(name, f"{name}: {type(problem).__name__}: {problem}", ok=False)
    for dtype in (torch.bfloat16, torch.float32):
        _adamw_rate(check, launch, dtype)


def _variants(device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """What a launch may be given besides: each is compiled into a kernel of its own."""
    down, up = torch.zeros((), device=device), torch.ones((), device=device)
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "scale and flag down": {"grad_scale": torch.full((), 0.3, device=device), "found_inf": down},
        "flag up": {"found_inf": up},
        "sum of squares": {"grad_sq_sum": torch.zeros((), device=device)},
        "tensor lr": {"lr": torch.full((), 3e-3, device=device)},
    }
    if dtype == torch.bfloat16:
        # Within a group of eight elements the kernel draws its bits in another way.
        found["stochastic rounding"] = {"rounding": StochasticRounding(7, 3, 4096)}
        found["stochastic rounding, odd offset"] = {"rounding": StochasticRounding(7, 3, 4099)}
    return found


def _adamw_bits(check: Check, launch: Callable[..., None], name: str, dtype: torch.dtype, variant: str) -> None:
    """Three steps by the kernel and by the reference, which must agree in every bit; and by torch where it can."""
    # A last block that is not full.
    count = 3001 if check.toy else 2**22 + 77
    ours, reference, fused = (_tensors(count, dtype, check.device) for _ in range(3))
    before = [value.clone() for value in ours]
    given, given_too = (_variants(check.device, dtype)[variant] for _ in range(2))
    for _ in range(3):
        launch(*ours, **{**SETTINGS, **given})
        adamw_reference_(*reference, **{**SETTINGS, **given_too})
    names = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "step")
    different = {n: int((a != b).sum()) for n, a, b in zip(names, ours, reference, strict=True)}
    moved = sum(int((a != b).sum()) for a, b in zip(ours, before, strict=True))
    figures: dict[str, Any] = {"different": different, "moved": moved}
    ok = not any(different.values()) and (moved == 0) == (variant == "flag up")
    line = f"{name}: {sum(different.values())} elements differ from the reference, of {moved} that moved"
    if variant == "plain":
        for _ in range(3):
            _torch_fused(fused, SETTINGS)
        # Beside what three steps changed, so that large weights do not hide a wrong update. torch divides where the
        # reference multiplies, and bf16 then rounds a few elements to the other side.
        change = fused[0].double() - before[0].double()
        apart = float((ours[0].double() - fused[0].double()).norm() / change.norm())
        figures["apart_from_torch"] = apart
        ok = ok and apart < (3e-2 if dtype == torch.bfloat16 else 1e-4)
        line += f"; {apart:.1e} of the update apart from torch's fused AdamW"
    if "grad_sq_sum" in given:
        exact = 3 * float(ours[1].double().square().sum())
        figures["error"] = abs(float(given["grad_sq_sum"]) / exact - 1)
        # Three sums, each some twenty roundings deep.
        ok = ok and figures["error"] < 1e-5
        line += f"; the sum is {figures['error']:.1e} from the exact one"
    check.emit(name, line, ok=ok, **figures)


def _adamw_rate(check: Check, launch: Callable[..., None], dtype: torch.dtype) -> None:
    label = str(dtype).removeprefix("torch.")
    # OLMoE's gate_up_proj [64, 2048, 2048]; half of it in fp32, for the same bytes.
    count = 4096 if check.toy else 2**28 if dtype == torch.bfloat16 else 2**27
    param, grad, first, second, step = _tensors(1024, dtype, check.device)
    param, grad, first, second = (value.repeat(count // 1024) for value in (param, grad, first, second))
    tensors = [param, grad, first, second, step]
    nbytes = 7 * count * param.element_size()
    rounds = 2 if check.toy else 20
    total = torch.zeros((), device=check.device)
    variants: dict[str, Callable[[], None]] = {
        "plain": lambda: launch(*tensors, **SETTINGS),
        "sum of squares": lambda: launch(*tensors, grad_sq_sum=total, **SETTINGS),
        "torch's fused": lambda: _torch_fused(tensors, SETTINGS),
    }
    if dtype == torch.bfloat16:
        variants["stochastic rounding"] = lambda: launch(*tensors, rounding=StochasticRounding(1, 0, 0), **SETTINGS)
    copy = copy_rate(nbytes, check.device, rounds)
    rates = {name: nbytes / median_ms(run, check.device, rounds, 1) / 1e6 for name, run in variants.items()}
    share = rates["plain"] / copy
    check.emit(
        f"adamw rate {label}",
        f"fused AdamW {label}: {rates['plain']:.0f} GB/s, {share:.0%} of a copy's {copy:.0f} (goal 90%); "
        + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items() if name != "plain"),
        # The interpreter's speed says nothing.
        ok=None if check.toy else share >= GOAL_OF_COPY,
        gb_per_s=rates,
        copy_gb_per_s=copy,
        share_of_copy=share,
        elements=count,
    )


# Part 2: one layer of experts.


@dataclass(frozen=True)
class Given:
    """Tokens ``[T, H]``, their experts and weights ``[T, k]``, and the gradient of the output."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    grad: Tensor


def given(module: Any, tokens: int, top_k: int, used: int, device: torch.device) -> Given:
    """Routing over the first ``used`` experts; the others have no tokens."""
    generator = torch.Generator().manual_seed(3)
    width = module.hidden_dim if hasattr(module, "hidden_dim") else module.down_proj.shape[1]
    index = torch.stack([torch.randperm(used, generator=generator)[:top_k] for _ in range(tokens)])
    hidden, grad = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    weights = torch.rand(tokens, top_k, generator=generator)
    bf16 = {"device": device, "dtype": torch.bfloat16}
    return Given(hidden.to(**bf16), index.to(device), weights.to(**bf16), grad.to(**bf16))


def run_layer(module: Any, backend: str, data: Given, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Output and every gradient, by name."""
    module.config._experts_implementation = backend
    module.zero_grad()
    hidden, weights = (value.to(dtype).requires_grad_() for value in (data.hidden.clone(), data.weights.clone()))
    out = module(hidden, data.index, weights)
    out.backward(data.grad.to(dtype))
    found: dict[str, Any] = {"output": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return {name: value for name, value in found.items() if value is not None}


def experts_of(name: str, check: Check) -> Any:
    """The experts module of one layer of a model, with weights of a size that shows in every gradient."""
    small = {} if check.toy else {"vocab_size": 256}
    model = build(name, "eager", check.device, toy=check.toy, layers=1, **small)
    module: Any = model.get_submodule(find_expert_tensors(model).names[0].rpartition(".")[0])
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def layers(check: Check, name: str) -> None:
    """Each backend against eager, by gradient; experts without tokens; times beside the matrix rate."""
    module = experts_of(name, check)
    count, top_k = module.num_experts, 2 if check.toy else 8
    tokens = 8 if check.toy else 512
    empty = count // 4
    data = given(module, tokens, top_k, count - empty, check.device)
    eager = run_layer(module, "eager", data)
    exact = run_layer(module.float(), "eager", data, torch.float32)
    module.to(torch.bfloat16)
    own = {key: error(eager[key], exact[key]) for key in exact}
    del eager
    usable = [backend for backend in LAYER_BACKENDS if runs_here(check, backend)]
    for backend in usable:
        try:
            _compare(check, name, backend, module, data, exact, own, empty)
        except Exception as problem:  # one backend's failure costs only itself
            check.emit(f"{name} {backend}", f"{name} layer, {backend}: {type(problem).__name__}: {problem}", ok=False)
    del exact
    rate = matrix_rate(128 if check.toy else 8192, check.device)
    check.emit(f"{name} matrix rate", f"bf16 matrix rate measured: {rate:.0f} TFLOP/s", tflop_per_s=rate)
    for amount in (tokens,) if check.toy else (512, 8192):
        full = given(module, amount, top_k, count, check.device)
        for backend in (*usable, "eager"):
            try:
                _time(check, name, backend, module, full, rate)
            except Exception as problem:
                check.emit(
                    f"{name} {backend} times", f"{name}, {backend}: {type(problem).__name__}: {problem}", ok=False
                )


def _compare(
    check: Check,
    name: str,
    backend: str,
    module: Any,
    data: Given,
    exact: dict[str, Tensor],
    own: dict[str, float],
    empty: int,
) -> None:
    found = run_layer(module, backend, data)
    errors = {key: error(found[key], exact[key]) for key in exact}
    # Experts at the end have no tokens: their gradients are zeros, not what lay in the memory.
    left = {key: float(found[key][-empty:].abs().max()) for key in ("gate_up_proj", "down_proj")}
    zeros = all(value == 0.0 for value in left.values())
    worst = max(errors, key=lambda key: errors[key] / max(own[key], 1e-30))
    check.emit(
        f"{name} {backend}",
        f"{name} layer, {backend}: worst by name {worst}, error {errors[worst]:.2e} (eager bf16 itself "
        f"{own[worst]:.2e}); gradients of {empty} experts without tokens are "
        + ("zeros" if zeros else f"NOT zeros: {left}"),
        # A comparison with NaN is false.
        ok=zeros and all(errors[key] <= 1.5 * own[key] for key in errors),
        errors=errors,
        eager_errors=own,
        empty_experts=empty,
        empty_zero=zeros,
    )


def _time(check: Check, name: str, backend: str, module: Any, data: Given, rate: float) -> None:
    module.config._experts_implementation = backend
    hidden, weights = data.hidden.clone().requires_grad_(), data.weights.clone().requires_grad_()
    rounds = 1 if check.toy else 5 if backend == "eager" else 20

    def forward() -> Tensor:
        return module(hidden, data.index, weights)

    def both() -> None:
        forward().backward(data.grad)
        hidden.grad = weights.grad = None
        for parameter in module.parameters():
            parameter.grad = None

    warmup = 1 if check.toy else 3
    ahead, whole = median_ms(forward, check.device, rounds, warmup), median_ms(both, check.device, rounds, warmup)
    experts, width, inner = module.down_proj.shape
    flops = 6 * data.index.numel() * width * inner
    weights_gb = 3 * experts * width * inner * 2 / 1e9
    tflops = {"forward": flops / ahead / 1e9, "both": 3 * flops / whole / 1e9}
    check.emit(
        f"{name} {backend} {len(data.hidden)} tokens",
        f"{name} layer, {backend}, {len(data.hidden)} tokens: forward {ahead:.3f} ms ({tflops['forward']:.0f} TFLOP/s, "
        f"{weights_gb / ahead * 1e3:.0f} GB/s of weights), forward and backward {whole:.3f} ms "
        f"({tflops['both']:.0f} TFLOP/s, {tflops['both'] / rate:.0%} of the matrix rate)",
        forward_ms=ahead,
        both_ms=whole,
        tflop_per_s=tflops,
        share_of_matrix_rate=tflops["both"] / rate,
    )
