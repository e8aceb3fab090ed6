"""The AdamW kernel as cases for `kernel_figures`: what it costs on GPUs that need not be there."""

from __future__ import annotations

from lightning_sonar.kernel_figures import KernelCase, Target

__all__ = ["adamw_cases"]

_TENSORS = ("param_ptr", "grad_ptr", "exp_avg_ptr", "exp_avg_sq_ptr")
_INTEGERS = ("seed", "position", "base", "n")
_SWITCHES = ("MAXIMIZE", "HAS_LR_TENSOR", "HAS_SCALE", "HAS_FLAG", "HAS_SUM", "STOCHASTIC")

_VARIANTS = {
    "plain": {},
    "everything": {**dict.fromkeys(_SWITCHES, True), "STOCHASTIC": False},
    "stochastic": dict.fromkeys(_SWITCHES, True),
}


def adamw_cases(target: Target) -> list[KernelCase]:
    """bf16 and fp32; plain, with every switch on, and (bf16 only) with stochastic rounding besides.

    Needs Triton.
    """
    from lightning_sonar.optim.kernels import NUM_WARPS, adamw_kernel, block_size

    block = block_size(target.backend)
    cases = []
    for dtype in ("bf16", "fp32"):
        types: dict[str, str] = dict.fromkeys(_TENSORS, f"*{dtype}")
        for name in adamw_kernel.arg_names:
            if not name.isupper() and name not in types:
                types[name] = "i64" if name in _INTEGERS else "*fp32" if name.endswith("_ptr") else "fp32"
        for variant, switches in _VARIANTS.items():
            if variant == "stochastic" and dtype != "bf16":
                continue
            constants = {**dict.fromkeys(_SWITCHES, False), **switches}
            cases.append(
                KernelCase(
                    name="adamw",
                    variant=variant,
                    dtype=dtype,
                    kernel=adamw_kernel,
                    signature=types,
                    constants={**constants, "ALIGNED": True, "ROUND_BY_BITS": False, "BLOCK": block},
                    aligned=(*_TENSORS, "n"),
                    block=block,
                    num_warps=NUM_WARPS,
                    options={"enable_fp_fusion": False},
                )
            )
    return cases
