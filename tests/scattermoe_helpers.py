"""Small experts modules, routings and gradients by name, for scattermoe_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import lightning_sonar.backends  # noqa: F401  registers the backend

FP32, BF16 = torch.float32, torch.bfloat16
WIDTH = {"hidden_size": 40, "intermediate_size": 24}
EXPERTS, TOKENS, TOP_K = 4, 11, 2


def experts(family: str, dtype: torch.dtype = FP32) -> Any:
    """A small experts module of a family, with weights of which every one matters."""
    import transformers.models as m
    from transformers import AutoConfig

    module, name, options = {
        "olmoe": (m.olmoe.modeling_olmoe, "OlmoeExperts", {"num_experts": EXPERTS}),
        "granitemoe": (m.granitemoe.modeling_granitemoe, "GraniteMoeExperts", {"num_local_experts": EXPERTS}),
        "mixtral": (m.mixtral.modeling_mixtral, "MixtralExperts", {"num_local_experts": EXPERTS}),
        "qwen3_moe": (
            m.qwen3_moe.modeling_qwen3_moe,
            "Qwen3MoeExperts",
            {"num_experts": EXPERTS, "moe_intermediate_size": 24},
        ),
        "gpt_oss": (m.gpt_oss.modeling_gpt_oss, "GptOssExperts", {"num_local_experts": EXPERTS}),
        "nemotron_h": (
            m.nemotron_h.modeling_nemotron_h,
            "NemotronHExperts",
            {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24},
        ),
    }[family]
    torch.manual_seed(0)
    made = getattr(module, name)(AutoConfig.for_model(family, **WIDTH, **options))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made.to(dtype)


def inputs(
    dtype: torch.dtype = FP32, tokens: int = TOKENS, top_k: int = TOP_K, spread: int = EXPERTS - 1
) -> dict[str, Tensor]:
    """Tokens, experts and weights of a router that uses the first `spread` experts: the last has no tokens."""
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(spread, generator=generator)[:top_k] for _ in range(tokens)])
    return {
        "hidden": torch.randn(tokens, WIDTH["hidden_size"], generator=generator).to(dtype),
        "index": index,
        "weights": torch.rand(tokens, top_k, generator=generator).to(dtype),
        "grad": torch.randn(tokens, WIDTH["hidden_size"], generator=generator).to(dtype),
    }


def doubled(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in fp64, for a result that counts as exact."""
    return {name: value if name == "index" else value.double() for name, value in given.items()}


def forward(
    module: Any, backend: str, given: dict[str, Tensor], leaves: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    module.config._experts_implementation = backend
    hidden, weights = (given[name].clone().requires_grad_(leaves) for name in ("hidden", "weights"))
    return module(hidden, given["index"], weights), {"hidden": hidden, "weights": weights}


def run(module: Any, backend: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and every gradient, by name."""
    module.zero_grad()
    out, leaves = forward(module, backend, given)
    out.backward(given["grad"].to(out.dtype))
    return {"out": out.detach(), **gradients(module, leaves)}


def gradients(module: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {**leaves, **dict(module.named_parameters())}
    return {name: value.grad.clone() for name, value in named.items() if value.grad is not None}


def error(found: Tensor, exact: Tensor) -> float:
    """Relative to the norm."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    if found.keys() != exact.keys():
        raise RuntimeError(f"{found.keys()} and {exact.keys()}")
    return {name: error(found[name], exact[name]) for name in exact}
