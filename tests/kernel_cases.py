"""Runs the AdamW kernel for test_kernels.py, in a process of its own, and prints what it found as JSON.

Whether a Triton kernel is interpreted or compiled is settled by TRITON_INTERPRET when it is decorated, and
one process cannot do both. `interpret` needs the variable set, `compile` needs it unset.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import numpy
import torch
from extended_products import extended_products
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {  # parameter, gradient, moments
    "bf16": (BF16, BF16, BF16),
    "fp32": (FP32, FP32, FP32),
    "bf16_fp32_moments": (BF16, BF16, FP32),
    "fp32_bf16_grad": (FP32, BF16, FP32),
}
SHAPES = {"one": (1,), "odd": (7, 3), "block": (1024,), "blocks": (3, 5, 137), "none": (0, 4), "many": (8000,)}
OPTIONS = {
    "plain": {},
    "maximize": {"maximize": True},
    "scale": {"grad_scale": torch.tensor(0.3)},
    "flag_down": {"found_inf": torch.tensor(0.0)},
    "flag_up": {"found_inf": torch.tensor(1.0)},
    "flag_nan": {"found_inf": torch.tensor(float("nan"))},
    "scale_and_flag": {"grad_scale": torch.tensor(0.7), "found_inf": torch.tensor(0.0), "maximize": True},
    "lr_tensor": {"lr": torch.tensor(3e-3)},
    "no_memory": {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0},
    "no_eps": {"eps": 0.0},
    "no_lr": {"lr": 0.0},
    "decay_to_zero": {"weight_decay": 1000.0},
    "bare": {"beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 1000.0},
}
SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
NAMES = ("param", "exp_avg", "exp_avg_sq", "step")
# Seed, position, offset. Bits that need all 64 of the seed and of the offset, and offsets within a group of eight.
ROUNDINGS = {
    "zero": (0, 0, 0),
    "slice": (7, 3, 4096),
    "odd": (7, 3, 4099),
    "far": (2**63 - 1, 5, 2**35 + 8),
    "far_odd": (2**40 + 1, 1, 2**35 + 5),
}


def make(dtypes: str, shape: tuple[int, ...], special: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Parameter, moments and step; and three gradients."""
    generator = torch.Generator().manual_seed(0)
    p_dtype, g_dtype, s_dtype = DTYPES[dtypes]
    param = torch.randn(shape, generator=generator).to(p_dtype)
    grads = [(torch.randn(shape, generator=generator) * 10.0 ** -(2 * i)).to(g_dtype) for i in range(3)]
    if special:
        values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, 3e38])
        grads[1].view(-1)[: len(values)] = values.to(g_dtype)
    state = [param, torch.zeros(shape, dtype=s_dtype), torch.zeros(shape, dtype=s_dtype), torch.zeros(())]
    return state, grads


def differences(kernel: list[Tensor], reference: list[Tensor]) -> dict[str, int]:
    """By tensor name, how many elements differ in any bit; NaNs are equal to each other."""
    found = {}
    for name, a, b in zip(NAMES, kernel, reference, strict=True):
        bits = torch.int16 if a.dtype == BF16 else torch.int32
        found[name] = int(((a.view(bits) != b.view(bits)) & ~(a.isnan() & b.isnan())).sum())
    return found


def interpret() -> dict[str, dict[str, int]]:
    from lightning_sonar.optim.kernels import launch_adamw
    from lightning_sonar.optim.reference import adamw_reference_
    from lightning_sonar.optim.stochastic import StochasticRounding

    rounded = ("bf16", "bf16_fp32_moments")
    cases = [(d, s, "plain", False, None) for d in DTYPES for s in SHAPES if s != "many"]
    # Three of these elements differ where the reference's roots are not correctly rounded.
    cases += [("fp32", "many", "plain", False, None)]
    cases += [(d, "odd", o, False, None) for d in DTYPES for o in OPTIONS]
    cases += [(d, "odd", o, True, None) for d in DTYPES for o in ("scale", "no_eps", "bare")]
    cases += [(d, s, "plain", False, "slice") for d in rounded for s in SHAPES if s != "many"]
    cases += [("bf16", "blocks", "plain", False, r) for r in ROUNDINGS]
    cases += [("bf16", "odd", o, False, "odd") for o in OPTIONS]
    cases += [(d, "odd", "scale", True, r) for d in rounded for r in ("slice", "odd")]
    results = {}
    for dtypes, shape, option, special, rounding in cases:
        ours, grads = make(dtypes, SHAPES[shape], special)
        theirs = [t.clone() for t in ours]
        start = [t.clone() for t in ours]
        settings = {**SETTINGS, **OPTIONS[option]}
        if rounding is not None:
            settings["rounding"] = StochasticRounding(*ROUNDINGS[rounding])
        for grad in grads:
            before = grad.clone()
            # A gradient of 3e38 is meant to overflow; numpy would warn of it.
            with numpy.errstate(all="ignore" if special else "warn"):
                launch_adamw(ours[0], grad, *ours[1:], **settings)
            adamw_reference_(theirs[0], grad, *theirs[1:], **settings)
            if not torch.equal(before.nan_to_num(), grad.nan_to_num()):
                raise RuntimeError("the gradient was changed")
        found = differences(ours, theirs)
        found["moved"] = sum(differences(ours, start).values())
        name = f"{dtypes}-{shape}-{option}" + ("-special" if special else "")
        results[name + (f"-rounding_{rounding}" if rounding else "")] = found
    # The same memory order, not the default one: the kernel must walk storage.
    ours, grads = make("bf16", (6, 50), False)
    theirs = [t.clone() for t in ours]
    turned = [t.t().contiguous().t() if t.dim() == 2 else t for t in ours]
    launch_adamw(turned[0], grads[0].t().contiguous().t(), *turned[1:], **SETTINGS)
    adamw_reference_(theirs[0], grads[0], *theirs[1:], **SETTINGS)
    results["transposed"] = differences([t.contiguous() for t in turned], theirs)
    return results


def compile_all() -> dict[str, dict[str, object]]:
    """Each case for each target: its figures, and what else its code says."""
    from lightning_sonar.kernel_figures import TARGETS, KernelCase, Target, compile_case, measure
    from lightning_sonar.optim.offline import adamw_cases

    def found(case: KernelCase, target: Target) -> dict[str, object]:
        asm = compile_case(case, target).asm
        machine = asm["ptx" if target.backend == "cuda" else "amdgcn"]
        ttir, llir = asm["ttir"], asm["llir"]
        # On AMD a quotient is a reciprocal mended by three corrections, the last of them v_div_fixup.
        rough = r"\.(?:approx|full)\b|v_rcp_f32|v_rsq_f32"
        return {
            **dataclasses.asdict(measure(case, target)),
            "scalars": len(re.findall(r"tt\.load %\w+ : !tt\.ptr", ttir)),
            "tensors_loaded": len(re.findall(r"tt\.load .*: tensor<\d+x!tt\.ptr", ttir)),
            "tensors_stored": len(re.findall(r"tt\.store .*: tensor<\d+x!tt\.ptr", ttir)),
            "contracted": len(re.findall(r"\b(?:contract|fast|afn|arcp|fmuladd)\b|llvm\.fma", llir)),
            "fused": len(re.findall(r"\bfma\.", machine)),
            "approximate": len(re.findall(rough, machine)) - len(re.findall("v_div_fixup_f32", machine)),
            "widened_late": extended_products(ttir),
            "offsets": sorted(set(re.findall(r"tt\.addptr.*tensor<\d+x(i\d+)>", ttir))),
            "block_start": sorted(set(re.findall(r"arith\.muli %block_start.* : (i\d+)", ttir))),
        }

    results = {}
    for target in TARGETS:
        cases = {f"{target.name}-{case.dtype}-{case.variant}": case for case in adamw_cases(target)}
        results.update({name: found(case, target) for name, case in cases.items()})
        # What the figures must notice: pointers that nobody promised to be aligned, and registers that run out.
        case = cases[f"{target.name}-bf16-everything"]
        results[f"{target.name}-unaligned"] = found(dataclasses.replace(case, aligned=()), target)
        cramped = {"options": {**case.options, "maxnreg": 24}}
        if target.backend == "hip":  # which does not know maxnreg
            cramped = {"constants": {**case.constants, "BLOCK": 2**15}}
        results[f"{target.name}-cramped"] = found(dataclasses.replace(case, **cramped), target)
    return results


def sums() -> dict[str, dict[str, float]]:
    """Sums of squares from the kernel: of a whole tensor twice, of its halves, exact, and with the flag up."""
    from lightning_sonar.optim.kernels import launch_adamw

    def total(dtypes: str, slices: list[slice], **settings: Tensor) -> float:
        state, grads = make(dtypes, (3000,), False)
        found = torch.tensor(0.0)
        for part in slices:
            p, m, v = (tensor[part] for tensor in state[:3])
            launch_adamw(p, grads[0][part], m, v, state[3].clone(), grad_sq_sum=found, **SETTINGS, **settings)
        return found.item()

    results = {}
    for dtypes in ("bf16", "fp32"):
        exact = make(dtypes, (3000,), False)[1][0].double().square().sum().item()
        results[dtypes] = {
            "exact": exact,
            "whole": total(dtypes, [slice(None)]),
            "again": total(dtypes, [slice(None)]),
            "scaled": total(dtypes, [slice(None)], grad_scale=torch.tensor(0.3)),
            "halves": total(dtypes, [slice(0, 2048), slice(2048, None)]),
            "flag_up": total(dtypes, [slice(None)], found_inf=torch.tensor(1.0)),
        }
    return results


COMMANDS = {"interpret": lambda: {"bits": interpret(), "sums": sums()}, "compile": compile_all}

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]]()))
