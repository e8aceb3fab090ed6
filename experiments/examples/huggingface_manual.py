"""A Hugging Face MoE with manual optimization: `sonar_step` is backward, dense clip, step and schedule."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, MixtralConfig

from lightning_sonar import FusedAdamW, SonarMoEMixin, SonarMoEStrategy, find_expert_tensors


class Mixtral(SonarMoEMixin, L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return self.sonar_step(loss)

    def configure_optimizers(self) -> Any:
        optimizer = FusedAdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    L.seed_everything(0, verbose=False)
    # A small one with random weights; from_pretrained works the same.
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    print(find_expert_tensors(model).report())
    text = (torch.arange(16) + torch.randint(0, 4, (64, 1))) % 64  # [sequences, tokens]
    trainer = L.Trainer(
        strategy=SonarMoEStrategy(),
        gradient_clip_val=1.0,
        precision="bf16-true",
        max_steps=30,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Mixtral(model), DataLoader(text, batch_size=8, shuffle=True))  # type: ignore[arg-type]
    print(f"loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
