"""The small shapes of the Mixture-of-Experts families that `experiments/families.py` trains.

transformers names one and the same size differently from family to family, and checks that sizes fit together. So a
small model is the general sizes below, as far as a family's configuration has them, and the family's own on top.
"""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}

_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
_ALL_SPARSE = {"first_k_dense_replace": 0}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_INKLING = {
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "rel_extent": 16,
    "d_rel": 4,
    "unpadded_vocab_size": 64,
}

PATTERNS: dict[str, str] = {
    # All experts of a layer lie one below the other in two dimensions, [E * I, H].
    "dbrx": r"experts\.mlp\.(w1|v1|w2)$",
    # An expert is one row of two embeddings, [E, H].
    "doge": r"\.(up|down)_embed\.weight$",
}
"""What to pass as ``experts`` for families whose expert tensors the structural rule cannot see."""

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 0},
    "aria_text": {},
    "axk1": {**_SPARSE, "head_dim": 8},
    "axk2": {**_SPARSE, "head_dim": 8},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"], **_SPARSE, "head_dim": 8},
    "beam": _SPARSE,
    "cohere2_moe": {},
    "dbrx": {
        "d_model": 32,
        "n_heads": 2,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _ALL_SPARSE,
    "deepseek_v3": {**_ALL_SPARSE, "head_dim": 8},
    "deepseek_v32": _SPARSE,
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"], "o_groups": 1, "o_lora_rank": 8},
    "doge": {"is_moe": True},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {**_SPARSE},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    "exaone_moe": _SPARSE,
    "flex_olmo": {},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "per_layer_config": {},
    },
    "glm4_moe": _ALL_SPARSE,
    "glm4_moe_lite": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {
        **_LINEAR_THEN_FULL,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "shared_intermediate_size": 16,
    },
    "granitemoeshared": {"shared_intermediate_size": 16},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "hy_v3": _SPARSE,
    "hy_v4": _SPARSE,
    "inkling2_loop_text": {
        **_INKLING,
        "num_hidden_layers": 3,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_gate_rank": 4,
    },
    "inkling2_text": _INKLING,
    "inkling_text": {**_INKLING, **_SPARSE},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "jetmoe": {"kv_channels": 16, "num_key_value_heads": 1},
    "kimi_linear": {**_LINEAR_THEN_FULL, **_SPARSE, "head_dim": 8},
    "kolibri1": {},
    "laguna": _SPARSE,
    "lara_mini": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "llama4_text": {"intermediate_size_mlp": 32, "num_experts_per_tok": 1},
    "longcat_flash": {
        "moe_topk": 2,
        "zero_expert_num": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "head_dim": 8,
    },
    "mellum": {},
    "mimo_v2_flash": {**_SPARSE, "head_dim": 24, "num_attention_heads": 4},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {**_SPARSE, "dense_intermediate_size": 32, "shared_intermediate_size": 16, "rotary_dim": 16},
    "mixtral": {},
    "nemotron_h": {
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": _LINEAR_THEN_FULL,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR_THEN_FULL,
    "qwen4_exp_text": {"hc_lowrank": 8, "ple_embed_dim": 32},
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""Every family by its ``model_type``, with what its small shape needs beside `SIZES`."""
