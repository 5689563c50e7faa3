"""One model of every lifetime of what layers keep, built with dummy weights as an engine builds it: planned and held."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bough.config.memory_plan import MemoryPlan
from bough.config.server_args import build_config
from bough.distributed.mesh import SINGLE
from bough.engine.build import load_model, make_runner, open_device
from bough.engine.decide import decide
from bough.engine.held import RankMemory, of_rank
from bough.platform import detect
from bough.runner.model_runner import ModelRunner

BASE: dict[str, Any] = {
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "head_dim": 64,
    "intermediate_size": 1408, "vocab_size": 4096, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
BY_TURNS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
LIFETIMES: dict[str, dict[str, Any]] = {
    "all tokens": {"architectures": ["Qwen3ForCausalLM"], **BASE},
    "windows": {"architectures": ["Gemma3ForCausalLM"], **BASE, "sliding_window": 512, "layer_types": BY_TURNS},
    "chunks": {
        "architectures": ["Llama4ForCausalLM"], **BASE, "attention_chunk_size": 512, "intermediate_size_mlp": 1408,
        "num_local_experts": 4, "num_experts_per_tok": 1, "no_rope_layer_interval": 3,
    },
    "KV of other layers": {
        "architectures": ["Gemma4ForCausalLM"], **BASE, "sliding_window": 512, "layer_types": BY_TURNS,
        "global_head_dim": 128, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 4096,
    },
    "several streams": {
        "architectures": ["Gemma3nForCausalLM"], **BASE, "sliding_window": 512, "layer_types": BY_TURNS,
        "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 4096,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "latents": {
        "architectures": ["DeepseekV2ForCausalLM"], **BASE, "num_key_value_heads": 8, "q_lora_rank": None,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "chosen latents": {
        "architectures": ["GlmMoeDsaForCausalLM"], **BASE, "num_key_value_heads": 8, "q_lora_rank": 128,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "index_n_heads": 4, "index_head_dim": 64, "index_topk": 512, "index_topk_pattern": "FSFSSF",
    },
    "states": {
        "architectures": ["Qwen3NextForCausalLM"], **BASE, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "full_attention_interval": 3,
    },
    "states beside KV": {
        "architectures": ["FalconH1ForCausalLM"], **BASE, "mamba_d_ssm": 768, "mamba_n_heads": 12, "mamba_d_state": 64,
    },
    "states alone": {
        "architectures": ["MambaForCausalLM"], **BASE, "hidden_size": 1024, "intermediate_size": 2048, "state_size": 16,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A runner, what was planned for it, what it holds, and what the allocator gave out (for weights, then the rest)."""

    plan: MemoryPlan
    held: RankMemory
    allocated: tuple[int, int]


def built(name: str, folder: Path, device: str, *, allocated: Callable[[], int], **settings: Any) -> Built:
    """`allocated`: bytes that are given out now."""
    (folder / "config.json").write_text(json.dumps(LIFETIMES[name]))
    config = build_config(model=str(folder), load_format="dummy", device=device, **settings)
    checkpoint, facts, pooling, resolved, _ = decide(config, detect(config.device.device))
    machine = open_device(resolved.config, 0)
    before = allocated()
    model = load_model(checkpoint, resolved.config, resolved.plan, machine, SINGLE, pooling)
    assert isinstance(model, torch.nn.Module)
    loaded = allocated()
    runner = make_runner(model, resolved.config, resolved.plan, machine, facts, pooling)
    assert isinstance(runner, ModelRunner)
    held = of_rank(0, model, runner.forward.pool, runner.states)
    return Built(resolved.plan, held, (loaded - before, allocated() - loaded))
