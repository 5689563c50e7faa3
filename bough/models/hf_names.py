"""Names that most checkpoints share, as rules for a model's `WEIGHTS`."""

from __future__ import annotations

from typing import Final

from bough.weights.mapping import Fuse, Ignore, Rename, Rule

ENDS: Final[tuple[Rule, ...]] = (
    Rename("model.embed_tokens", "embed"),
    Rename("model.norm", "norm"),
    Rename("lm_head", "head"),
    Ignore("model.layers.*.self_attn.rotary_emb"),
    Ignore("model.rotary_emb"),
)
NORMS: Final[tuple[Rule, ...]] = (
    Rename("model.layers.*.input_layernorm", "layers.*.attn_norm"),
    Rename("model.layers.*.post_attention_layernorm", "layers.*.ffn_norm"),
)
SANDWICH_NORMS: Final[tuple[Rule, ...]] = (
    Rename("model.layers.*.input_layernorm", "layers.*.attn_norm"),
    Rename("model.layers.*.post_attention_layernorm", "layers.*.after_attn_norm"),
    Rename("model.layers.*.pre_feedforward_layernorm", "layers.*.ffn_norm"),
    Rename("model.layers.*.post_feedforward_layernorm", "layers.*.after_ffn_norm"),
)
ATTENTION: Final[tuple[Rule, ...]] = (
    Fuse(
        "layers.*.qkv",
        q="model.layers.*.self_attn.q_proj",
        k="model.layers.*.self_attn.k_proj",
        v="model.layers.*.self_attn.v_proj",
    ),
    Rename("model.layers.*.self_attn.o_proj", "layers.*.out"),
)
HEAD_NORMS: Final[tuple[Rule, ...]] = (
    Rename("model.layers.*.self_attn.q_norm", "layers.*.q_norm"),
    Rename("model.layers.*.self_attn.k_norm", "layers.*.k_norm"),
)
FEED_FORWARD: Final[tuple[Rule, ...]] = (
    Fuse("layers.*.gate_up", gate="model.layers.*.mlp.gate_proj", up="model.layers.*.mlp.up_proj"),
    Rename("model.layers.*.mlp.down_proj", "layers.*.down"),
)
EXPERTS: Final[tuple[Rule, ...]] = (
    Rename("model.layers.*.mlp.gate", "layers.*.moe.router"),
    Rename("model.layers.*.mlp.experts.*.gate_proj", "layers.*.moe.experts.*.gate"),
    Rename("model.layers.*.mlp.experts.*.up_proj", "layers.*.moe.experts.*.up"),
    Rename("model.layers.*.mlp.experts.*.down_proj", "layers.*.moe.experts.*.down"),
)
