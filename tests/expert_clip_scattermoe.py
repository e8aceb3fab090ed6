"""Exact clipping against standard training with the ScatterMoE kernels interpreted; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import json

import torch
from helpers import batches, small_model

from lightning_sonar import FusedAdamW, find_expert_tensors, release_in_backward
from lightning_sonar.losses import response_cross_entropy


def train(mode: str, dtype: torch.dtype, checkpointing: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Parameters and optimizer states after two steps, and the norms that were clipped by."""
    model = small_model(dtype=dtype, backend="scattermoe", num_layers=1, checkpointing=checkpointing)
    model.train()
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    handle = release_in_backward(optimizer, find_expert_tensors(model), mode=mode)
    norms = []
    for batch in batches(2, seq_len=6):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        norm = handle.train_step(response_cross_entropy(logits, batch["labels"])[0], max_norm=0.1)
        norms.append(float("nan") if norm is None else float(norm))
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*(p.detach() for p in model.parameters()), *states], norms


def main() -> None:
    torch.use_deterministic_algorithms(True)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for checkpointing in (False, True):
            (left, norms), (right, others) = (
                train(mode, dtype, checkpointing) for mode in ("standard", "sonar_exact_clip")
            )
            found[f"{dtype} {checkpointing}"] = {
                "different": sum(not torch.equal(a, b) for a, b in zip(left, right, strict=True)),
                "least_norm": min(norms),
                "same_norms": norms == others,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
