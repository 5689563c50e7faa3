"""Names that most checkpoints share, as rules for a model's `WEIGHTS`."""

from __future__ import annotations

from typing import Final

from bough.weights.mapping import Exact, Fuse, Ignore, Rename, Rule, Split


def in_layers(names: dict[str, str], prefix: str = "model.layers") -> tuple[Rule, ...]:
    """Renames inside every block: a name below `prefix` and a number -> one below `layers` and the number."""
    return tuple(Rename(f"{prefix}.*.{source}", f"layers.*.{target}") for source, target in names.items())


ENDS: Final[tuple[Rule, ...]] = (
    Rename("model.embed_tokens", "embed.tokens"),
    Rename("model.norm", "norm"),
    Rename("lm_head", "head"),
    Ignore("model.layers.*.self_attn.rotary_emb"),
    Ignore("model.rotary_emb"),
)
NORMS: Final = in_layers({"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"})
SANDWICH_NORMS: Final = in_layers(
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "after_attn_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "after_mlp_norm",
    }
)
POST_NORMS: Final = in_layers(
    {"post_attention_layernorm": "after_attn_norm", "post_feedforward_layernorm": "after_mlp_norm"}
)
ATTENTION: Final[tuple[Rule, ...]] = (
    Fuse(
        "layers.*.attn.qkv",
        q="model.layers.*.self_attn.q_proj",
        k="model.layers.*.self_attn.k_proj",
        v="model.layers.*.self_attn.v_proj",
    ),
    Rename("model.layers.*.self_attn.o_proj", "layers.*.attn.out"),
)
HEAD_NORMS: Final = in_layers({"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"})
FEED_FORWARD: Final[tuple[Rule, ...]] = (
    Fuse("layers.*.mlp.gate_up", gate="model.layers.*.mlp.gate_proj", up="model.layers.*.mlp.up_proj"),
    Rename("model.layers.*.mlp.down_proj", "layers.*.mlp.down"),
)
UNGATED: Final = in_layers({"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"})
FUSED_FEED_FORWARD: Final[tuple[Rule, ...]] = (
    Split("model.layers.*.mlp.gate_up_proj", "layers.*.mlp.gate_up", parts=("gate", "up")),
    Rename("model.layers.*.mlp.down_proj", "layers.*.mlp.down"),
)
EXPERTS: Final[tuple[Rule, ...]] = (
    Rename("model.layers.*.mlp.gate", "layers.*.mlp.router"),
    Rename("model.layers.*.mlp.experts.*.gate_proj", "layers.*.mlp.experts.*.gate"),
    Rename("model.layers.*.mlp.experts.*.up_proj", "layers.*.mlp.experts.*.up"),
    Rename("model.layers.*.mlp.experts.*.down_proj", "layers.*.mlp.experts.*.down"),
)
CHOICE_BIAS: Final[tuple[Rule, ...]] = (
    Exact("model.layers.*.mlp.gate.e_score_correction_bias", "layers.*.mlp.choose.bias"),
)
SHARED_EXPERTS: Final[tuple[Rule, ...]] = (
    Fuse(
        "layers.*.mlp.shared.gate_up",
        gate="model.layers.*.mlp.shared_experts.gate_proj",
        up="model.layers.*.mlp.shared_experts.up_proj",
    ),
    Rename("model.layers.*.mlp.shared_experts.down_proj", "layers.*.mlp.shared.down"),
)
BLOCK_SPARSE_EXPERTS: Final = in_layers(
    {
        "block_sparse_moe.gate": "mlp.router",
        "block_sparse_moe.experts.*.w1": "mlp.experts.*.gate",
        "block_sparse_moe.experts.*.w3": "mlp.experts.*.up",
        "block_sparse_moe.experts.*.w2": "mlp.experts.*.down",
    }
)
JAMBA_BLOCK: Final[tuple[Rule, ...]] = (
    *in_layers(
        {
            "input_layernorm": "attn_norm",
            "pre_ff_layernorm": "mlp_norm",
            "feed_forward.down_proj": "mlp.down",
        }
    ),
    Fuse(
        "layers.*.mlp.gate_up",
        gate="model.layers.*.feed_forward.gate_proj",
        up="model.layers.*.feed_forward.up_proj",
    ),
    Rename("model.final_layernorm", "norm"),
)
"""Norms and feed-forward blocks of Jamba and of models with its names."""
BACKBONE: Final[tuple[Rule, ...]] = (
    Rename("backbone.embeddings", "embed.tokens"),
    Rename("backbone.layers.*.norm", "layers.*.norm"),
    Rename("backbone.norm_f", "norm"),
    Rename("lm_head", "head"),
)
"""Ends and norms of Mamba and of models with its names."""


def mamba2(source: str, target: str) -> tuple[Rule, ...]:
    """A layer of Mamba 2, under transformers' names below `source`."""
    return (
        Split(f"{source}.in_proj", f"{target}.mix", parts=("z", "x", "b", "c", "dt")),
        Split(f"{source}.conv1d", f"{target}.conv", parts=("x", "b", "c")),
        Rename(f"{source}.norm", f"{target}.norm"),
        Rename(f"{source}.out_proj", f"{target}.out"),
        Exact(f"{source}.A_log", f"{target}.rates.weight"),
        Exact(f"{source}.dt_bias", f"{target}.step_bias.weight"),
        Exact(f"{source}.D", f"{target}.skip.weight"),
    )


def mamba(source: str, target: str) -> tuple[Rule, ...]:
    """A layer of Mamba, under transformers' names below `source`."""
    return (
        Split(f"{source}.in_proj", f"{target}.mix", parts=("x", "z")),
        Rename(f"{source}.conv1d", f"{target}.conv"),
        Rename(f"{source}.x_proj", f"{target}.select"),
        Rename(f"{source}.out_proj", f"{target}.out"),
        Rename(f"{source}.dt_layernorm", f"{target}.norms.dt"),
        Rename(f"{source}.b_layernorm", f"{target}.norms.b"),
        Rename(f"{source}.c_layernorm", f"{target}.norms.c"),
        Exact(f"{source}.dt_proj.weight", f"{target}.steps.weight"),
        Exact(f"{source}.dt_proj.bias", f"{target}.step_bias.weight"),
        Exact(f"{source}.A_log", f"{target}.rates.weight"),
        Exact(f"{source}.D", f"{target}.skip.weight"),
    )
