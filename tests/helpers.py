"""Small models, batches and fits that several test files share."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn

from lightning_sonar import FusedAdamW, SonarMoEStrategy, models
from lightning_sonar.language_model import LanguageModel
from lightning_sonar.losses import response_cross_entropy

SMALL = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 96, "num_experts_per_tok": 2}
FAMILY = {
    "olmoe": {**SMALL, "num_experts": 6, "num_attention_heads": 2, "num_key_value_heads": 2},
    "granite": {**SMALL, "num_local_experts": 6, "num_attention_heads": 2, "num_key_value_heads": 1},
}


def small_model(
    family: str = "olmoe",
    dtype: torch.dtype = torch.float32,
    backend: str = "grouped_mm",
    num_layers: int = 2,
    checkpointing: bool = False,
    seed: int = 0,
) -> nn.Module:
    torch.manual_seed(seed)
    return models.build(
        family,
        "tiny",
        num_layers=num_layers,
        backend=backend,
        dtype=dtype,
        checkpointing=checkpointing,
        attn_implementation="eager",
        **FAMILY[family],
    )


def batches(count: int, batch_size: int = 2, seq_len: int = 12, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, SMALL["vocab_size"], (batch_size, seq_len), generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


class Batches(torch.utils.data.Dataset):
    def __init__(self, made: list[dict[str, Tensor]]) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.made[index]


def loader(made: list[dict[str, Tensor]]) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Batches(made), batch_size=None, shuffle=False)


class AutomaticLM(L.LightningModule):
    """The automatic-optimization twin of `LanguageModel`: an ordinary module that knows nothing of this package."""

    def __init__(self, model: nn.Module, optimizer, scheduler=None) -> None:
        super().__init__()
        self.model = model
        self.optimizer_factory = optimizer
        self.scheduler_factory = scheduler

    def training_step(self, batch, batch_idx):
        output = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        return response_cross_entropy(output.logits, batch["labels"])[0]

    def configure_optimizers(self):
        optimizer = self.optimizer_factory(self.parameters())
        if self.scheduler_factory is None:
            return optimizer
        return [optimizer], [{"scheduler": self.scheduler_factory(optimizer), "interval": "step"}]


def fused(lr: float = 1e-2, **options):
    return lambda parameters: FusedAdamW(parameters, lr=lr, **options)


PRECISION = {torch.float32: "32-true", torch.bfloat16: "bf16-true"}


def make_trainer(strategy, steps: int = -1, precision: str = "32-true", clip: float | None = 0.5, **options):
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "strategy": strategy,
            "max_steps": steps,
            "max_epochs": 1,
            "precision": precision,
            "gradient_clip_val": clip,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def fit(
    model: nn.Module,
    mode: str,
    *,
    automatic: bool = False,
    optimizer=None,
    scheduler=None,
    steps: int = 10,
    clip: float | None = 0.5,
    precision: str | None = None,
    data: list[dict[str, Tensor]] | None = None,
    strategy_options: dict | None = None,
    **options,
) -> tuple[L.Trainer, L.LightningModule]:
    """Train a few steps in one mode; returns the trainer and the module."""
    module = (AutomaticLM if automatic else LanguageModel)(model, optimizer or fused(), scheduler)
    dtype = next(model.parameters()).dtype
    trainer = make_trainer(
        SonarMoEStrategy(mode=mode, **(strategy_options or {})),
        steps,
        precision or PRECISION[dtype],
        None if mode == "in_backward_all" else clip,
        **options,
    )
    trainer.fit(module, loader(data or batches(steps)))
    return trainer, module


def snapshot(trainer: L.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and every optimizer state, by name."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for parameter, state in trainer.optimizers[0].state.items():
        for key, value in state.items():
            values[f"{names[id(parameter)]}.{key}"] = torch.as_tensor(value).clone()
    return values


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names whose values are not bit for bit equal."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]
