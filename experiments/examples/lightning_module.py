"""An unchanged LightningModule with a hand-written MoE layer: only the strategy is new."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sonar import SonarMoEStrategy


class Experts(nn.Module):
    """A top-1 MoE layer. Its experts are found because `num_experts` is the first dimension of both weights."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 4 * width, width) / (2 * width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)  # [B], [B]
        hidden = torch.bmm(x.unsqueeze(1), self.up[expert]).relu()  # [B, 1, 4 * width]
        return x + weight.unsqueeze(-1) * torch.bmm(hidden, self.down[expert]).squeeze(1)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), Experts(4, 16), Experts(4, 16), nn.Linear(16, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    L.seed_everything(0, verbose=False)
    x = torch.randn(512, 8)
    data = DataLoader(TensorDataset(x, (x.sum(-1) > 0).long()), batch_size=32, shuffle=True)
    trainer = L.Trainer(
        strategy=SonarMoEStrategy(), gradient_clip_val=1.0, max_epochs=5, logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier(), data)
    print(f"loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
