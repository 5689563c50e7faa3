"""Families beyond `tiny.CASES`: tiny configs with what each has that others have not, and one check for all of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import torch
from dense_attention import DenseAttention
from in_process import GREEDY, InProcess, Setup
from tiny import SIZES, make_tiny

from bough.config.hf import open_checkpoint
from bough.layers.batch import Model
from bough.models.load import build_model
from bough.models.registry import facts_of

logging.getLogger("transformers").setLevel(logging.ERROR)
COMMON = [(7 * i + 3) % 120 + 3 for i in range(29)]
PROMPTS = [[*COMMON, 5, 17, 99], [*COMMON, 88, 61, 62]]
"""Of one length, so that transformers computes them in one batch without padding."""
IN_SEVENS = Setup(chunk_tokens=7, page_size=4, context_length=128)
SHORT = msgspec.structs.replace(GREEDY, max_new_tokens=16)
"""Of answers from the prefix cache, whose tokens are known by then."""
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
WIDE = {"hidden_size": 64}
"""Heads of 16."""
BIASES = {"attention_bias": True, "mlp_bias": True}

# case -> (class prefix, config beyond `tiny.SIZES`)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
            **BIASES,
        },
    ),
    "granite_swa": (
        "GraniteSWA",
        {
            **WINDOWS,
            "attention_multiplier": 0.2,
            "layer_rope_theta": [10000.0, 0.0, 500.0, 10000.0],
            "tie_word_embeddings": False,
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, **BIASES},
    ),
    "hyperclovax-pre-norm": ("HyperCLOVAX", {"use_post_norm": False, "residual_multiplier": 0.6}),
    "olmo": ("Olmo", {"clip_qkv": 0.8}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            **WINDOWS,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 500000.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "cohere": ("Cohere", {}),
    "cohere-qk-norm": ("Cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**WINDOWS, "logit_scale": 0.5}),
    "stablelm": ("StableLm", {**WIDE, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {**WIDE, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "phi": ("Phi", {}),
    "phi-qk-norm": ("Phi", {"qk_layernorm": True}),
    "nemotron": ("Nemotron", {"head_dim": 16, "rope_parameters": HALF}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "exaone4": ("Exaone4", WINDOWS),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "arcee": ("Arcee", {}),
    "apertus": ("Apertus", {}),
    "ministral": ("Ministral", {"head_dim": 16, **WINDOWS}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "helium": ("Helium", {"head_dim": 12}),
    "cwm": ("Cwm", {**WINDOWS, "head_dim": 16}),
    "jais2": ("Jais2", {}),
    "nanochat": ("NanoChat", {}),
    "persimmon": ("Persimmon", {"num_key_value_heads": 4}),
    "vaultgemma": ("VaultGemma", {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24}),
}

V3_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
SOME_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4Moe", {**V3_EXPERTS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-groups": ("Glm4Moe", {**V3_EXPERTS, "head_dim": 16, "n_group": 4, "topk_group": 2}),
    "dots1": ("Dots1", {**V3_EXPERTS, "head_dim": 16, "norm_topk_prob": False, **WINDOWS}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40},
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 6, "moe_topk": 2}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.8}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3}),
    "granite_moe": (
        "GraniteMoe",
        {**LOCAL_EXPERTS, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5},
    ),
    "granite_moe-shared": ("GraniteMoeShared", {**LOCAL_EXPERTS, "shared_intermediate_size": 56}),
    "granite_moe_swa": (
        "GraniteMoeSWA",
        {**LOCAL_EXPERTS, **WINDOWS, "shared_intermediate_size": 56, "attention_multiplier": 0.2},
    ),
    "mellum": (
        "Mellum",
        {
            **SOME_EXPERTS,
            **WINDOWS,
            "head_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 500000.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "minimax_m2": ("MiniMaxM2", {**LOCAL_EXPERTS, "head_dim": 16, "rotary_dim": 8}),
    "phimoe": ("Phimoe", {**LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3}),
    "gpt_oss": (
        "GptOss",
        {
            **LOCAL_EXPERTS,
            **WINDOWS,
            "head_dim": 16,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "head_dim": 16,
            "intermediate_size_mlp": 72,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "floor_scale": 8,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            **SOME_EXPERTS,
            **WINDOWS,
            "head_dim": 16,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "mup_enabled": True,
            "route_scale": 1.5,
        },
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        {**WINDOWS, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "num_shared_experts": 2},
    ),
    "cohere2_moe-dense-first": (
        "Cohere2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 56,
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
        },
    ),
    "exaone_moe": ("ExaoneMoe", {**SOME_EXPERTS, **WINDOWS}),
    "hy_v3": ("HYV3", {**SOME_EXPERTS, "head_dim": 16}),
    "laguna": (
        "Laguna",
        {
            **SOME_EXPERTS,
            **WINDOWS,
            "head_dim": 16,
            "shared_expert_intermediate_size": 56,
            "num_attention_heads_per_layer": [4, 6, 4, 6],
            "moe_router_logit_softcapping": 2.0,
            "moe_routed_scaling_factor": 1.5,
        },
    ),
    "laguna-gates": (
        "Laguna",
        {**SOME_EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 56, "gating": "per-element"},
    ),
    "mimo_v2": (
        "MiMoV2Flash",
        {**SOME_EXPERTS, **WINDOWS, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 6, "attention_bias": True},
    ),
    "solar_open": ("SolarOpen", {**V3_EXPERTS, "head_dim": 16}),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 4,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 2},
        },
    ),
}

ALONE = {"num_key_value_heads": 4}
"""Every head has its own key."""
GPT2_SIZES = {**ALONE, "n_embd": 48, "n_head": 4, "n_layer": 4, "n_positions": 256}
SLOPES = {"alibi": True, "attn_implementation": "sdpa"}
"""Not "eager", which adds the slopes twice."""
EARLIER: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2_SIZES),
    "gpt_bigcode": ("GPTBigCode", {**GPT2_SIZES, "num_key_value_heads": 1}),
    "gptj": ("GPTJ", {**GPT2_SIZES, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoX", {**ALONE, "rope_parameters": HALF}),
    "gpt_neox-serial": (
        "GPTNeoX",
        {**ALONE, "rope_parameters": HALF, "use_parallel_residual": False, "attention_bias": False},
    ),
    "bloom": ("Bloom", ALONE),
    "bloom-six-heads": ("Bloom", {"num_key_value_heads": 6, "num_attention_heads": 6}),
    "falcon": ("Falcon", {}),
    "falcon-groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-one-norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-slopes": ("Falcon", {**SLOPES, "multi_query": False, "parallel_attn": False, "bias": True}),
    "opt": ("OPT", {**ALONE, "ffn_dim": 80}),
    "opt-after": ("OPT", {**ALONE, "ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "gpt_neo": (
        "GPTNeo",
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9},
    ),
    "codegen": ("CodeGen", {**GPT2_SIZES, "rotary_dim": 8}),
    "mpt": ("Mpt", {**ALONE, "d_model": 48, "n_heads": 4, "n_layers": 4, "max_seq_len": 256}),
}

LATENT_SIZES = {
    **ALONE,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 9}
"""Enough heads that hardly any token has a score of 0: of equal ones torch takes any."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
    "original_max_position_embeddings": 64,
}
V2_EXPERTS = {**V3_EXPERTS, "norm_topk_prob": False}
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2",
        {
            **V2_EXPERTS,
            **LATENT_SIZES,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v2-lite": ("DeepseekV2", {**V2_EXPERTS, **LATENT_SIZES, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        {**V3_EXPERTS, **LATENT_SIZES, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **V3_EXPERTS,
            **LATENT_SIZES,
            **INDEXER,
            "index_topk": 256,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v32-chosen": ("DeepseekV32", {**V3_EXPERTS, **LATENT_SIZES, **INDEXER, "n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {**V3_EXPERTS, **LATENT_SIZES, **INDEXER, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**V3_EXPERTS, **LATENT_SIZES, "attention_bias": True}),
    "youtu": ("Youtu", LATENT_SIZES),
    "axk1": ("AXK1", {**V3_EXPERTS, **LATENT_SIZES, "n_group": 4, "topk_group": 2}),
    "mistral4": (
        "Mistral4",
        {
            **V3_EXPERTS,
            **LATENT_SIZES,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1},
        },
    ),
    "minicpm3": ("MiniCPM3", {**LATENT_SIZES, "scale_emb": 2.0, "scale_depth": 1.4, "dim_model_base": 24}),
}

BY_TURNS = ["sliding_attention", "full_attention"]
OWN_INPUTS = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 120,
    "sliding_window": 9,
    "tie_word_embeddings": False,
}
GEMMA4 = {
    **OWN_INPUTS,
    "vocab_size_per_layer_input": 131,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [*BY_TURNS, *BY_TURNS],
}
SHARED_KV: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "Gemma3n",
        {
            **OWN_INPUTS,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "layer_types": [*BY_TURNS, *BY_TURNS, *BY_TURNS],
            "num_kv_shared_layers": 3,
            "laurel_rank": 8,
            "intermediate_size": [80, 80, 80, 64, 64, 64],
            "activation_sparsity_pattern": [0.9, 0.8, 0.0, 0.0, 0.7, 0.0],
        },
    ),
    "gemma3n-three-streams": (
        "Gemma3n",
        {
            **OWN_INPUTS,
            "head_dim": 16,
            "layer_types": [*BY_TURNS, *BY_TURNS],
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
        },
    ),
    "gemma4": ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4-keys-are-values": (
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 20.0,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4-experts": (
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
}

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
GATED_SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
MAMBA2 = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
GRANITE4 = {
    **MAMBA2,
    "mamba_n_groups": 1,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "shared_intermediate_size": 56,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
FALCON_H1 = {
    **MAMBA2,
    "mamba_d_ssm": 60,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.9, 0.6],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 1.5,
}
PURE_MAMBA2 = {"state_size": 8, "num_heads": 6, "head_dim": 16, "chunk_size": 16}
NEMOTRON_H = {
    "time_step_min": 1e-9,
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
}
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
TWO_OF_SIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
KIMI_LINEAR = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 40,
    "num_expert_group": 4,
    "topk_group": 2,
}
MINIMAX = {
    **LOCAL_EXPERTS,
    "block_size": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.2,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.9,
}
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {**MAMBA2, "attn_layer_indices": [1], **BIASES}),
    "bamba-limits": (
        "Bamba",
        {**MAMBA2, "attn_layer_indices": [3], "mamba_proj_bias": True, "time_step_limit": [0.3, 0.9]},
    ),
    "falcon_h1": ("FalconH1", FALCON_H1),
    "falcon_h1-norm": (
        "FalconH1",
        {**FALCON_H1, **BIASES, "attention_in_multiplier": 1.0, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "use_bias": True}),
    "jamba": ("Jamba", {"mamba_d_state": 8, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 4}),
    "jamba-dense": ("Jamba", {"attn_layer_period": 3, "attn_layer_offset": 2, "num_experts": 1}),
    "kimi_linear": ("KimiLinear", KIMI_LINEAR),
    "lfm2": ("Lfm2", {**LFM2, "block_multiple_of": 16, "conv_bias": True, "tie_word_embeddings": False}),
    "lfm2_moe": ("Lfm2Moe", {**LFM2, **TWO_OF_SIX, "num_dense_layers": 1, "routed_scaling_factor": 1.7}),
    "lfm2_moe-plain": ("Lfm2Moe", {**LFM2, **TWO_OF_SIX, "use_expert_bias": False, "norm_topk_prob": False}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba-untied": ("Mamba", {"time_step_rank": 5, "use_bias": True, "tie_word_embeddings": False}),
    "mamba2": ("Mamba2", {**PURE_MAMBA2, "n_groups": 1}),
    "mamba2-bias": ("Mamba2", {**PURE_MAMBA2, "n_groups": 2, "use_bias": True, "use_conv_bias": False}),
    "minimax": ("MiniMax", MINIMAX),
    "nemotron_h-moe": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "hybrid_override_pattern": "MEM*E-",
            "n_routed_experts": 6,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "routed_scaling_factor": 1.7,
        },
    ),
    "nemotron_h": ("NemotronH", {**NEMOTRON_H, "hybrid_override_pattern": "M-M*-M"}),
    "granite4": ("GraniteMoeHybrid", {**GRANITE4, **LOCAL_EXPERTS}),
    "granite4-dense": ("GraniteMoeHybrid", {**GRANITE4, "num_local_experts": 0, "position_embedding_type": "rope"}),
    "qwen3_next": ("Qwen3Next", {**DELTA, **GATED_SHARED}),
    "qwen3_next-dense": ("Qwen3Next", {**DELTA, **GATED_SHARED, "mlp_only_layers": [0, 2]}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **GATED_SHARED}),
}


def check_family(prefix: str, extra: dict[str, Any], folder: Path, *, cached: int = len(COMMON)) -> None:
    """Logits are transformers' to 1e-4. So are 64 greedy tokens through the engine, with prompts cut into chunks, rows
    that join while others decode, and once more from the prefix cache, which has the first `cached`
    tokens at least. Raises AssertionError."""
    reference = make_tiny(prefix, folder, **extra)
    checkpoint = open_checkpoint(str(folder))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    assert isinstance(model, torch.nn.Module)
    held = sum(parameter.numel() for parameter in model.parameters())
    counted = facts_of(checkpoint.config).num_parameters()
    assert abs(held - counted) <= 0.002 * held, "memory is planned by this"
    check_answers(reference, model, cached)


def check_answers(reference: Any, model: Model, cached: int = len(COMMON)) -> None:
    """Logits and greedy tokens of a model are its reference's; see `check_family`. Raises AssertionError."""
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPTS[0]])).logits[0]
        actual = model.logits(model.forward(DenseAttention(1).step([(0, PROMPTS[0])], all_logits=True)))
    assert (actual - expected).abs().max() <= 1e-4
    assert expected.std() > 0.1, "logits too flat to tell models apart"

    engine = InProcess(model, SIZES["vocab_size"], IN_SEVENS)
    answers = engine.generate(PROMPTS)
    assert answers == greedy(reference, PROMPTS, answers)
    again = engine.finish([engine.submit(prompt, SHORT) for prompt in PROMPTS[::-1]])
    assert [answer.tokens for answer in again] == [answer[: SHORT.max_new_tokens] for answer in answers[::-1]]
    assert all(answer.end is not None and answer.end.cached_tokens >= cached for answer in again)


def greedy(reference: Any, prompts: list[list[int]], guesses: list[list[int]]) -> list[list[int]]:
    """What transformers answers, 64 tokens to each of some prompts of one length. One pass over guesses shows whether they
    are that, token by token; generating takes 64 passes."""
    length = len(prompts[0])
    whole = [[*prompt, *guess] for prompt, guess in zip(prompts, guesses, strict=True)]
    if {len(each) for each in whole} == {length + 64}:
        with torch.no_grad():
            logits = reference(torch.tensor(whole)).logits[:, length - 1 : -1]
        if logits.argmax(-1).tolist() == guesses:
            return guesses
    answers: list[list[int]] = reference.generate(
        torch.tensor(prompts), attention_mask=torch.ones(len(prompts), length), max_new_tokens=64, min_new_tokens=64,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )[:, length:].tolist()  # fmt: skip
    return answers
