"""LFM2: short convolutions in most layers, and attention with normed heads in a few."""

from __future__ import annotations

from collections.abc import Sequence

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import FeedForward, HeadNorms, Mixer, ModelFacts
from bough.config.state_facts import ShortConv
from bough.models.hf_names import ATTENTION, ENDS, in_layers
from bough.models.makers import pre_norm
from bough.weights.mapping import Fuse, Mapping, Rename, Split

_KINDS = ("conv", "full_attention")


def read(config: Fields) -> ModelFacts:
    inner = config.count("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", default=True):
        inner = int(config.positive("block_ffn_dim_multiplier", default=1.0) * (2 * inner // 3))
        multiple = config.count("block_multiple_of", default=256)
        inner = -(-inner // multiple) * multiple
    return decoder(config, [reading.dense(config.put(intermediate_size=inner))] * reading.num_layers(config))


def decoder(config: Fields, ffns: Sequence[FeedForward]) -> ModelFacts:
    """By `layer_types`; without them the layers of `full_attn_idxs` have attention, or all do."""
    norm, width = reading.rms_norm(config.also(rms_norm_eps="norm_eps"), default=1e-5), reading.head_dim(config)
    ropes = reading.same_rope(config, width, theta=1_000_000.0)
    attention = reading.gqa(config, width=width, ropes=ropes, head_norms=HeadNorms(norm=norm))
    conv = ShortConv(
        channels=config.count("hidden_size"),
        conv_width=config.count("conv_L_cache", default=3),
        bias=config.flag("conv_bias"),
    )
    places = config.sizes("full_attn_idxs")
    kinds = reading.checked_layer_types(config, _KINDS) or [
        _KINDS[places is None or layer in places] for layer in range(len(attention))
    ]
    mixers: list[Mixer] = [conv if kind == "conv" else each for each, kind in zip(attention, kinds, strict=True)]
    tied = config.flag("tie_embedding", "tie_word_embeddings", default=True)
    return reading.decoder(config, mixers, ffns, norm=norm, tie_embeddings=tied)


NAMES = (
    *ENDS,
    Rename("model.embedding_norm", "norm"),
    Split("model.layers.*.conv.in_proj", "layers.*.attn.mix", parts=("b", "c", "x")),
    *ATTENTION,
    Fuse("layers.*.mlp.gate_up", gate="model.layers.*.feed_forward.w1", up="model.layers.*.feed_forward.w3"),
    *in_layers(
        {
            "operator_norm": "attn_norm",
            "ffn_norm": "mlp_norm",
            "conv.conv": "attn.conv",
            "conv.out_proj": "attn.out",
            "self_attn.out_proj": "attn.out",
            "self_attn.q_layernorm": "attn.q_norm",
            "self_attn.k_layernorm": "attn.k_norm",
            "feed_forward.w2": "mlp.down",
        }
    ),
)
WEIGHTS = Mapping(*NAMES)
make = pre_norm
