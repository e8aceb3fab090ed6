"""Which kernel multiplies tokens by experts: the choices, what each needs, and the best one that runs here.

transformers keeps the experts' forward behind one dispatch (``ALL_EXPERTS_FUNCTIONS``). A backend is a name in it,
so every model class behind the dispatch takes every backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_sonar.backends import scattermoe, sonicmoe


@dataclass(frozen=True)
class Backend:
    """One way to run the experts.

    Attributes:
        name: its name in transformers' experts dispatch.
        missing: given a device, what keeps the backend from running there, or ``None``.
        summary: a line for a person.
        automatic: whether ``auto`` may choose it.
    """

    name: str
    missing: Callable[[torch.device], str | None]
    summary: str
    automatic: bool = True


def _grouped_mm_missing(device: torch.device) -> str | None:
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch.nn.functional.grouped_mm, which came with torch 2.10 (this is {torch.__version__})"
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"a GPU of compute capability 8.0 or higher (this one has {major}.{minor})"
    return None


def _is_datacentre_blackwell(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 10


def _nothing_missing(device: torch.device) -> str | None:
    return None


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("grouped_mm", _grouped_mm_missing, "torch's grouped matrix product: tokens sorted by expert"),
        # By name only: on a CPU it is interpreted, which is for tests.
        Backend(scattermoe.NAME, scattermoe.missing, "own Triton kernels: gather and scatter while multiplying", False),
        # By name only: an extra's kernels, which can be installed and still not load.
        Backend(sonicmoe.NAME, sonicmoe.missing, "SonicMoE's kernels, for Hopper and Blackwell GPUs", False),
        Backend("batched_mm", _nothing_missing, "batched matrix product: gathers whole weights for every token"),
        Backend("eager", _nothing_missing, "a Python loop over the experts that have tokens"),
    )
}
"""All backends, best first."""


def resolve_backend(name: str, device: torch.device | str) -> str:
    """Turn ``"auto"`` into the best backend that runs on ``device``, and check any other choice.

    Returns:
        A name in transformers' experts dispatch.

    Raises:
        ValueError: for an unknown name.
        RuntimeError: if the backend cannot run here; the message names the requirement that is missing.
    """
    device = torch.device(device)
    asked = name
    if name == "auto":
        name = next(b.name for b in BACKENDS.values() if b.automatic and b.missing(device) is None)
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is not a backend. Choose one of auto, {', '.join(BACKENDS)}.")
    missing = BACKENDS[name].missing(device)
    if missing is not None:
        runs = [other.name for other in BACKENDS.values() if other.missing(device) is None]
        raise RuntimeError(
            f"backend={name!r} cannot run on {device}: it needs {missing}. These run here: {', '.join(runs)}."
        )
    if name == "grouped_mm" and _is_datacentre_blackwell(device):
        warnings.warn(
            "backend='grouped_mm' on a Blackwell GPU of compute capability 10: pytorch issue 172439 reports gradients "
            "that are not zero for experts without tokens. python experiments/gpu_check.py --parts 2 shows whether "
            "your torch is affected; backend='scattermoe' is not.",
            stacklevel=2,
        )
    if asked == "batched_mm":
        warnings.warn(
            "backend='batched_mm' gathers a copy of an expert's whole weight for every token and expert pair: at "
            "training batch sizes that is far more memory than the weights. It is meant for decoding; use "
            "backend='grouped_mm'.",
            stacklevel=2,
        )
    return name
