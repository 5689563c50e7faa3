"""Gemma 3n, text: four streams of which blocks compute one (AltUp), a learned product beside attention (LAuReL), embeddings
of each layer's own, gates of which few are left in the first layers, and last layers that read the KV of earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config import reading
from bough.config.fields import Fields
from bough.config.model_facts import AltUp, Dense, HeadNorms, ModelFacts, NormFacts, PerLayerInputs
from bough.core.errors import ConfigError
from bough.models.gemma2 import softcap
from bough.models.hf_names import ATTENTION, ENDS, FEED_FORWARD, HEAD_NORMS, SANDWICH_NORMS, in_layers
from bough.weights.mapping import Exact, Mapping, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder

KINDS = ("full_attention", "sliding_attention")


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config, 256)
    norm = reading.rms_norm(config)
    count = reading.num_layers(config)
    kinds = reading.checked_layer_types(config, KINDS) or [KINDS[(layer + 1) % 5 != 0] for layer in range(count)]
    window = config.count("sliding_window", default=512)
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    bias = config.flag("attention_bias")
    attention = reading.gqa(
        config,
        width=width,
        windows=windows,
        ropes=reading.ropes_by_window(config, width, windows, theta=1_000_000.0, theta_local=10_000.0),
        scale=1.0,
        head_norms=HeadNorms(norm=norm),
        value_norm=NormFacts(eps=norm.eps, weight=False),
        qkv_bias=bias,
        out_bias=bias,
    )
    altup = AltUp(
        streams=config.count("altup_num_inputs", default=4),
        active=config.size("altup_active_idx", default=0),
        scaled=config.flag("altup_correct_scale", default=True),
        laurel_rank=config.count("laurel_rank", default=64),
    )
    if altup.active >= altup.streams:
        raise ConfigError(
            what=f"the model's config has an altup_active_idx of {altup.active}",
            why=f"there are {altup.streams} streams (altup_num_inputs)",
            fix="check config.json",
        )
    return reading.decoder(
        config,
        attention,
        _feed_forwards(config, count),
        norm=norm,
        kv_from=reading.shared_kv(config, kinds, default=15),
        block_norms=4,
        tie_embeddings=config.flag("tie_word_embeddings", default=True),
        embed_scale=config.count("hidden_size") ** 0.5,
        logit_softcap=softcap(config, "final_logit_softcapping", 30.0),
        per_layer=layer_inputs(config),
        altup=altup,
    )


def _feed_forwards(config: Fields, count: int) -> list[Dense]:
    """By layer: gates are sparse in the first ten, as published, or as `activation_sparsity_pattern` says."""
    by_layer = isinstance(config.any("intermediate_size"), list)
    widths = config.counts("intermediate_size", count) if by_layer else None
    widths = widths or [config.count("intermediate_size", default=16_384)] * count
    sparse = config.numbers("activation_sparsity_pattern", count)
    if sparse is None:
        sparse = tuple(0.95 if count > 10 and layer < 10 else 0.0 for layer in range(count))
    if any(not 0 <= each < 1 for each in sparse):
        raise ConfigError(
            what=f"the model's activation_sparsity_pattern is {list(sparse)}",
            why="each is the part of a layer's gates that becomes 0",
            fix="check config.json",
        )
    activation = config.choice(reading.ACTIVATIONS, "hidden_activation", default="gelu_pytorch_tanh")
    return [
        Dense(intermediate=width, activation=activation, sparsity=part)
        for width, part in zip(widths, sparse, strict=True)
    ]


def layer_inputs(config: Fields) -> PerLayerInputs:
    return PerLayerInputs(
        vocab=config.count("vocab_size_per_layer_input", default=262_144),
        media_token=config.size("pad_token_id", default=0),
        width=config.count("hidden_size_per_layer_input", default=256),
        activation=config.choice(reading.ACTIVATIONS, "hidden_activation", default="gelu_pytorch_tanh"),
    )


def make(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.decoder import Decoder
    from bough.models.gemma3n_block import AltUpBlock

    return Decoder(facts, build, AltUpBlock)


LAYER_INPUTS: tuple[Rule, ...] = (
    Rename("model.embed_tokens_per_layer", "inputs.tokens"),
    Rename("model.per_layer_model_projection", "inputs.project"),
    Rename("model.per_layer_projection_norm", "inputs.norm"),
    *in_layers(
        {
            "per_layer_input_gate": "input.gate",
            "per_layer_projection": "input.project",
            "post_per_layer_input_norm": "input.norm",
        }
    ),
)
WEIGHTS = Mapping(
    *ENDS,
    *SANDWICH_NORMS,
    *ATTENTION,
    *HEAD_NORMS,
    *FEED_FORWARD,
    *LAYER_INPUTS,
    Rename("model.altup_projections.*", "streams.begin.*"),
    Rename("model.altup_unembed_projections.*", "streams.end.*"),
    Exact("model.layers.*.altup.correct_output_scale", "layers.*.streams.out_scale"),
    *in_layers(
        {
            "altup.correction_coefs": "streams.correct",
            "altup.prediction_coefs": "streams.predict",
            "altup.modality_router": "streams.router",
            "altup.router_norm": "streams.norm",
            "laurel.linear_left": "laurel.down",
            "laurel.linear_right": "laurel.up",
            "laurel.post_laurel_norm": "laurel.norm",
        }
    ),
)
