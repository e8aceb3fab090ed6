"""Compiles the ScatterMoE kernels for GPUs this machine does not have, for test_scattermoe.py; prints JSON.

Runs in a process of its own, without TRITON_INTERPRET. `layouts` compiles, for one NVIDIA and one AMD GPU, OLMoE's
products once for each layout of the weight; `all` every product of a training step for every GPU, for OLMoE and
Granite, few and many tokens, fp32, and fp32 weights under autocast.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import Any

from extended_products import extended_products

from lightning_sonar.backends.scattermoe.offline import GRANITE, OLMOE, SHARED_BYTES, scattermoe_cases
from lightning_sonar.kernel_figures import TARGETS, KernelCase, Target, compile_case, measure

# What multiplies, in the words of each architecture's assembly.
TENSOR_CORES = {
    "sm_80": r"mma\.sync\.aligned\.m16n8k16\.\S*\.bf16",
    "sm_90": r"wgmma\.mma_async\S*\.bf16",
    "sm_100": r"tcgen05\.mma\.",
    "gfx942": r"v_mfma_f32_\S*bf16",
}
ALL = [
    (OLMOE, "bf16", "bf16"),
    (GRANITE, "bf16", "bf16"),
    (dataclasses.replace(OLMOE, name="few", tokens=16), "bf16", "bf16"),
    (dataclasses.replace(OLMOE, name="many", tokens=65536), "bf16", "bf16"),
    (OLMOE, "fp32", "fp32"),
    (OLMOE, "bf16", "fp32"),
]
LAYOUTS = ("up", "down_dx", "down_dw")


def look(case: KernelCase, target: Target) -> dict[str, Any]:
    figures = measure(case, target)
    asm = compile_case(case, target).asm
    code = asm["ptx" if target.backend == "cuda" else "amdgcn"]
    return {
        "registers": figures.registers,
        "spilled": figures.spilled + (figures.spilled_registers or 0),
        "shared": figures.shared,
        "shared_limit": SHARED_BYTES[target.name],
        "tensor_core": len(re.findall(TENSOR_CORES[target.name], code)),
        "any_tensor_core": len(re.findall(r"mma\.sync|wgmma\.mma|tcgen05\.mma|v_mfma", code)),
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], (?:0x10|16)\b", code)),
        "narrow_copies": len(re.findall(r"cp\.async\.ca\.shared\.global \[[^]]*\], \[[^]]*\], (?:0x4|4)\b", code)),
        # Sums of row numbers hold products, and there are fewer than 2**31 rows.
        "widened_late": extended_products(asm["ttir"], in_sums=False),
        "offsets": sorted(set(re.findall(r"tt\.addptr.*tensor<(?:\d+x)+(i\d+)>", asm["ttir"]))),
        "atomics": len(re.findall(r"atomic", asm["ttir"])),
        "tile": [case.constants.get(f"BLOCK_{name}") for name in "MNKABR"],
        "warps": case.num_warps,
        "stages": case.options["num_stages"],
    }


def main(scope: str) -> dict[str, Any]:
    everything = scope == "all"
    return {
        f"{target.name}-{shape.name}-{rows}-{weights}-{case.variant}": look(case, target)
        for shape, rows, weights in (ALL if everything else ALL[:1])
        for target in TARGETS
        for case in scattermoe_cases(target, shape, rows, weights)
        if everything or (case.variant in LAYOUTS and target.name in ("sm_90", "gfx942"))
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
