"""The optimizer around the fused update: groups, state, checkpoints.

The arithmetic is `adamw_`'s, in `update.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sonar.optim.saved import check_groups, check_moments
from lightning_sonar.optim.step_one import Part
from lightning_sonar.optim.stochastic import StochasticRounding, checked_seed, global_offset
from lightning_sonar.optim.update import adamw_

__all__ = ["FusedAdamW"]

# Arguments of torch.optim.AdamW that say how it runs, by the values that ask for nothing else than what this one does.
_HARMLESS: dict[str, tuple[bool | None, ...]] = {
    "amsgrad": (False,),
    "foreach": (None, False),
    "capturable": (False,),
    "differentiable": (False,),
    "fused": (None, True),
}


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` on one Triton kernel a tensor, with two more ways to steer an update.

    Groups, defaults and state (`step` fp32 on the parameter's device; `exp_avg`, `exp_avg_sq` in its dtype)
    are exactly `torch.optim.AdamW`'s, so a state dict of either loads into the other. With stochastic rounding
    groups have two keys more, which AdamW carries along and does not read; the state stays the same. Each step reads
    the live groups and state. Loss scaling is left to the `GradScaler`; bf16-mixed with clipping needs none.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer; bf16 or fp32.
        lr: learning rate, a number or a scalar tensor.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: False. This and the next four are there so that a call of AdamW can stay as it is; any value that asks
            for something else is refused.
        maximize: ascend instead of descend.
        foreach: None or False.
        capturable: False.
        differentiable: False.
        fused: True or None.
        stochastic_rounding: round bf16 weights (not the moments) up or down at random, so that updates too small
            for bf16 are kept on average. The random bits depend on the seed, the parameter's position in the groups,
            the step and the element's place alone: runs repeat themselves, and every mode gives the same weights.
            A group may set it for itself. fp32 weights are not rounded and not affected. Like the learning rate, it
            comes from a loaded state dict if that has it.
        seed: of stochastic rounding, from 0 to 2**63 - 1.

    Attributes:
        found_inf: fp32 scalar tensor, or None. Read at every step; unless it is zero, nothing is updated and
            no step count advances. No host sync.
        gradient_scale: fp32 scalar tensor, or None. Read at every step; each gradient is multiplied by it
            and rounded to its own dtype first, as clipping would do (on a CPU `.grad` itself is scaled).
        grad_sq_sum: fp32 tensor of no dimensions, or None. Each step adds to it the squares of all elements of the
            gradients it uses, before `gradient_scale`; see `adamw_`.
        part_of: on the copy that steps one tensor for another optimizer, whose part that is; see `step_one`.

    Raises:
        NotImplementedError: at a step with stochastic rounding, for a sharding other than along dimension 0.
        TypeError: at a step, for a sparse, complex, float16 or integer tensor.
        ValueError: for `amsgrad=True` in a group or a loaded state dict, for arguments of AdamW that ask for another
            way of running, and for settings out of range.
    """

    # GradScaler and Lightning take True to mean that step() unscales fp16 gradients, and Lightning then
    # refuses to clip. This optimizer leaves unscaling to the scaler.
    _step_supports_amp_scaling = False
    found_inf: Tensor | None = None
    gradient_scale: Tensor | None = None
    grad_sq_sum: Tensor | None = None
    part_of: Part | None = None
    _rounding: dict[str, Any] = {"stochastic_rounding": False, "seed": 0}  # noqa: RUF012
    _positions: WeakTensorKeyDictionary | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = True,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        _refuse_other_ways(
            amsgrad=amsgrad, foreach=foreach, capturable=capturable, differentiable=differentiable, fused=fused
        )
        self._rounding = {"stochastic_rounding": bool(stochastic_rounding), "seed": checked_seed(seed)}
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        self._step_supports_amp_scaling = False  # AdamW's constructor has set it
        self.found_inf = None
        self.gradient_scale = None
        self.grad_sq_sum = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any torch optimizer."""
        if "seed" in param_group:
            checked_seed(param_group["seed"])  # before anything is added
        super().add_param_group(param_group)
        self._positions = None
        self._complete(self.param_groups[-1])

    def _complete(self, group: dict[str, Any]) -> None:
        # Only where it is used: otherwise groups are AdamW's to the key.
        if self._rounding["stochastic_rounding"] or "stochastic_rounding" in group:
            for key, value in self._rounding.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        own = ("found_inf", "gradient_scale", "grad_sq_sum", "_rounding")
        return {**state, **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take groups and state from a pickle or a state dict, whichever AdamW wrote it."""
        super().__setstate__(state)
        self._positions = None
        for group in self.param_groups:
            self._complete(group)
            group.update(fused=True, foreach=None, capturable=False, differentiable=False)
            for p in group["params"]:
                # AdamW without `fused` keeps the count on the CPU.
                if p in self.state and "step" in self.state[p]:
                    self.state[p]["step"] = self.state[p]["step"].to(p.device, torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` of this class or of `torch.optim.AdamW` returned.

        Raises:
            ValueError: the saved optimizer used `amsgrad`, has other groups, or is no AdamW; nothing is loaded then.
        """
        _refuse_amsgrad(state_dict["param_groups"])
        check_groups(self, state_dict["param_groups"])
        check_moments(self, state_dict["state"])
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def init_state(self, params: Iterable[Tensor] | None = None) -> None:
        """Create the state, zeros, of every parameter that requires a gradient and has none yet.

        Otherwise it appears at the first step, and only then shows in the memory used.

        Args:
            params: of these parameters only.
        """
        every = (p for group in self.param_groups for p in group["params"])
        for p in every if params is None else params:
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
            stochastic = group.get("stochastic_rounding", False)
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
                    grad_sq_sum=self.grad_sq_sum,
                    rounding=self._rounding_of(p, group) if stochastic else None,
                )
        return loss

    def _rounding_of(self, p: Tensor, group: dict[str, Any]) -> StochasticRounding:
        # Switched on in a live group, it has no seed there. Set there by hand, the seed has not been looked at.
        seed = checked_seed(group.get("seed", self._rounding["seed"]))
        # A copy that steps one tensor has a group of one: only the optimizer it was made from knows the position.
        owner, whole, offset = self.part_of or (self, p, 0)
        return StochasticRounding(seed, owner._position_of(whole), offset + global_offset(p))

    def _position_of(self, p: Tensor) -> int:
        if self._positions is None or p not in self._positions:
            # Others replace parameters in groups without a word, hence the second condition.
            every = [tensor for group in self.param_groups for tensor in group["params"]]
            self._positions = WeakTensorKeyDictionary({tensor: index for index, tensor in enumerate(every)})
        return self._positions[p]


def _refuse_other_ways(**arguments: bool | None) -> None:
    for name, value in arguments.items():
        if value not in _HARMLESS[name]:
            expected = " or ".join(str(each) for each in _HARMLESS[name])
            raise ValueError(
                f"FusedAdamW({name}={value}): expected {expected}, because it is AdamW(fused=True) and nothing else. "
                f"Leave {name} out, or use torch.optim.AdamW."
            )


def _refuse_amsgrad(groups: Iterable[dict[str, Any]]) -> None:
    for index, group in enumerate(groups):
        if group.get("amsgrad"):
            raise ValueError(
                f"parameter group {index} has amsgrad=True, which FusedAdamW does not have. Use "
                f"torch.optim.AdamW, or set it to False in the group (max_exp_avg_sq is then ignored)."
            )
