"""Llama 3.2 Vision's tower, as its config describes it. Read by the tower and by the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import HALF, ImageFacts, image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Dense, NormFacts
from bough.config.tower_facts import TowerBlockFacts
from bough.config.vit import BILINEAR, one_size

NORM: Final = NormFacts(eps=1e-5, kind="layer", bias=True)
"""The norms outside of blocks."""
TAPS: Final = [3, 7, 15, 23, 30]
"""Default for the blocks whose output is part of the features."""
MOST_IMAGES: Final = 4
"""Maximum number of images of a request, whose pages hold all of them at once."""
_ROUND: Final = 8
"""Tokens of a tile are padded to a multiple, as in training: others see the padding."""
_COLUMN: Final = 256
"""At least the positions that a column of pages has, at whose border media may have to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MllamaVision:
    """Tiles of one size; all tiles of an image form one sequence."""

    block: TowerBlockFacts
    depth: int
    global_depth: int
    """Number of global blocks: gated, after the first ones and a second tile embedding."""
    taps: tuple[int, ...]
    """Local blocks whose output is part of the features."""
    patch: int
    side: int
    """Patches along a side of a tile."""
    tiles: int
    """Maximum number of tiles of an image; this many are computed for every image."""
    image: ImageFacts

    @property
    def tokens(self) -> int:
        """Tokens of a tile: its patches, and a class token before them."""
        return self.side**2 + 1

    @property
    def padded(self) -> int:
        """Tokens of a tile, with padding."""
        return -(-self.tokens // _ROUND) * _ROUND

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of tiles that an image can have. Embeddings of tiles are learned for each, in this order."""
        sizes = range(1, self.tiles + 1)
        return [(rows, columns) for rows in sizes for columns in sizes if rows * columns <= self.tiles]

    @property
    def features(self) -> int:
        """Values of a position before the last product."""
        return (1 + len(self.taps)) * self.block.hidden

    @property
    def positions(self) -> int:
        """Maximum number of positions of a request's images, with room for each to begin at a column of pages."""
        return MOST_IMAGES * -(-self.tiles * self.tokens // _COLUMN) * _COLUMN

    def tower(self, width: int) -> TowerFacts:
        """The facts for the memory plan. `width`: of the language model."""
        hidden, tables = self.block.hidden, len(self.shapes) + 1
        own = 3 * self.patch**2 * hidden + hidden + 2 * NORM.num_parameters(hidden)
        tiles = 2 * (tables * self.tiles * hidden + 1)
        places = 1 + self.tokens * hidden + tables * self.tiles * self.tokens * hidden
        blocks = (self.depth + self.global_depth) * self.block.num_parameters() + 2 * self.global_depth
        return TowerFacts(
            kinds=("image",),
            num_parameters=own + tiles + places + blocks + (self.features + 1) * width,
            width=width,
            tokens_per_position=1,
            values_per_token=self.block.values_per_token + self.features,
            max_positions=self.tiles * self.tokens,
        )


def read_mllama(config: Fields) -> MllamaVision:
    vision, settings = config.inner("vision_config"), processor_fields(config)
    block = TowerBlockFacts(
        hidden=vision.count("hidden_size", default=1280),
        num_heads=vision.count("attention_heads", "num_attention_heads", default=16),
        norm=NormFacts(eps=vision.number("norm_eps", default=1e-5), kind="layer", bias=True),
        mlp=Dense(
            intermediate=vision.count("intermediate_size", default=5120),
            activation=vision.choice(reading.ACTIVATIONS, "hidden_act", default="gelu"),
            gated=False,
            bias=True,
        ),
        qkv_bias=False,
        out_bias=False,
    )
    patch = one_size(vision, "patch_size", 14)
    taps = vision.sizes("intermediate_layers_indices")
    return MllamaVision(
        block=block,
        depth=vision.count("num_hidden_layers", default=32),
        global_depth=vision.count("num_global_layers", default=8),
        taps=tuple(TAPS if taps is None else taps),
        patch=patch,
        side=one_size(vision, "image_size", 448) // patch,
        tiles=vision.count("max_num_tiles", default=4),
        image=image_facts(settings, mean=HALF, std=HALF, resample=BILINEAR),
    )
