"""LFM2-VL's tower, as configs describe it. Read by the tower and by the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Activation, NormFacts
from bough.config.tower_facts import NaflexFacts
from bough.config.vit import siglip2_naflex
from bough.core.errors import ConfigError

PROJECTOR_NORM: Final = NormFacts(eps=1e-5, kind="layer", bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Vision:
    """SigLIP 2 over tiles, and over images that keep their aspect ratio."""

    vit: NaflexFacts
    by: int
    """Patches along a side of a position."""
    between: int
    """Width between the two linear layers of the projector."""
    activation: Activation
    bias: bool
    norm: bool
    """Whether the projector normalises its input."""
    out: int
    least_positions: int
    most_positions: int
    """Maximum number of positions of an image that is not cut."""
    tile: int
    """Edge of a tile."""

    @property
    def unit(self) -> int:
        """Pixels along a side of a position."""
        return self.by * self.vit.patch

    @property
    def tile_positions(self) -> int:
        return (self.tile // self.unit) ** 2

    def tower(self) -> TowerFacts:
        inner = self.vit.block.hidden * self.by**2
        biases = self.between + self.out if self.bias else 0
        projector = inner * self.between + self.between * self.out + biases
        return TowerFacts(
            kinds=("image",),
            num_parameters=self.vit.num_parameters() + projector + (2 * inner if self.norm else 0),
            width=self.out,
            tokens_per_position=self.by**2,
            values_per_token=self.vit.values_per_token,
            max_positions=max(self.most_positions, self.tile_positions),
        )


def read_lfm2_vl(config: Fields) -> Lfm2Vision:
    """Raises `ConfigError` for what is not served."""
    settings = processor_fields(config)
    vit = siglip2_naflex(config)
    by = config.count("downsample_factor", default=2)
    tile = settings.count("tile_size", default=512)
    least = settings.count("min_image_tokens", default=64)
    most = settings.count("max_image_tokens", default=256)
    if tile % (by * vit.patch) or least > most:
        raise ConfigError(
            what=f"tiles have {tile} x {tile} pixels, and images {least} to {most} positions",
            why=f"a position has {by * vit.patch} x {by * vit.patch} pixels, and an image must fit between the two",
            fix="check tile_size, min_image_tokens and max_image_tokens in preprocessor_config.json",
        )
    return Lfm2Vision(
        vit=vit,
        by=by,
        between=config.count("projector_hidden_size", default=2560),
        activation=config.choice(reading.ACTIVATIONS, "projector_hidden_act", default="gelu"),
        bias=config.flag("projector_bias", default=True),
        norm=config.flag("projector_use_layernorm", default=True),
        out=config.count("hidden_size"),
        least_positions=least,
        most_positions=most,
        tile=tile,
    )
