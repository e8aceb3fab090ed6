"""OLMoE, Granite and any Hugging Face MoE, at a given size, through transformers' own classes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn

Size = Literal["tiny", "full"]

# Large enough in experts that the method's saving shows, small enough for two CPU cores.
_TINY_WIDTH = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 4096}
_TINY_TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


@dataclass(frozen=True)
class Preset:
    """An architecture at two sizes.

    Attributes:
        model_type: transformers' name of the architecture.
        hub_id: the checkpoint that ``full`` describes.
        full: the configuration of that checkpoint.
        tiny: what the tiny size changes: depth and width; the number of experts and top-k stay.
    """

    model_type: str
    hub_id: str
    full: dict[str, Any] = field(default_factory=dict)
    tiny: dict[str, Any] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "olmoe": Preset(
        model_type="olmoe",
        hub_id="allenai/OLMoE-1B-7B-0924",
        full={
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "vocab_size": 50304,
        },
        tiny={**_TINY_WIDTH, **_TINY_TOKENS, "num_hidden_layers": 6},
    ),
    "granite": Preset(
        model_type="granitemoe",
        hub_id="ibm-granite/granite-3.1-3b-a800m-base",
        full={
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "vocab_size": 49155,
            "tie_word_embeddings": True,
            "attention_multiplier": 1 / 64,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0},
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
        },
        tiny={
            **_TINY_WIDTH,
            **_TINY_TOKENS,
            "num_hidden_layers": 10,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "attention_multiplier": 1 / 32,
        },
    ),
}


def build_config(
    name: str,
    size: Size = "tiny",
    *,
    num_layers: int | None = None,
    model_id: str | None = None,
    trust_remote_code: bool = False,
    **overrides: Any,
) -> Any:
    """The transformers configuration of a model.

    Args:
        name: a name from `PRESETS`, or ``"hf"`` for the checkpoint or local folder ``model_id``.
        size: ``"full"`` is the published configuration; ``"tiny"`` has its depth and width reduced.
        num_layers: if given, the number of decoder layers.
        model_id: for ``name="hf"``: a hub id or a local folder with a ``config.json``.
        trust_remote_code: passed to transformers: whether code that lies beside the checkpoint may run.
        overrides: further configuration values.

    Raises:
        ValueError: for an unknown name or size, or ``"hf"`` without ``model_id``.
    """
    from transformers import AutoConfig

    if size not in get_args(Size):
        raise ValueError(f"size={size!r}: expected one of {', '.join(get_args(Size))}.")
    if num_layers is not None:
        if num_layers < 1:
            raise ValueError(f"num_layers={num_layers}: expected at least 1.")
        overrides["num_hidden_layers"] = num_layers
    if name == "hf":
        if not model_id:
            raise ValueError("model=hf needs model.id: a hub id such as 'org/name', or a folder with a config.json.")
        config = AutoConfig.from_pretrained(model_id, trust_remote_code=trust_remote_code)
        _check_overrides(config, overrides)
        return AutoConfig.from_pretrained(model_id, trust_remote_code=trust_remote_code, **overrides)
    if name not in PRESETS:
        raise ValueError(f"model={name!r} is not a model. Choose one of {', '.join(PRESETS)}, hf.")
    preset = PRESETS[name]
    _check_overrides(AutoConfig.for_model(preset.model_type), overrides)
    values = {**preset.full, **(preset.tiny if size == "tiny" else {}), **overrides}
    return AutoConfig.for_model(preset.model_type, **values)


def _check_overrides(config: Any, overrides: dict[str, Any]) -> None:
    # transformers takes any keyword and keeps it as an attribute that nothing reads.
    for key in overrides:
        if not hasattr(config, key):
            valid = sorted(name for name in vars(config) if not name.startswith("_"))
            close = difflib.get_close_matches(key, valid, n=3)
            raise ValueError(
                f"overrides: {type(config).__name__} has no value {key!r}. "
                + (f"Did you mean {' or '.join(close)}?" if close else f"It has {', '.join(valid)}.")
            )


def build(
    name: str,
    size: Size = "tiny",
    *,
    num_layers: int | None = None,
    pretrained: bool = False,
    model_id: str | None = None,
    backend: str = "grouped_mm",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    low_memory: bool = True,
    attn_implementation: str | None = None,
    checkpointing: bool = False,
    trust_remote_code: bool = False,
    **overrides: Any,
) -> nn.Module:
    """Build a causal language model with batched experts, ready to train.

    Args:
        name: a name from `PRESETS`, or ``"hf"`` with ``model_id``.
        size: ``"tiny"`` or ``"full"``; ``"hf"`` models have only their own size.
        num_layers: if given, the number of decoder layers.
        pretrained: load the checkpoint's weights; otherwise they are random.
        model_id: for ``"hf"``: a hub id or a local folder.
        backend: a name in transformers' experts dispatch; see `resolve_backend`.
        dtype: of the parameters.
        device: where random parameters are made, so that no copy exists elsewhere.
        low_memory: load a checkpoint's tensors straight to ``device`` one by one, never all of them on the CPU.
        attn_implementation: transformers' attention implementation; ``None`` is its own choice.
        checkpointing: activation checkpointing of the decoder layers, non-reentrant.
        trust_remote_code: whether code that lies beside the checkpoint may run.
        overrides: further configuration values.

    Returns:
        The module, in training mode. It keeps no key-value cache.

    Raises:
        ValueError: see `build_config`; also if weights are asked for at the tiny size, which has none.
        OSError: from transformers, if a checkpoint cannot be reached.
    """
    from transformers import AutoModelForCausalLM

    import lightning_sonar.backends  # noqa: F401  transformers must know the names of our backends

    config = build_config(
        name, size, num_layers=num_layers, model_id=model_id, trust_remote_code=trust_remote_code, **overrides
    )
    config.use_cache = False
    common: dict[str, Any] = {"dtype": dtype, "experts_implementation": backend, "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        common["attn_implementation"] = attn_implementation
    if pretrained:
        if name != "hf" and size == "tiny":
            raise ValueError("pretrained=True needs size='full': no checkpoint of the tiny size exists.")
        source = PRESETS[name].hub_id if model_id is None else model_id
        if low_memory and torch.device(device).type != "cpu":
            common["device_map"] = {"": torch.device(device)}
        model = AutoModelForCausalLM.from_pretrained(source, config=config, **common)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, **common)
    if checkpointing:
        # The reentrant kind runs a layer's backward as a backward of its own, and drops the router's auxiliary loss.
        options = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:  # transformers before the renaming
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model.train()


def count_parameters(config: Any, trust_remote_code: bool = False) -> tuple[int, int]:
    """Numbers of parameters (all, experts) that a configuration gives, without allocating any.

    Raises:
        ValueError: if the model has no batched expert tensors.
    """
    from transformers import AutoModelForCausalLM

    from lightning_sonar.experts import find_expert_tensors

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    experts = find_expert_tensors(model)
    return experts.total_numel, experts.numel
