"""GPT-NeoX, Pythia: both halves of a block read the stream, each through a layer norm of its own; a quarter of each head
is rotated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import ModelFacts
from bough.models.hf_names import in_layers
from bough.models.makers import pre_norm, two_norm_parallel
from bough.weights.mapping import Ignore, Mapping, Rename, Split

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder


def read(config: Fields) -> ModelFacts:
    config = config.also(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    bias = config.flag("attention_bias", default=True)
    ropes = reading.same_rope(config, reading.head_dim(config), share=0.25)
    attention = reading.gqa(config, ropes=ropes, qkv_bias=bias, out_bias=bias)
    ffn = reading.dense(config, default="gelu", gated=False, bias=True)
    return reading.decoder(config, attention, [ffn] * len(ropes), norm=reading.layer_norm(config, "layer_norm_eps"))


def make(facts: ModelFacts, build: Build) -> Decoder:
    if Fields(facts.config).flag("use_parallel_residual", default=True):
        return two_norm_parallel(facts, build)
    return pre_norm(facts, build)


WEIGHTS = Mapping(
    Rename("gpt_neox.embed_in", "embed.tokens"),
    Rename("gpt_neox.final_layer_norm", "norm"),
    Rename("embed_out", "head"),
    Split("gpt_neox.layers.*.attention.query_key_value", "layers.*.attn.qkv", parts=("q", "k", "v"), by_head=True),
    *in_layers(
        {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "mlp_norm",
            "attention.dense": "attn.out",
            "mlp.dense_h_to_4h": "mlp.up",
            "mlp.dense_4h_to_h": "mlp.down",
        },
        "gpt_neox.layers",
    ),
    Ignore("gpt_neox.layers.*.attention"),
    Ignore("gpt_neox.layers.*.attention.rotary_emb"),
)
