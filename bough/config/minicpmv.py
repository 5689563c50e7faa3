"""MiniCPM-V 4.6's vision encoder, as configs describe it: patches are merged inside it, and again after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bough.config.fields import Fields
from bough.config.image_facts import HALF, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import NormFacts
from bough.config.tower_facts import VitFacts
from bough.config.vit import read_vit
from bough.core.errors import ConfigError

WINDOW: Final = 2
"""Patches along a side of a merged group."""
LAST_NORM: Final = NormFacts(eps=1e-6, kind="layer", bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCpmVision:
    """SigLIP over images that keep their aspect ratio."""

    vit: VitFacts
    insert: int
    """Patches are merged after this block; -1: not inside the encoder."""
    out: int
    resolution: int
    """Edge of a square with about the same number of pixels as a slice."""
    slices: int
    """Maximum number of slices of an image; 1: it is not cut."""

    @property
    def by(self) -> int:
        """Patches along a side of a position."""
        return WINDOW if self.insert < 0 else WINDOW**2

    @property
    def max_positions(self) -> int:
        """Maximum number of positions of a slice: twice those of a square, because short edges are rounded up."""
        return 2 * (-(-self.resolution // (self.by * self.vit.patch))) ** 2

    def tower(self) -> TowerFacts:
        hidden, inner = self.vit.block.hidden, self.vit.block.mlp.intermediate
        wide, wide_inner = hidden * WINDOW**2, inner * WINDOW**2
        attention = 4 * (hidden * hidden + hidden) + 2 * hidden
        merger = attention + 2 * wide + wide * wide_inner + wide_inner + wide_inner * hidden + hidden
        last = 2 * wide + wide * wide + wide + wide * self.out + self.out
        return TowerFacts(
            kinds=("image", "video"),
            num_parameters=self.vit.num_parameters() + merger + last,
            width=self.out,
            tokens_per_position=self.by**2,
            values_per_token=self.vit.values_per_token,
            max_positions=self.max_positions,
        )


def read_minicpmv(config: Fields) -> MiniCpmVision:
    """Raises `ConfigError` for what is not served."""
    settings, vision = processor_fields(config), config.inner("vision_config")
    if config.count("merger_times", default=1) != 1:
        raise ConfigError(what="merger_times is not 1", why="positions are merged once", fix="serve another checkpoint")
    mode = str(settings.any("downsample_mode") or config.any("downsample_mode") or "16x")
    insert = config.size("insert_layer_id", default=vision.size("insert_layer_id", default=6))
    slices = settings.count("max_slice_nums", default=9) if settings.flag("slice_mode", default=True) else 1
    return MiniCpmVision(
        vit=read_vit(config, mean=HALF, std=HALF, model_type="siglip_vision_model"),
        insert=-1 if mode == "4x" else insert,
        out=config.count("hidden_size"),
        resolution=settings.count("scale_resolution", default=448),
        slices=slices,
    )
