"""MiniMax-Text-01 and MiniMax-M1: lightning attention in most layers and attention in a few, each followed by experts. What
a block adds to is the norm of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import Mixer, ModelFacts
from bough.config.state_facts import Lightning
from bough.core.errors import UnsupportedModel
from bough.models.hf_names import ATTENTION, BLOCK_SPARSE_EXPERTS, ENDS, NORMS, in_layers
from bough.weights.mapping import Ignore, Mapping, Split

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder

_KINDS = ("linear_attention", "full_attention")


def read(config: Fields) -> ModelFacts:
    """In transformers' words, or in those that the checkpoints were published with."""
    published = config.architecture() != "MiniMaxForCausalLM"
    if published and not config.flag("postnorm"):
        raise UnsupportedModel(what="a MiniMax model without postnorm", why="no released checkpoint is one")
    if any(config.sizes("shared_intermediate_size") or ()):
        raise UnsupportedModel(what="a MiniMax model with shared experts", why="no released checkpoint has them")
    width = reading.head_dim(config)
    turned = config.count("rotary_dim", default=width) if published else None
    attention = reading.gqa(
        config,
        width=width,
        windows=reading.windows(config, reading.every_layer, layer_types=False),
        ropes=reading.same_rope(config, width, theta=1_000_000.0, rotary_dim=turned),
    )
    count = len(attention)
    mixers: list[Mixer] = [
        each if kind == "full_attention" else _lightning(config, width, layer)
        for layer, (each, kind) in enumerate(zip(attention, _kinds(config, count), strict=True))
    ]
    experts = reading.moe(config, "num_local_experts", renormalise=True)
    return reading.decoder(config, mixers, [experts] * count, norm=reading.rms_norm(config, default=1e-5))


def _kinds(config: Fields, count: int) -> list[str]:
    full = config.flags("attn_type_list", count)
    if full is not None:
        return [_KINDS[each] for each in full]
    return reading.checked_layer_types(config, _KINDS) or [_KINDS[layer % 2 == 0] for layer in range(count)]


def _lightning(config: Fields, width: int, layer: int) -> Lightning:
    """Rates fall from layer to layer; the norm's epsilon is no config's."""
    last = reading.num_layers(config) - 1
    return Lightning(
        num_heads=config.count("num_attention_heads"),
        head_dim=width,
        rate_scale=1 - layer / (last + 1e-5) + 1e-5,
        norm_eps=1e-6,
    )


WEIGHTS = Mapping(
    *ENDS,
    *NORMS,
    *ATTENTION,
    *BLOCK_SPARSE_EXPERTS,
    Split("model.layers.*.self_attn.qkv_proj", "layers.*.attn.mix", parts=("q", "k", "v"), by_head=True),
    Ignore("model.layers.*.self_attn"),  # tables of decays, which the config gives, too
    *in_layers(
        {"self_attn.output_gate": "attn.mix.z", "self_attn.norm": "attn.norm", "self_attn.out_proj": "attn.out"}
    ),
)


def make(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.decoder import Decoder
    from bough.models.minimax_block import MiniMaxBlock

    return Decoder(facts, build, MiniMaxBlock)
