"""One AdamW update of one tensor, in one pass over it: Triton on a GPU, torch's fused kernel on a CPU.

Plain torch does what neither can. In-backward modes and an ordinary `step()` of `FusedAdamW` call the same
`adamw_`, which is why their results are bitwise identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_sonar.optim.reference import adamw_in_chunks_, adamw_reference_, squared_norm
from lightning_sonar.optim.stochastic import StochasticRounding

__all__ = ["adamw_"]

_TRITON_DTYPES = frozenset({torch.bfloat16, torch.float32})
_DTYPES = frozenset({torch.bfloat16, torch.float32, torch.float64})
# Not DTensors; asking by type is several times faster than looking for an attribute that is not there.
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


@torch.no_grad()
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    grad_sq_sum: Tensor | None = None,
    rounding: StochasticRounding | None = None,
) -> None:
    """One AdamW update of one tensor, in place.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101). CUDA and ROCm
    tensors go to the Triton kernel, CPU tensors to torch's fused kernel. All others go to `adamw_reference_`,
    as do tensors whose strides a fused kernel cannot walk. On a GPU nothing waits for the device.

    Nothing that can be asked for costs another pass over memory on a GPU. On a CPU, stochastic rounding takes the
    reference's arithmetic, 2**20 elements at a time, and the sum of squares reads the gradient once more.

    The version counter of `param` is raised, so that a second backward through an older graph fails instead
    of silently using the new weights. A slice to be updated on its own should be taken with `detach()`,
    which shares the counter, not with `.data`, which does not.

    Args:
        param: any shape, bf16 or fp32 (fp64 on torch's own kernels); updated in place.
        grad: the shape of `param`. With strides other than the parameter's it is copied first. On a CPU a
            `grad_scale` is applied to it in place, as clipping would do.
        exp_avg: first moment, the shape of `param`, bf16 or fp32; updated in place.
        exp_avg_sq: second moment, likewise.
        step: fp32 scalar on the device of `param`, the number of updates made so far; advanced by one.
        lr: learning rate, a number or a scalar tensor.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        grad_scale: scalar tensor; the gradient is multiplied by it and rounded to its own dtype before the
            update (torch's own `grad_scale` divides instead).
        found_inf: fp32 scalar tensor; unless it is zero nothing is written and `step` does not advance.
        grad_sq_sum: fp32 tensor of no dimensions on the device of `param`. The sum of the squares of the gradient
            as it came, before `grad_scale`, is added to it: the parts of a tensor add up, and the caller zeroes
            it. Nothing is added while `found_inf` is up. Of a sharded tensor it is this rank's part. The order of
            the sum is fixed, so it repeats itself; the parts of a tensor may sum to other last bits than the whole.
        rounding: round a bf16 `param` stochastically; no effect on others, whose weights are not rounded. For a
            sharded tensor its offset is that of the local shard.

    Raises:
        TypeError: a sparse, complex, float16 or integer tensor.
        ValueError: shapes, devices or sharding that do not match.
    """
    _check(param, grad, exp_avg, exp_avg_sq, step)
    # A sharded tensor is updated shard by shard: AdamW is element-wise.
    p, g, m, v, count = (_local(tensor) for tensor in (param, grad, exp_avg, exp_avg_sq, step))

    if grad_sq_sum is not None:
        wanted = (torch.float32, torch.Size(), p.device)
        if (grad_sq_sum.dtype, grad_sq_sum.shape, grad_sq_sum.device) != wanted:
            raise ValueError(
                f"grad_sq_sum is {grad_sq_sum.dtype} of shape {tuple(grad_sq_sum.shape)} on {grad_sq_sum.device}; "
                f"expected float32 of no dimensions on {p.device}, like torch.zeros((), device=param.device)."
            )
    if rounding is not None and (p.dtype != torch.bfloat16 or _stands_for_gpu(p)):
        rounding = None
    update = _choose_update(p, g, m, v, rounding)
    if update is not adamw_reference_ and not same_strides(p, g):
        # torch's fused kernel on a CPU does not notice: it would pair a weight with another one's gradient.
        g = torch.empty_like(p, dtype=g.dtype).copy_(g)
    update(
        *(p, g, m, v, count),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        grad_scale=_local_scalar(grad_scale, p.device),
        found_inf=_local_scalar(found_inf, p.device),
        grad_sq_sum=grad_sq_sum,
        rounding=rounding,
    )
    torch.autograd.graph.increment_version(param)


def _stands_for_gpu(tensor: Tensor) -> bool:
    """Whether a fake tensor stands for one on a GPU, where the kernel rounds in registers and takes no memory."""
    return isinstance(tensor, FakeTensor) and not getattr(tensor.fake_mode, "plans_cpu", False)


def _choose_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, rounding: StochasticRounding | None
) -> Callable[..., None]:
    """The fastest update that is right for these tensors."""
    dtypes = {t.dtype for t in (p, g, m, v)}
    walkable = is_dense(p) and same_strides(p, m) and same_strides(p, v)
    if p.is_cuda and walkable and dtypes <= _TRITON_DTYPES and not isinstance(p, FakeTensor):
        launch = _triton_launch()
        if launch is not None:
            return launch
    if rounding is not None:
        # torch's fused kernel rounds to nearest itself.
        return adamw_in_chunks_ if walkable else adamw_reference_
    if walkable and len(dtypes) == 1 and p.device.type in ("cpu", "cuda"):
        return _torch_fused_
    return adamw_reference_


@functools.cache
def _triton_launch() -> Callable[..., None] | None:
    """The kernel's launcher, or None where Triton is not installed (it has no wheel outside Linux)."""
    try:
        from lightning_sonar.optim.kernels import launch_adamw
    except ImportError:
        return None
    return launch_adamw


def _torch_fused_(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    grad_sq_sum: Tensor | None,
    rounding: StochasticRounding | None,
    lr: float | Tensor,
    **settings: Any,
) -> None:
    """torch's fused kernel; arguments as in `adamw_`, all of one dtype and with the same dense strides.

    `rounding` is None: `_choose_update` sends all else elsewhere.
    """
    if grad_sq_sum is not None:
        found = squared_norm(g)
        grad_sq_sum.add_(found if found_inf is None else torch.where(found_inf == 0, found, 0.0))
    if grad_scale is not None:
        if p.is_cuda:
            # There mul_ would first round the scalar tensor to the gradient's dtype.
            g.copy_(g.float() * grad_scale)
        else:
            g.mul_(grad_scale)
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.to(p.device)
    flag = None
    if found_inf is not None:
        # torch skips at exactly 1; here any value but 0 does, a NaN included.
        flag = (found_inf != 0).to(torch.float32)
    step.add_(1.0)
    torch._fused_adamw_(  # pyright: ignore[reportCallIssue]
        [p],
        [g],
        [m],
        [v],
        [],
        [step],
        lr=lr,  # pyright: ignore[reportArgumentType]
        amsgrad=False,
        grad_scale=None,
        found_inf=flag,
        **settings,
    )
    if flag is not None:
        step.sub_(flag)


def _check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> None:
    shape, device = param.shape, param.device
    named = {"parameter": param, "gradient": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in named.items():
        if tensor.layout != torch.strided:
            raise TypeError(
                f"the {name} of a tensor of shape {tuple(shape)} is sparse ({tensor.layout}); AdamW needs "
                f"dense tensors. Build the layer with sparse=False, or use torch.optim.SparseAdam."
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"the {name} of a tensor of shape {tuple(shape)} is {tensor.dtype}; expected bfloat16 or "
                f"float32. Train in bfloat16 (precision='bf16-true' or 'bf16-mixed'), keep complex numbers "
                f"as their torch.view_as_real, or use torch.optim.AdamW."
            )
        if tensor.shape != shape or tensor.device != device:
            raise ValueError(
                f"the {name} is {tuple(tensor.shape)} on {tensor.device}, its parameter {tuple(shape)} on "
                f"{device}; they must be equal. Move the model before building the optimizer, and load "
                f"state that belongs to this model."
            )
        if type(tensor) not in _PLAIN:
            found, expected = (getattr(t, "placements", None) for t in (tensor, param))
            if found != expected:
                raise ValueError(
                    f"the {name} is sharded as {found}, its parameter as {expected}; redistribute it first."
                )
    if step.dtype != torch.float32 or step.numel() != 1 or step.device != device:
        raise ValueError(
            f"the step count is a {step.dtype} tensor of shape {tuple(step.shape)} on {step.device}; "
            f"expected an fp32 scalar on {device}. FusedAdamW.load_state_dict makes it so."
        )


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, any other tensor itself."""
    # Asked by duck typing: importing DTensor is slow, and pointless in a process that has none.
    if type(tensor) in _PLAIN or not hasattr(tensor, "to_local"):
        return tensor
    return cast(Any, tensor).to_local()


def _local_scalar(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """`tensor` as an fp32 tensor of no dimensions on `device`."""
    if tensor is None:
        return None
    tensor = _local(tensor)
    if tensor.dtype != torch.float32 or tensor.device != device or tensor.dim():
        tensor = tensor.to(device, torch.float32).reshape(())
    return tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether equal indices mean equal offsets; the stride of a dimension of size 1 says nothing."""
    if a.stride() == b.stride():
        return True
    sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(left == right for size, left, right in sizes if size > 1)
