"""Peers that step once after backward, in an ordinary loop: torchao's 8-bit AdamW, and LoRA through peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from experiments.peers.base import EIGHT_BIT, Batch, PlainLoop, Plan, shares, trained
from lightning_sonar.experts import find_expert_tensors
from lightning_sonar.optim.states import state_tensors

COMPILED = "what its compiled update takes for a moment is not seen: the peak is a lower bound"
"""What a reader must know of the figures of torchao's optimizers."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Ordinary(PlainLoop):
    """Backward, clip, step, free gradients."""

    def begin(self, model: nn.Module, plan: Plan) -> _OrdinaryRun:
        return _OrdinaryRun(model, self.ordinary(trained(model)))

    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1.0, fused=True)


class _OrdinaryRun:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.optimizers = [optimizer]

    def states(self) -> Iterator[Tensor]:
        yield from state_tensors(self.optimizer)

    def step(self, microbatches: Sequence[Batch], max_norm: float | None) -> None:
        for loss in shares(self.model, microbatches):
            loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.zero_grad()


class TorchAO(Ordinary):
    """torchao's AdamW8bit over the whole model."""

    name = "torchao8bit"
    label = "torchao AdamW8bit"
    package = "torchao"
    module = "torchao"
    state = EIGHT_BIT
    note = COMPILED

    def ordinary(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

        return AdamW8bit(parameters, lr=1.0, weight_decay=1e-2)


class Lora(Ordinary):
    """Adapters of rank 16 on attention and on every expert tensor; only they are trained."""

    name = "lora"
    label = "LoRA (peft), r=16, experts and attention"
    package = "peft"
    module = "peft"
    state = "two moments of adapters, fp32"
    lr_factor = 10.0
    note = "trains adapters only, at ten times AdamW's learning rate"

    def prepare(self, model: nn.Module) -> nn.Module:
        import peft  # type: ignore[import-not-found]

        experts = sorted({".".join(name.split(".")[-2:]) for name in find_expert_tensors(model).names})
        # Adapters begin alike in every process, whatever was drawn before.
        torch.manual_seed(0)
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION, target_parameters=experts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice, and one of these per module
            return peft.get_peft_model(model, config)  # type: ignore[arg-type]
