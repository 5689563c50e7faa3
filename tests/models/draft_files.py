"""Draft checkpoints with random weights, in the layouts in which they are published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import SIZES
from torch import Tensor
from transformers import PreTrainedModel

State = dict[str, Tensor]
HEAD: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "vocab_size": SIZES["vocab_size"],
}


def save(folder: Path, config: dict[str, Any], state: State) -> State:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return state


def matrix(*shape: int, scale: float = 0.2) -> Tensor:
    return torch.randn(*shape) * scale


def norm(width: int) -> Tensor:
    return 1.0 + 0.3 * torch.randn(width)


def block(name: str, config: dict[str, Any], *, in_dim: int | None = None, bias: bool = False) -> State:
    """A block of Llama's shape under `name`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * width
    reads = in_dim or hidden
    made = {
        f"{name}.self_attn.q_proj.weight": matrix(hidden, reads),
        f"{name}.self_attn.k_proj.weight": matrix(kv, reads),
        f"{name}.self_attn.v_proj.weight": matrix(kv, reads),
        f"{name}.self_attn.o_proj.weight": matrix(hidden, hidden),
        f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
        f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
        f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        f"{name}.input_layernorm.weight": norm(hidden),
        f"{name}.post_attention_layernorm.weight": norm(hidden),
    }
    if bias:
        made |= {
            f"{name}.self_attn.{part}_proj.bias": matrix(rows) for part, rows in (("q", hidden), ("k", kv), ("v", kv))
        }
    return made


def eagle3(folder: Path, *, speculators: bool = False, draft_vocab: int | None = 61, **flags: Any) -> State:
    """As EAGLE and SpecForge store it; with `speculators` as vLLM does. `flags`: of the config."""
    torch.manual_seed(5)
    config = {**HEAD, "num_hidden_layers": flags.pop("num_hidden_layers", 1)}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    prefix = "layers.0" if speculators else "midlayer"
    state = {"fc.weight": matrix(hidden, 3 * hidden), "norm.weight": norm(hidden)}
    state |= block(prefix, config, in_dim=2 * hidden)
    state[f"{prefix}.hidden_norm.weight"] = norm(hidden)
    for layer in range(1, config["num_hidden_layers"]):
        state |= block(f"layers.{layer}", config)
    if flags.get("fc_norm"):
        state |= {f"fc_norm.{place}.weight": norm(hidden) for place in range(3)}
    if flags.get("norm_before_fc"):
        state["input_norm.weight"] = norm(3 * hidden)
    if draft_vocab is not None:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        state["lm_head.weight"] = matrix(draft_vocab, hidden, scale=0.5)
        state["d2t"] = chosen - torch.arange(draft_vocab)
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    if speculators:
        written = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": draft_vocab,
            "transformer_layer_config": {"model_type": "llama", **config},
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
            **flags,
        }
    else:
        written = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab, **config, **flags}
    return save(folder, written, state)


def eagle(folder: Path, *, input_norm: bool = False, bias: bool = True) -> State:
    """EAGLE's own layout: no norm before the first attention, none at the end, no head."""
    torch.manual_seed(6)
    hidden = HEAD["hidden_size"]
    state = {"fc.weight": matrix(hidden, 2 * hidden), **block("layers.0", HEAD, bias=input_norm)}
    if bias:
        state["fc.bias"] = matrix(hidden)
    if not input_norm:
        del state["layers.0.input_layernorm.weight"]
    state["embed_tokens.weight"] = matrix(HEAD["vocab_size"], hidden)
    return save(folder, {"architectures": ["LlamaForCausalLMEagle"], **HEAD}, state)


def medusa(folder: Path, *, num_heads: int = 3, own: bool = True, vllm: bool = False) -> State:
    """Medusa's layout, or vLLM's; without `own` matrices over the vocabulary, the target's head is used."""
    torch.manual_seed(7)
    hidden, vocab = HEAD["hidden_size"], HEAD["vocab_size"]
    state: State = {}
    for head in range(num_heads):
        name = f"blocks.{head}.layers.0" if vllm else f"medusa_head.{head}.0.linear"
        state |= {f"{name}.weight": matrix(hidden, hidden), f"{name}.bias": matrix(hidden)}
        if own:
            state[f"lm_heads.{head}.weight" if vllm else f"medusa_head.{head}.1.weight"] = matrix(vocab, hidden)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": 1, "hidden_size": hidden, "vocab_size": vocab}
    return save(folder, config, state)


def dflash(folder: Path, *, layers: int = 2, block_size: int = 4) -> State:
    torch.manual_seed(8)
    hidden, width = HEAD["hidden_size"], HEAD["hidden_size"] // HEAD["num_attention_heads"]
    config = {**HEAD, "num_hidden_layers": layers}
    state = {"fc.weight": matrix(hidden, 3 * hidden), "hidden_norm.weight": norm(hidden), "norm.weight": norm(hidden)}
    for layer in range(layers):
        state |= block(f"layers.{layer}", config)
        state |= {f"layers.{layer}.self_attn.{part}_norm.weight": norm(width) for part in ("q", "k")}
    written = {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 130, "target_layer_ids": [0, 1, 3]},
        **config,
    }
    return save(folder, written, state)


_NEXTN = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}


def nextn(folder: Path, model: PreTrainedModel, *, kind: str = "deepseek") -> State:
    """Takes a model's last layer for one that drafts: saves a checkpoint with one layer less, and that one behind it.
    `kind`: by which names."""
    torch.manual_seed(9)
    config = model.config.to_dict()
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    names = _NEXTN[kind]
    prefix = {"mimo": "model.mtp_layers.0", "qwen": "mtp"}.get(kind, f"model.layers.{last}")
    extra = dict(zip(names, (norm(hidden), norm(hidden), matrix(hidden, 2 * hidden), norm(hidden)), strict=True))
    if kind != "deepseek":
        block = f"{prefix}.layers.0." if kind == "qwen" else f"{prefix}."
        state = {re.sub(rf"^model\..*layers\.{last}\.", block, name): each for name, each in state.items()}
    else:
        extra |= {"embed_tokens": state["model.embed_tokens.weight"].clone(), "shared_head.head": matrix(131, hidden)}
    state |= {f"{prefix}.{name}.weight": each for name, each in extra.items()}
    written = json.loads((folder / "config.json").read_text())
    written |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    if kind == "mimo":
        written |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    if "mlp_layer_types" in written:
        written["mlp_layer_types"] = written["mlp_layer_types"][:last]
    if "layer_types" in written:
        written["layer_types"] = written["layer_types"][:last]
    return {name: extra[name] for name in names} | save(folder, written, state)
