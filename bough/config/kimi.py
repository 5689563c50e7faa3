"""Kimi-K2.5's tower (MoonViT), as its config and the settings of its processor describe it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from bough.config.fields import Fields
from bough.config.image_facts import HALF, ImageFacts, image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Dense, NormFacts
from bough.config.tower_facts import TowerBlockFacts

_NORM: Final = NormFacts(eps=1e-5, kind="layer", bias=True)
_MOST_PATCHES: Final = 16_384
_MOST_ALONG: Final = 512
"""Maximum number of patches along a side of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiVision:
    """Images keep their aspect ratio. Consecutive frames of a video attend to one another in short groups, whose mean
    becomes the output."""

    block: TowerBlockFacts
    depth: int
    patch: int
    merge: int
    grid: tuple[int, int]
    """Rows and columns of learned positions, which are interpolated to the size of an image."""
    out: int
    projector_norm: NormFacts
    image: ImageFacts
    most_patches: int
    most_along: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return (3, self.patch, self.patch)

    @property
    def merged(self) -> int:
        return self.block.hidden * self.merge**2

    def tower(self) -> TowerFacts:
        hidden, merged = self.block.hidden, self.merged
        own = (math.prod(self.kernel) + 1 + math.prod(self.grid)) * hidden + self.block.norm.num_parameters(hidden)
        projector = hidden * 2 + merged * merged + merged + merged * self.out + self.out
        # Both sides may be padded by up to a position.
        positions = self.most_patches // self.merge**2 + 2 * (self.most_along // self.merge) + 1
        return TowerFacts(
            kinds=("image", "video"),
            num_parameters=own + self.depth * self.block.num_parameters() + projector,
            width=self.out,
            tokens_per_position=self.merge**2,
            values_per_token=self.block.values_per_token + math.prod(self.kernel),
            max_positions=positions,
            pixels_per_position=(self.patch * self.merge) ** 2,
        )


def media_settings(config: Fields) -> Fields:
    """Media settings of the checkpoint's processor."""
    return processor_fields(config).inner("media_proc_cfg")


def read_kimi(config: Fields) -> KimiVision:
    vision, settings = config.inner("vision_config"), media_settings(config)
    merge = vision.sizes("merge_kernel_size")
    return KimiVision(
        block=TowerBlockFacts(
            hidden=vision.count("vt_hidden_size", default=1152),
            num_heads=vision.count("vt_num_attention_heads", default=16),
            norm=_NORM,
            mlp=Dense(
                intermediate=vision.count("vt_intermediate_size", default=4304),
                activation="gelu_tanh",
                gated=False,
                bias=True,
            ),
            interleaved=True,
        ),
        depth=vision.count("vt_num_hidden_layers", default=27),
        patch=vision.count("patch_size", default=14),
        merge=merge[0] if merge else 2,
        grid=(vision.count("init_pos_emb_height", default=64), vision.count("init_pos_emb_width", default=64)),
        out=config.count("hidden_size"),
        projector_norm=NormFacts(eps=vision.positive("projector_ln_eps", default=1e-5), kind="layer", bias=True),
        image=image_facts(settings, mean=HALF, std=HALF),
        most_patches=settings.count("in_patch_limit", default=_MOST_PATCHES),
        most_along=settings.count("patch_limit_on_one_side", default=_MOST_ALONG),
    )
