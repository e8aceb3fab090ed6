"""SonicMoE in transformers' experts dispatch, under the name ``"sonicmoe"``: an adapter, no kernel of our own.

Two things bring the kernels: the package ``sonic-moe``, and transformers' own route, which loads the same kernels
through the package ``kernels``. The package comes first where everything it declares is met.

Source: Guo et al., "SonicMoE: Accelerating MoE with IO and Tile-aware Optimizations" (arXiv 2512.14080).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["NAME", "missing", "register", "sonicmoe_experts_forward"]

NAME = "sonicmoe"
_PACKAGE = "sonic-moe"
# What its releases up to this one declare, for a machine where none is installed that could be asked.
_KNOWN = "0.1.2.post1"
_KNOWN_PYTHON, _KNOWN_TORCH = SpecifierSet(">=3.12"), Requirement("torch>=2.7.1,<=2.9.1")
_DTYPES = (torch.bfloat16, torch.float16)
# What the kernels' epilogue computes, by the class of the module's activation. Their GELU is the tanh approximation,
# so the exact one is not here.
_ACTIVATIONS = {
    "SiLU": "SWIGLU",
    "SiLUActivation": "SWIGLU",
    "GELUTanh": "GEGLU",
    "NewGELUActivation": "GEGLU",
    "FastGELUActivation": "GEGLU",
}
# The engine runs the ready node with the highest number first; only leaves rank higher than this.
_FIRST = 2**62


@dataclass(frozen=True)
class _Kernels:
    """One way to the kernels.

    Attributes:
        call: ``moe_general_routing_inputs``.
        activations: its enumeration of activations.
        hub: whether it came by transformers' route, which takes more than the package does.
    """

    call: Callable[..., tuple[Tensor, Tensor]]
    activations: Any
    hub: bool = False


def missing(device: torch.device) -> str | None:
    """What keeps SonicMoE from running on ``device``, or ``None``: the GPU, and packages, Python or torch."""
    gpu = _gpu_missing(device)
    package = _package_missing()
    lacks = [] if gpu is None else [gpu]
    if package is not None:
        hub = _hub_missing(with_gpu=gpu is None)
        if hub is not None:
            lacks.append(f"{package}, or, for transformers' own route to the kernels, {hub}")
    return "; and ".join(lacks) or None


def register() -> None:
    """Put the adapter in the place of transformers' own function, which it falls back to. Again is harmless."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, sonicmoe_experts_forward)


@torch.compiler.disable(reason="the kernels are launched from Python")
def sonicmoe_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' forward for `ALL_EXPERTS_FUNCTIONS`; weights go in as views of transformers' layout.

    Args:
        self: an experts module of transformers, gated, bf16 (or fp16).
        hidden_states: ``[T, H]``.
        top_k_index: experts of each token, ``[T, k]``.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: for experts that the kernels would compute wrongly or not at all, named.
        RuntimeError: where the kernels do not run; the message names what is missing.
    """
    kernels = _load(hidden_states.device)
    activation = _check(self, kernels)
    dtype = self.gate_up_proj.dtype
    tokens, top_k = top_k_index.shape
    # Sorted by token, which the kernels count on; int32 is what they read.
    token_indices = torch.arange(tokens, device=hidden_states.device, dtype=torch.int32).repeat_interleave(top_k)
    scores = top_k_weights.reshape(-1)
    out, _ = kernels.call(
        hidden_states.to(dtype),
        scores.to(dtype) if kernels.hub else scores,
        token_indices,
        top_k_index.reshape(-1).to(torch.int32),
        _view(self.gate_up_proj, self.is_transposed),  # [2I, H, E]
        self.gate_up_proj_bias if self.has_bias else None,
        _view(self.down_proj, self.is_transposed),  # [H, I, E]
        self.down_proj_bias if self.has_bias else None,
        E=self.num_experts,
        stream_id=_stream(hidden_states.device),
        activation_type=getattr(kernels.activations, activation),
        is_inference_mode_enabled=not torch.is_grad_enabled(),
        concat_layout=self.is_concatenated,
    )
    return out.to(hidden_states.dtype)


def _view(weight: Tensor, transposed: bool) -> Tensor:
    """``[2I or H, H or I, E]``; its gradient is handed on to the weight as soon as it is there.

    Both views exist before the first product runs, so backward would come to the second one's node only after the
    first product's backward, and the gradients of both weights would be alive together.
    """
    view = weight.permute(2, 1, 0) if transposed else weight.permute(1, 2, 0)
    set_number = getattr(view.grad_fn, "_set_sequence_nr", None)
    if set_number is not None:
        set_number(_FIRST)
    return view


def _stream(device: torch.device) -> int:
    # Releases that read it want the raw stream; later ones take it and do not look.
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


# Which experts.


def _refuse(module: nn.Module, found: str, remedy: str = "backend='grouped_mm'") -> ValueError:
    return ValueError(f"backend='{NAME}' cannot run {type(module).__name__}: {found}. Use {remedy} instead.")


def _check(module: Any, kernels: _Kernels) -> str:
    """The name of the activation, or ValueError."""
    from transformers.integrations.moe import _default_apply_gate

    if not module.has_gate:
        raise _refuse(module, "its experts have no gate")
    if getattr(module, "has_post_expert_norm", False):
        raise _refuse(module, "its experts have a norm of their own after down_proj (has_post_expert_norm)")
    if type(module)._apply_gate is not _default_apply_gate:
        raise _refuse(module, "its gate is its own (_apply_gate), and the kernels would compute the ordinary one")
    activation = _ACTIVATIONS.get(type(module.act_fn).__name__)
    if activation is None:
        raise _refuse(
            module,
            f"its activation is {type(module.act_fn).__name__}; the kernels have SiLU and the tanh form of GELU",
        )
    if module.is_transposed and not kernels.hub:
        raise _refuse(module, f"its weights are stored transposed, and {_PACKAGE} takes [E, 2I, H] and [E, H, I]")
    if getattr(module, "_is_expert_parallel", False) and not kernels.hub:
        raise _refuse(module, f"it is split over ranks (expert parallel), and {_PACKAGE} counts only its own experts")
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name)
        if isinstance(weight, DTensor):
            raise _refuse(module, f"{name} is a DTensor with placements {weight.placements}, not a whole local tensor")
        if weight.dtype not in _DTYPES:
            raise _refuse(
                module, f"{name} is {weight.dtype}, expected torch.bfloat16", "precision='bf16-true' or another backend"
            )
        if weight.shape[0] != module.num_experts:
            raise _refuse(module, f"num_experts is {module.num_experts}, and {name} has {weight.shape[0]}")
    return activation


# Which kernels.


@functools.cache
def _load(device: torch.device) -> _Kernels:
    reason = missing(device)
    if reason is not None:
        raise RuntimeError(f"backend='{NAME}' cannot run on {device}: it needs {reason}.")
    if _package_missing() is None:
        package: Any = importlib.import_module("sonicmoe")
        enums: Any = importlib.import_module("sonicmoe.enums")
        call = _checked(package.moe_general_routing_inputs, _PACKAGE)
        return _Kernels(call, enums.ActivationType)
    found = _hub_loader()()
    call = _checked(found.moe_general_routing_inputs, "transformers' route")
    # As transformers calls it: layouts, sentinels of other ranks and the dtype of scores are its kernels' own.
    return _Kernels(call, found.activation_type_enum, hub=True)


def _hub_loader() -> Any:
    from transformers.integrations import sonicmoe as theirs

    # Public in later releases, where the old name stayed and returns nothing.
    return getattr(theirs, "load_sonicmoe_kernel", None) or getattr(theirs, "_load_sonicmoe_kernel", None)


def _checked(call: Callable[..., Any], source: str) -> Callable[..., Any]:
    """The call, if it takes what the adapter passes by name."""
    known = inspect.signature(call).parameters
    wanted = ("E", "stream_id", "activation_type", "is_inference_mode_enabled", "concat_layout")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise RuntimeError(
            f"backend='{NAME}': moe_general_routing_inputs of {source} has no argument {', '.join(unknown)} (it has "
            f"{', '.join(known)}). The adapter was written for sonic-moe 0.1.2; install that or a later release."
        )
    return call


def _gpu_missing(device: torch.device) -> str | None:
    wanted = "an NVIDIA Hopper or Blackwell GPU (compute capability 9.0 or higher"
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return f"{wanted}; asked for {device.type}{' of AMD' if torch.version.hip else ''})"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 9 else f"{wanted}; this one has {major}.{minor})"


def _package_missing() -> str | None:
    """What the package sonic-moe lacks, as it declares it itself."""
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        unmet = [lack for lack in (_python_missing(_KNOWN_PYTHON), _requirement_missing(_KNOWN_TORCH)) if lack]
        if not unmet:
            return f"the package {_PACKAGE} (pip install {_PACKAGE})"
        # pip refuses it here, so its command would not help.
        return f"the package {_PACKAGE}, which up to {_KNOWN} wants {' and '.join(unmet)}"
    lacks = [_python_missing(SpecifierSet(package.metadata.json.get("requires_python", "")))]
    for line in package.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            lacks.append(_requirement_missing(requirement))
    named = [lack for lack in lacks if lack is not None]
    return f"what {_PACKAGE} {package.version} declares: {', '.join(named)}" if named else None


def _python_missing(wanted: SpecifierSet) -> str | None:
    found = platform.python_version()
    return None if wanted.contains(found, prereleases=True) else f"Python {wanted} (this is {found})"


def _requirement_missing(requirement: Requirement) -> str | None:
    try:
        # torch's own word: its version names the build too.
        found = torch.__version__ if requirement.name == "torch" else metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement} (not installed)"
    if requirement.specifier.contains(Version(str(found)), prereleases=True):
        return None
    return f"{requirement.name} {requirement.specifier} (this is {found})"


def _hub_missing(with_gpu: bool) -> str | None:
    """What transformers' own route lacks. Its own probe looks at the GPU first, so it is asked only where one is."""
    from transformers.integrations import sonicmoe as theirs
    from transformers.utils.import_utils import is_kernels_available

    install = 'pip install "lightning-sonar[sonicmoe]"'
    if _hub_loader() is None:
        return "a transformers whose integrations.sonicmoe has load_sonicmoe_kernel"
    if not is_kernels_available():
        return f"the package kernels ({install})"
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"the package {name} ({install})"
    probe = getattr(theirs, "is_sonicmoe_loadable", None)
    if with_gpu and probe is not None:
        try:
            probe(raise_error=True)
        except ImportError as error:
            return f"this: {error}"
    return None
