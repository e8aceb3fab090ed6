"""Runs the AdamW kernel for test_kernels.py, in a process of its own, and prints what it found as JSON.

Whether a Triton kernel is interpreted or compiled is settled by TRITON_INTERPRET when it is decorated, and
one process cannot do both. `interpret` needs the variable set, `compile` needs it unset.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import numpy
import torch
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {  # parameter, gradient, moments
    "bf16": (BF16, BF16, BF16),
    "fp32": (FP32, FP32, FP32),
    "bf16_fp32_moments": (BF16, BF16, FP32),
    "fp32_bf16_grad": (FP32, BF16, FP32),
}
SHAPES = {"one": (1,), "odd": (7, 3), "block": (1024,), "blocks": (3, 5, 137), "none": (0, 4)}
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
}
SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
NAMES = ("param", "exp_avg", "exp_avg_sq", "step")


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

    cases = [(d, s, "plain", False) for d in DTYPES for s in SHAPES]
    cases += [(d, "odd", o, False) for d in DTYPES for o in OPTIONS]
    cases += [(d, "odd", "scale", True) for d in DTYPES]
    results = {}
    for dtypes, shape, option, special in cases:
        ours, grads = make(dtypes, SHAPES[shape], special)
        theirs = [t.clone() for t in ours]
        start = [t.clone() for t in ours]
        settings = {**SETTINGS, **OPTIONS[option]}
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
        results[f"{dtypes}-{shape}-{option}" + ("-special" if special else "")] = found
    # The same memory order, not the default one: the kernel must walk storage.
    ours, grads = make("bf16", (6, 50), False)
    theirs = [t.clone() for t in ours]
    turned = [t.t().contiguous().t() if t.dim() == 2 else t for t in ours]
    launch_adamw(turned[0], grads[0].t().contiguous().t(), *turned[1:], **SETTINGS)
    adamw_reference_(theirs[0], grads[0], *theirs[1:], **SETTINGS)
    results["transposed"] = differences([t.contiguous() for t in turned], theirs)
    return results


TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32)}


def resources(cubin: bytes) -> dict[str, int]:
    """What ptxas reserved for a thread. A spill shows as stack, not in the PTX."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report.stdout))
    return {name.lower(): int(value) for name, value in found.items()}


def compile_all() -> dict[str, dict[str, object]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_sonar.optim.kernels import NUM_WARPS, adamw_kernel, block_size

    results = {}
    tensors = ("param_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr")
    for name, target in TARGETS.items():
        for dtype in ("bf16", "fp32"):
            # The plain kernel in bf16, and with every switch on in both dtypes.
            for everything in (False, True) if dtype == "bf16" else (True,):
                signature = {}
                for argument in adamw_kernel.arg_names:
                    if argument.isupper():
                        signature[argument] = "constexpr"
                    elif argument == "n":
                        signature[argument] = "i64"
                    elif argument in tensors:
                        signature[argument] = f"*{dtype}"
                    else:
                        signature[argument] = "*fp32" if argument.endswith("_ptr") else "fp32"
                switches = ("MAXIMIZE", "HAS_LR_TENSOR", "HAS_SCALE", "HAS_FLAG")
                constants = {**dict.fromkeys(switches, everything), "ROUND_BY_BITS": False}
                constants["BLOCK"] = block_size(target[0])
                # What the launcher's specialization finds for tensors torch allocates.
                aligned = [i for i, a in enumerate(adamw_kernel.arg_names) if a in (*tensors, "n")]
                compiled = triton.compile(
                    ASTSource(
                        fn=adamw_kernel,
                        signature=signature,
                        constexprs=constants,
                        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
                    ),
                    target=GPUTarget(*target),
                    options={"num_warps": NUM_WARPS, "enable_fp_fusion": False},
                )
                ptx, ttir = compiled.asm["ptx"], compiled.asm["ttir"]
                results[f"{name}-{dtype}" + ("-everything" if everything else "")] = {
                    "wide_loads": len(re.findall(r"\bld\.global\.v4\.b32", ptx)),
                    "wide_stores": len(re.findall(r"\bst\.global\.v4\.b32", ptx)),
                    "loads": len(re.findall(r"\bld\.global", ptx)),
                    "stores": len(re.findall(r"\bst\.global", ptx)),
                    **resources(compiled.asm["cubin"]),
                    "fused": len(re.findall(r"\bfma\.", ptx)),
                    "approximate": len(re.findall(r"\.(?:approx|full)\b", ptx)),
                    "offsets": sorted(set(re.findall(r"tt\.addptr.*tensor<\d+x(i\d+)>", ttir))),
                    "block_start": sorted(set(re.findall(r"arith\.muli %offsets.* : (i\d+)", ttir))),
                }
    return results


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "compile": compile_all}[sys.argv[1]]()))
