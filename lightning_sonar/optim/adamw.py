"""AdamW in one pass over each tensor, and the optimizer that keeps its books.

`adamw_` does the arithmetic on one tensor and chooses how: Triton on a GPU, torch's fused kernel on a CPU,
plain torch elsewhere. `FusedAdamW` adds only what an optimizer is: groups, state, checkpoints. In-backward
modes and an ordinary `step()` call the same `adamw_`, which is why their results are bitwise identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import ParamsT

from lightning_sonar.optim.reference import adamw_reference_

__all__ = ["FusedAdamW", "adamw_"]

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
) -> None:
    """One AdamW update of one tensor, in place.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101). CUDA and ROCm
    tensors go to the Triton kernel, CPU tensors to torch's fused kernel. All others go to `adamw_reference_`,
    as do tensors whose strides a fused kernel cannot walk. On a GPU nothing waits for the device.

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

    Raises:
        TypeError: a sparse, complex, float16 or integer tensor.
        ValueError: shapes, devices or sharding that do not match.
    """
    _check(param, grad, exp_avg, exp_avg_sq, step)
    # A sharded tensor is updated shard by shard: AdamW is element-wise.
    p, g, m, v, count = (_local(tensor) for tensor in (param, grad, exp_avg, exp_avg_sq, step))

    update = _choose_update(p, g, m, v)
    if update is not adamw_reference_ and not _same_strides(p, g):
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
    )
    torch.autograd.graph.increment_version(param)


def _choose_update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Callable[..., None]:
    """The fastest update that is right for these tensors."""
    dtypes = {t.dtype for t in (p, g, m, v)}
    walkable = _is_dense(p) and _same_strides(p, m) and _same_strides(p, v)
    if p.is_cuda and walkable and dtypes <= _TRITON_DTYPES and not isinstance(p, FakeTensor):
        launch = _triton_launch()
        if launch is not None:
            return launch
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
    lr: float | Tensor,
    **settings: Any,
) -> None:
    """torch's fused kernel; arguments as in `adamw_`, all of one dtype and with the same dense strides."""
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


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).is_contiguous()


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether equal indices mean equal offsets; the stride of a dimension of size 1 says nothing."""
    if a.stride() == b.stride():
        return True
    sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(left == right for size, left, right in sizes if size > 1)


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` on one Triton kernel a tensor, with two more ways to steer an update.

    Groups, defaults and state (`step` fp32 on the parameter's device; `exp_avg`, `exp_avg_sq` in its dtype)
    are exactly `torch.optim.AdamW`'s, so a state dict of either loads into the other. Each step reads the
    live groups and state. Loss scaling is left to the `GradScaler`; bf16-mixed with clipping needs none.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer; bf16 or fp32.
        lr: learning rate, a number or a scalar tensor.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.

    Attributes:
        found_inf: fp32 scalar tensor, or None. Read at every step; unless it is zero, nothing is updated and
            no step count advances. No host sync.
        gradient_scale: fp32 scalar tensor, or None. Read at every step; each gradient is multiplied by it
            and rounded to its own dtype first, as clipping would do (on a CPU `.grad` itself is scaled).

    Raises:
        TypeError: at a step, for a sparse, complex, float16 or integer tensor.
        ValueError: for `amsgrad=True` in a group or a loaded state dict, and for settings out of range.
    """

    # GradScaler and Lightning take True to mean that step() unscales fp16 gradients, and Lightning then
    # refuses to clip. This optimizer leaves unscaling to the scaler.
    _step_supports_amp_scaling = False
    found_inf: Tensor | None = None
    gradient_scale: Tensor | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._step_supports_amp_scaling = False  # AdamW's constructor has set it
        self.found_inf = None
        self.gradient_scale = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "found_inf": self.found_inf, "gradient_scale": self.gradient_scale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and state from a pickle or a state dict, whichever AdamW wrote it."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(fused=True, foreach=None, capturable=False, differentiable=False)
            for p in group["params"]:
                # AdamW without `fused` keeps the count on the CPU.
                if p in self.state and "step" in self.state[p]:
                    self.state[p]["step"] = self.state[p]["step"].to(p.device, torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class or of `torch.optim.AdamW` returned.

        Raises:
            ValueError: the saved optimizer used `amsgrad`; nothing is loaded then.
        """
        _refuse_amsgrad(state_dict["param_groups"])
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def init_state(self) -> None:
        """Create the state, zeros, of every parameter that requires a gradient and has none yet.

        Otherwise it appears at the first step, and only then shows in the memory used.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._state_of(p)

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _refuse_amsgrad(self.param_groups)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._state_of(p)
                adamw_(
                    p,
                    p.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                    lr=group["lr"],
                    beta1=float(beta1),
                    beta2=float(beta2),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    maximize=group["maximize"],
                    grad_scale=self.gradient_scale,
                    found_inf=self.found_inf,
                )
        return loss


def _refuse_amsgrad(groups: Iterable[dict[str, Any]]) -> None:
    for index, group in enumerate(groups):
        if group.get("amsgrad"):
            raise ValueError(
                f"parameter group {index} has amsgrad=True, which FusedAdamW does not have. Use "
                f"torch.optim.AdamW, or set it to False in the group (max_exp_avg_sq is then ignored)."
            )
