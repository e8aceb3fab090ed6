"""A plain PyTorch loop: hooks on the expert tensors, and one call a step."""

import torch
from torch import Tensor, nn

from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward


class MoE(nn.Module):
    """Every token goes to every expert, weighted by the router."""

    def __init__(self, num_experts: int = 4, width: int = 16) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)  # [B, E]
        hidden = torch.einsum("bi,eij->ebj", x, self.up).relu()  # [E, B, 2 * width]
        return x + torch.einsum("be,ebo->bo", weights, torch.bmm(hidden, self.down))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MoE(), MoE(), nn.Linear(16, 1))
    optimizer = FusedAdamW(model.parameters(), lr=3e-3)
    handle = release_in_backward(optimizer, find_expert_tensors(model))
    loss = torch.zeros(())
    for _ in range(100):
        x = torch.randn(64, 16)
        loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
        # Backward, in which the experts step and lose their gradients; dense clip; dense step; zero_grad.
        handle.train_step(loss, max_norm=1.0)
    handle.remove()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
