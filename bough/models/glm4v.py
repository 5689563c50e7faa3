"""GLM-4.1V and GLM-4.6V-Flash: GLM-4 with positions of three axes; a convolution merges squares of the tower's patches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Dense, ModelFacts, NormFacts
from bough.config.tower_facts import TowerBlockFacts
from bough.models import glm4
from bough.models.qwen2_vl import ATTENTION, PREFIXES
from bough.models.qwen_vision import QwenVision
from bough.models.seeing import seeing_weights, tower_of, with_tower
from bough.weights.mapping import Exact, Fuse, Rename, Rule

if TYPE_CHECKING:
    from bough.layers.build import Build
    from bough.layers.tower import Tower

SECTIONS: Final = (8, 12, 12)
MOST_PIXELS: Final = 28 * 28 * 15_000
MERGED_NORM: Final = NormFacts(eps=1e-5, kind="layer", bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmVision:
    """A tower of this family: Qwen's shapes, and what is its own."""

    shapes: QwenVision
    merger_inner: int

    def num_parameters(self) -> int:
        shapes, norm = self.shapes, self.shapes.block.norm
        hidden, out = shapes.block.hidden, shapes.out
        patches = math.prod(shapes.kernel) * hidden + hidden + 2 * norm.num_parameters(hidden)
        merger = shapes.merged * out + out + out * out + MERGED_NORM.num_parameters(out) + 3 * out * self.merger_inner
        return patches + shapes.grid_side**2 * hidden + shapes.depth * shapes.block.num_parameters() + merger

    def tower(self) -> TowerFacts:
        return replace(self.shapes.tower(), num_parameters=self.num_parameters())


def read_vision(config: Fields) -> GlmVision:
    vision, settings = config.inner("vision_config"), processor_fields(config)
    norm = NormFacts(eps=vision.number("rms_norm_eps", default=1e-5))
    out = vision.count("out_hidden_size", default=4096)
    activation = vision.choice(reading.ACTIVATIONS, "hidden_act", default="silu")
    patch = vision.count("patch_size", default=14)
    temporal = vision.count("temporal_patch_size", default=2)
    facts = image_facts(settings)
    return GlmVision(
        shapes=QwenVision(
            block=TowerBlockFacts(
                hidden=vision.count("hidden_size", default=1536),
                num_heads=vision.count("num_heads", "num_attention_heads", default=12),
                norm=norm,
                mlp=Dense(intermediate=out, activation=activation),
                qkv_bias=vision.flag("attention_bias"),
                out_bias=False,
            ),
            depth=vision.count("depth", default=24),
            patch=patch,
            temporal=temporal,
            merge=vision.count("spatial_merge_size", default=2),
            channels=vision.count("in_channels", default=3),
            out=out,
            merger_norm=MERGED_NORM,
            patch_bias=True,
            grid_side=vision.count("image_size", default=336) // patch,
            image=facts,
            max_pixels=facts.edge("longest_edge", MOST_PIXELS) // temporal,
        ),
        merger_inner=vision.count("intermediate_size", default=13_696),
    )


def read(config: Fields) -> ModelFacts:
    width = reading.head_dim(config)
    ropes = reading.same_rope(config, width, share=0.5, interleaved=True, kinds={"mrope": "default"}, sections=SECTIONS)
    bias = config.flag("attention_bias", default=True)
    attention = reading.gqa(config, width=width, ropes=ropes, qkv_bias=bias)
    norm = reading.rms_norm(config, default=1e-5)
    facts = reading.decoder(config, attention, [reading.dense(config)] * len(ropes), norm=norm, block_norms=4)
    return replace(facts, tower=tower_of(config, read_vision(config).tower()))


def make_tower(facts: ModelFacts, build: Build) -> Tower:
    from bough.models.glm4v_tower import GlmTower

    return GlmTower(read_vision(Fields(facts.config)), build)


TOWER: Final[tuple[Rule, ...]] = (
    *ATTENTION,
    Fuse("tower.blocks.*.mlp.gate_up", gate="blocks.*.mlp.gate_proj", up="blocks.*.mlp.up_proj"),
    Rename("blocks.*.mlp.down_proj", "tower.blocks.*.mlp.down"),
    Exact("embeddings.position_embedding.weight", "tower.positions.weight"),
    Rename("post_conv_layernorm", "tower.pre_norm"),
    Rename("post_layernorm", "tower.post_norm"),
    Rename("downsample", "tower.downsample"),
    Rename("merger.proj", "tower.merger.project"),
    Rename("merger.post_projection_norm", "tower.merger.norm"),
    Fuse("tower.merger.mlp.gate_up", gate="merger.gate_proj", up="merger.up_proj"),
    Rename("merger.down_proj", "tower.merger.mlp.down"),
)
WEIGHTS = seeing_weights(glm4.WEIGHTS, TOWER, PREFIXES)
make = with_tower(glm4.make, make_tower)
