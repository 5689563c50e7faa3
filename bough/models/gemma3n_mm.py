"""Gemma 3n E2B and E4B, which also see and hear: 256 positions an image of a MobileNet-V5, and 188 a sound of the Universal
Speech Model's encoder. The tokens that end an image or a sound have vectors of these towers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bough.config.fields import Fields
from bough.config.gemma3n_media import read_gemma3n_media
from bough.config.model_facts import ModelFacts
from bough.models import gemma3n
from bough.models.seeing import seeing_weights, tower_of
from bough.weights.mapping import Exact, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.decoder import Decoder

_LEFT_OUT: Final = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
"""What published files don't say, since it is transformers' default."""


def read(config: Fields) -> ModelFacts:
    config = config.put(**{key: value for key, value in _LEFT_OUT.items() if not config.has(key)})
    facts = gemma3n.read(config)
    if not config.has("vision_config", "audio_config"):
        return facts
    return replace(facts, tower=tower_of(config, read_gemma3n_media(config).tower(facts.hidden)))


def make(facts: ModelFacts, build: Build) -> Decoder:
    from bough.layers.embedding import LaterRows
    from bough.models.gemma3n_tower import Gemma3nTower

    decoder = gemma3n.make(facts, build)
    if facts.tower is not None and decoder.pp.rank == 0:
        config = Fields(facts.config)
        tower = Gemma3nTower(read_gemma3n_media(config), facts.hidden, build)
        decoder.tower = tower
        decoder.embed.tokens.later = LaterRows(tower.first_token, tower.hard_VD)
    return decoder


_IN_BLOCKS: Final = {
    "conv_exp": "expand.conv",
    "bn1": "expand.norm",
    "conv_pwl": "project.conv",
    "bn2": "project.norm",
    "dw_start.conv": "first.conv",
    "dw_start.bn": "first.norm",
    "pw_exp.conv": "expand.conv",
    "pw_exp.bn": "expand.norm",
    "dw_mid.conv": "middle.conv",
    "dw_mid.bn": "middle.norm",
    "pw_proj.conv": "project.conv",
    "pw_proj.bn": "project.norm",
    "norm": "norm",
    "attn.query.proj": "q",
    "attn.key.down_conv": "k.shrink.conv",
    "attn.key.norm": "k.shrink.norm",
    "attn.key.proj": "k.project",
    "attn.value.down_conv": "v.shrink.conv",
    "attn.value.norm": "v.shrink.norm",
    "attn.value.proj": "v.project",
    "attn.output.proj": "out",
}
_SEEING: Final[tuple[Rule, ...]] = (
    Rename("conv_stem.conv", "tower.seeing.stem.conv"),
    Rename("conv_stem.bn", "tower.seeing.stem.norm"),
    *(Rename(f"blocks.*.*.{source}", f"tower.seeing.stages.*.*.{target}") for source, target in _IN_BLOCKS.items()),
    Exact("blocks.*.*.layer_scale.gamma", "tower.seeing.stages.*.*.scale.weight"),
    *(
        Rename(f"msfa.ffn.{source}.{part}", f"tower.seeing.fusion.block.{target}.{own}")
        for source, target in {"pw_exp": "expand", "pw_proj": "project"}.items()
        for part, own in {"conv": "conv", "bn": "norm"}.items()
    ),
    Rename("msfa.norm", "tower.seeing.fusion.norm"),
)
"""As timm names them."""
_IN_CONFORMER: Final = {
    **{
        f"ffw_layer_{source}.{part}": f"{target}.{own}"
        for source, target in {"start": "first", "end": "last"}.items()
        for part, own in {
            "pre_layer_norm": "norm",
            "ffw_layer_1": "up",
            "ffw_layer_2": "down",
            "post_layer_norm": "after_norm",
        }.items()
    },
    "attention.pre_attn_norm": "attn.norm",
    "attention.attn.q_proj": "attn.q",
    "attention.attn.k_proj": "attn.k",
    "attention.attn.v_proj": "attn.v",
    "attention.attn.relative_position_embedding.pos_proj": "attn.apart",
    "attention.post": "attn.out",
    "attention.post_norm": "attn.after_norm",
    "lconv1d.pre_layer_norm": "conv.norm",
    "lconv1d.linear_start": "conv.gated",
    "lconv1d.depthwise_conv1d": "conv",
    "lconv1d.conv_norm": "conv.conv_norm",
    "lconv1d.linear_end": "conv.out",
    "norm": "norm",
}
_HEARING: Final[tuple[Rule, ...]] = (
    *(
        Rename(f"subsample_conv_projection.conv_{number}.{source}", f"tower.hearing.thin.convs.{number}{target}")
        for number in range(2)
        for source, target in {"conv": "", "norm": ".norm"}.items()
    ),
    Rename("subsample_conv_projection.input_proj_linear", "tower.hearing.thin.project"),
    *(Rename(f"conformer.*.{source}", f"tower.hearing.blocks.*.{target}") for source, target in _IN_CONFORMER.items()),
    Exact("conformer.*.attention.attn.per_dim_scale", "tower.hearing.blocks.*.attn.scale.weight"),
)


def _embedder(target: str) -> tuple[Rule, ...]:
    return (
        Rename("embedding", f"{target}.tokens"),
        Rename("hard_embedding_norm", f"{target}.hard_norm"),
        Rename("soft_embedding_norm", f"{target}.soft_norm"),
        Rename("embedding_projection", f"{target}.project"),
    )


WEIGHTS = seeing_weights(
    gemma3n.WEIGHTS,
    _SEEING,
    ("vision_tower.timm_model.", "model.vision_tower.timm_model."),
    (_HEARING, ("audio_tower.", "model.audio_tower.")),
    (_embedder("tower.embed_images"), ("embed_vision.", "model.embed_vision.")),
    (_embedder("tower.embed_sounds"), ("embed_audio.", "model.embed_audio.")),
)
