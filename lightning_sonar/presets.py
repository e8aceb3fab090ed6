"""The architectures that are known by name, as published and narrow enough for two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
