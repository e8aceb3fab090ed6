"""A package ``sonic-moe`` for tests: the real one's names and signatures around plain torch, written to a folder.

Signatures, shapes and dtypes are those of sonic-moe 0.1.2.post1; the arithmetic is a loop over experts.
"""

from __future__ import annotations

from pathlib import Path

ENUMS = """
from enum import Enum


class ActivationType(Enum):
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"
"""

PACKAGE = '''
import torch
import torch.nn.functional as F

from sonicmoe.enums import ActivationType

calls = []
alive = []


def _gate(pre, activation_type, concat_layout):
    gate, up = pre.chunk(2, dim=-1) if concat_layout else (pre[..., ::2], pre[..., 1::2])
    if activation_type is ActivationType.SWIGLU:
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh") * up


class _UpProjection(torch.autograd.Function):
    """Forward keeps its input; the activation beside it has no gradient, as in the package."""

    @staticmethod
    def forward(ctx, x, w1, b1, rows, expert, activation_type, concat_layout):
        pre = torch.einsum("rh,rih->ri", x[rows], w1.permute(2, 0, 1)[expert])
        if b1 is not None:
            pre = pre + b1[expert]
        a = _gate(pre, activation_type, concat_layout)
        ctx.save_for_backward(x, w1, b1, rows, expert)
        ctx.mark_non_differentiable(a)
        ctx.set_materialize_grads(False)
        return a, pre

    @staticmethod
    def backward(ctx, _, dh):
        alive.append("up")
        x, w1, b1, rows, expert = ctx.saved_tensors
        dw1 = torch.empty_like(w1).zero_()
        per_row = torch.einsum("ri,rh->rih", dh, x[rows])
        dw1.permute(2, 0, 1).index_add_(0, expert, per_row)
        db1 = None if b1 is None else torch.zeros_like(b1).index_add_(0, expert, dh)
        dx = torch.zeros_like(x).index_add_(0, rows, torch.einsum("ri,rih->rh", dh, w1.permute(2, 0, 1)[expert]))
        return dx, dw1, db1, None, None, None, None


class _DownProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, h, w2, b2, scores, rows, expert, T, activation_type, concat_layout):
        ctx.settings = activation_type, concat_layout
        ctx.save_for_backward(h, w2, b2, scores, rows, expert)
        y = torch.einsum("ri,rhi->rh", a, w2.permute(2, 0, 1)[expert])
        if b2 is not None:
            y = y + b2[expert]
        return torch.zeros(T, w2.shape[0], dtype=a.dtype).index_add_(0, rows, (y * scores[:, None]).to(a.dtype))

    @staticmethod
    def backward(ctx, dout):
        alive.append("down")
        h, w2, b2, scores, rows, expert = ctx.saved_tensors
        with torch.enable_grad():
            again = h.detach().requires_grad_()
            a = _gate(again, *ctx.settings)
        weight = w2.permute(2, 0, 1)[expert]
        dy = dout[rows] * scores[:, None].to(dout.dtype)
        y = torch.einsum("ri,rhi->rh", a.detach(), weight) + (0 if b2 is None else b2[expert])
        dw2 = torch.empty_like(w2).zero_()
        dw2.permute(2, 0, 1).index_add_(0, expert, torch.einsum("rh,ri->rhi", dy, a.detach()))
        db2 = None if b2 is None else torch.zeros_like(b2).index_add_(0, expert, dy)
        (dh,) = torch.autograd.grad(a, again, torch.einsum("rh,rhi->ri", dy, weight))
        return None, dh, dw2, db2, (dout[rows] * y).sum(-1).to(scores.dtype), *[None] * 5


def moe_general_routing_inputs(
    x: torch.Tensor,
    router_scores: torch.Tensor,
    token_indices: torch.Tensor,
    expert_indices: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    E: int,
    stream_id: int,
    activation_type: ActivationType,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    calls.append(
        {
            "dtypes": [str(t.dtype) for t in (x, router_scores, token_indices, expert_indices, w1, w2)],
            "sorted": bool((token_indices.diff() >= 0).all()),
            "shapes": [tuple(w1.shape), tuple(w2.shape)],
            "strides": [w1.stride(), w2.stride()],
            "pointers": [w1.data_ptr(), w2.data_ptr()],
            "E": E,
            "inference": is_inference_mode_enabled,
        }
    )
    if router_scores.dtype != torch.float32:
        router_scores = router_scores.float()
    rows, expert = token_indices.long(), expert_indices.long()
    a, h = _UpProjection.apply(x, w1, b1, rows, expert, activation_type, concat_layout)
    o = _DownProjection.apply(
        a, h, w2, b2, router_scores, rows, expert, x.shape[0], activation_type, concat_layout
    )
    return o, torch.bincount(expert, minlength=E)
'''

DECLARED = "Requires-Dist: torch<=2.9.1,>=2.7.1"
"""What 0.1.2.post1 declares, beside Python >=3.12."""


def install(
    folder: Path,
    *,
    python: str = ">=3.10",
    requires: str = "Requires-Dist: torch>=2.7.1",
    package: str = PACKAGE,
    version: str = "0.1.2.post1",
) -> None:
    """Write the package and its metadata, as an installer leaves them; the folder then goes on ``sys.path``."""
    for name, text in {
        "sonicmoe/__init__.py": package,
        "sonicmoe/enums.py": ENUMS,
        f"sonic_moe-{version}.dist-info/METADATA": (
            f"Metadata-Version: 2.4\nName: sonic-moe\nVersion: {version}\nRequires-Python: {python}\n{requires}\n"
        ),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip())
