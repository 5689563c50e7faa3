"""Models of two encoders with one space of vectors: a text's, and a tower for images. What CLIP and SigLIP have in common.

An image is a prompt of one token: what stands there is the vector that the tower has made. T tokens, D width of the text
encoder, W width of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import LearnedPositions, ModelFacts
from bough.config.tower_facts import NaflexFacts, VitFacts
from bough.models.vit_vision import VIT
from bough.weights.mapping import Fuse, Mapping, Outside, Rename, Rule, renamed, retargeted

if TYPE_CHECKING:
    from torch import nn

    from bough.layers.build import Build
    from bough.layers.tower import Tower

_LAYER: Final = "text_model.encoder.layers.*"
TEXT: Final[tuple[Rule, ...]] = (
    Rename("text_model.embeddings.token_embedding", "body.text.embed.tokens"),
    Rename("text_model.embeddings.position_embedding", "body.text.embed.positions"),
    Rename("text_model.final_layer_norm", "body.text.norm"),
    Rename(f"{_LAYER}.layer_norm1", "body.text.layers.*.attn_norm"),
    Rename(f"{_LAYER}.layer_norm2", "body.text.layers.*.mlp_norm"),
    Fuse(
        "body.text.layers.*.attn.qkv",
        q=f"{_LAYER}.self_attn.q_proj",
        k=f"{_LAYER}.self_attn.k_proj",
        v=f"{_LAYER}.self_attn.v_proj",
    ),
    Rename(f"{_LAYER}.self_attn.out_proj", "body.text.layers.*.attn.out"),
    Rename(f"{_LAYER}.mlp.fc1", "body.text.layers.*.mlp.up"),
    Rename(f"{_LAYER}.mlp.fc2", "body.text.layers.*.mlp.down"),
    Outside("text_model.embeddings.position_ids"),
    Outside("logit_scale"),
    Outside("logit_bias"),
)


def dual_weights(*more: Rule, tower: Sequence[Rule] = ()) -> Mapping:
    """`more`: what stands between the encoders and the vectors. `tower`: of the tower, beside a vision transformer's."""
    below = [renamed(rule, lambda name: f"vision_model.{name}") for rule in (*VIT, *tower) if rule != Outside("head.")]
    return Mapping(*TEXT, *(retargeted(rule, lambda name: f"body.{name}") for rule in below), *more)


def read_text(config: Fields, *, causal: bool, defaults: dict[str, Any]) -> ModelFacts:
    """The text encoder: learned positions, norms before each half of a block. `defaults`: of fields left out."""
    text = config.inner("text_config")
    fields = config.put(**{name: text.any(name) if text.has(name) else value for name, value in defaults.items()})
    ropes = (None,) * reading.num_layers(fields)
    positions = fields.count("max_position_embeddings")
    ffn = reading.dense(fields, gated=False, bias=True)
    return reading.decoder(
        fields,
        reading.gqa(fields, ropes=ropes, causal=causal, qkv_bias=True, out_bias=True),
        [ffn] * len(ropes),
        norm=reading.layer_norm(fields, "layer_norm_eps"),
        tie_embeddings=True,
        max_context=positions,
        positions=LearnedPositions(num_positions=positions),
    )


def with_image_tower(
    facts: ModelFacts, tower: VitFacts | NaflexFacts, *, width: int, pool: int, patches: int
) -> ModelFacts:
    """`width`: of the vectors; `pool`: parameters of what makes them of tokens; `patches`: of the largest image."""
    made = TowerFacts(
        kinds=("image",),
        num_parameters=tower.num_parameters() + pool,
        width=width,
        tokens_per_position=patches,
        values_per_token=tower.values_per_token,
        max_positions=1,
    )
    return replace(facts, tower=made)


def make_dual(facts: ModelFacts, build: Build, project: nn.Module, tower: Tower) -> nn.Module:
    """`project`: from the text encoder's states to vectors."""
    from bough.layers.dual_encoder import DualEncoder
    from bough.models.makers import pre_norm

    return DualEncoder(pre_norm(facts, build), project, tower)
