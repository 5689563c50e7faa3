"""Pixtral's vision encoder, as configs describe it: images keep their aspect ratio, with 2D rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import ImageFacts, image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Dense, NormFacts
from bough.config.tower_facts import TowerBlockFacts
from bough.core.errors import ConfigError

NORM: Final = NormFacts(eps=1e-5)
_LONGEST: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralVision:
    """An encoder of this family and its projector."""

    block: TowerBlockFacts
    depth: int
    patch: int
    merge: int
    """Patches along a side of a position."""
    channels: int
    theta: float
    image: ImageFacts
    longest: int
    """Maximum edge of an image, in pixels."""

    @property
    def kernel(self) -> tuple[int, ...]:
        return (self.channels, self.patch, self.patch)

    @property
    def unit(self) -> int:
        """Pixels along a side of a position."""
        return self.patch * self.merge

    def tower(self, width: int, projector: int) -> TowerFacts:
        """What planning needs to know. `projector`: its parameters."""
        hidden = self.block.hidden
        own = math.prod(self.kernel) * hidden + NORM.num_parameters(hidden) + self.depth * self.block.num_parameters()
        return TowerFacts(
            kinds=("image",),
            num_parameters=own + projector,
            width=width,
            tokens_per_position=self.merge**2,
            values_per_token=self.block.values_per_token + math.prod(self.kernel),
            max_positions=(-(-self.longest // self.unit)) ** 2,
            pixels_per_position=self.unit**2,
        )


def is_pixtral(config: Fields) -> bool:
    return bool(config.inner("vision_config").any("model_type") == "pixtral")


def read_pixtral(config: Fields) -> PixtralVision:
    """Raises `ConfigError` for what is not served."""
    vision = config.inner("vision_config")
    if config.any("vision_feature_layer") not in (None, -1):
        raise ConfigError(what="vision_feature_layer is not -1", why="the last one is taken", fix="serve another")
    hidden, heads = vision.count("hidden_size", default=1024), vision.count("num_attention_heads", default=16)
    if hidden % (4 * heads):
        raise ConfigError(
            what=f"the tower's width of {hidden} does not suit its {heads} heads",
            why="a head is rotated by height and width, a pair of values each",
            fix="check vision_config in config.json",
        )
    mlp = Dense(
        intermediate=vision.count("intermediate_size", default=4096),
        activation=vision.choice(reading.ACTIVATIONS, "hidden_act", default="gelu"),
    )
    facts = image_facts(processor_fields(config))
    rope = vision.inner("rope_parameters")
    return PixtralVision(
        block=TowerBlockFacts(hidden=hidden, num_heads=heads, norm=NORM, mlp=mlp, qkv_bias=False, out_bias=False),
        depth=vision.count("num_hidden_layers", default=24),
        patch=vision.count("patch_size", default=16),
        merge=config.count("spatial_merge_size", default=2 if config.any("model_type") == "mistral3" else 1),
        channels=vision.count("num_channels", default=3),
        theta=rope.number("rope_theta", default=vision.number("rope_theta", default=10_000.0)),
        image=facts,
        longest=facts.edge("longest_edge", _LONGEST),
    )
