"""MobileNet-V5, as configs name it: its stages by the paper's blocks. Read by the tower and by the memory plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bough.config.fields import Fields
from bough.config.model_facts import NormFacts
from bough.core.errors import ConfigError, UnsupportedModel

MOBILENET_NORM: Final = NormFacts(eps=1e-6)
SHRINK: Final = 16
"""Pixels along a side of a place of the last stage but one, which is the finest that is fused."""
_STEM: Final = 64
_FUSED: Final = 2048
"""Channels that fusing the last two stages leaves."""
_FUSED_EXPANSION: Final = 2
_STEM_SIZE: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedIbFacts:
    """A fused inverted bottleneck: a convolution that expands the channels, and a product that projects them."""

    channels: int
    expansion: int
    size: int
    stride: int = 1

    def num_parameters(self, given: int) -> int:
        """`given`: channels before it."""
        inner = given * self.expansion
        return given * inner * self.size**2 + inner + inner * self.channels + self.channels

    def values(self, given: int, area: int) -> int:
        """That exist at its widest point. `area`: places before it."""
        return area * (2 * given + 3 * given * self.expansion // self.stride**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniversalIbFacts:
    """A universal inverted bottleneck: products that expand and project the channels, convolutions of each channel by itself
    before and between them."""

    channels: int
    expansion: int
    first: int = 0
    """Size of the convolution before both; 0: there is none."""
    middle: int = 0
    """Size of that between them."""
    stride: int = 1
    scaled: bool = True
    """What it makes is multiplied by a learned vector, and added to what it was given if that has the same shape."""

    def num_parameters(self, given: int) -> int:
        inner = given * self.expansion
        first = given * (self.first**2 + 1) if self.first else 0
        middle = inner * (self.middle**2 + 1) if self.middle else 0
        ends = given * inner + inner + inner * self.channels + self.channels
        return first + middle + ends + (self.channels if self.scaled else 0)

    def values(self, given: int, area: int) -> int:
        return area * (2 * given + 4 * given * self.expansion)


@dataclass(frozen=True, slots=True, kw_only=True)
class MobileMqaFacts:
    """Attention of all places of an image: heads share keys and values, which every `kv_stride`th place along a side has."""

    channels: int
    num_heads: int
    head_dim: int
    kv_stride: int = 1
    size: int = 3
    """Of the convolutions that leave fewer places with keys and values."""
    stride: int = 1

    def num_parameters(self, given: int) -> int:
        heads = self.num_heads * self.head_dim
        shrinking = 2 * given * (self.size**2 + 1) if self.kv_stride > 1 else 0
        return given + 2 * given * heads + 2 * given * self.head_dim + shrinking + self.channels

    def values(self, given: int, area: int) -> int:
        return area * (3 * given + 3 * self.num_heads * self.head_dim)


MobileBlockFacts = FusedIbFacts | UniversalIbFacts | MobileMqaFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MobileNetFacts:
    """A stem, stages of which each halves the sides, and the last two of them fused."""

    stem: int
    stages: tuple[tuple[MobileBlockFacts, ...], ...]
    out: int
    """Channels of what is fused..."""
    side: int
    """...and places along a side of it."""
    pixels: int
    """Along a side of an image."""

    def blocks(self) -> Iterator[tuple[MobileBlockFacts, int, int]]:
        """Every block with the channels and the places that it is given."""
        channels, side = self.stem, self.pixels // 2
        for stage in self.stages:
            for block in stage:
                yield block, channels, side**2
                channels, side = block.channels, side // block.stride

    @property
    def fusion(self) -> UniversalIbFacts:
        """The block over the channels of both stages."""
        return UniversalIbFacts(channels=self.out, expansion=_FUSED_EXPANSION, scaled=False)

    @property
    def fused_channels(self) -> int:
        return sum(stage[-1].channels for stage in self.stages[-2:])

    @property
    def tokens(self) -> int:
        """Places that are fused."""
        return (self.pixels // SHRINK) ** 2

    def num_parameters(self) -> int:
        stem = self.stem * (3 * _STEM_SIZE**2 + 2)
        fusion = self.fusion.num_parameters(self.fused_channels) + self.out
        return stem + sum(block.num_parameters(given) for block, given, _ in self.blocks()) + fusion

    @property
    def values_per_token(self) -> int:
        stem = 4 * self.stem * (self.pixels // 2) ** 2
        fused = self.fusion.values(self.fused_channels, self.tokens) + 3 * self.out * self.tokens
        widest = max(block.values(given, area) for block, given, area in self.blocks())
        return -(-max(stem, widest, fused) // self.tokens)


def read_mobilenet(vision: Fields, pixels: int) -> MobileNetFacts:
    """`vision`: the tower's config; `pixels`: along a side of an image. Raises `ConfigError` for what is not served."""
    name = str(vision.any("architecture") or "mobilenetv5_300m_enc")
    if name != "mobilenetv5_300m_enc":
        raise UnsupportedModel(
            what=f"the tower is {name[:60]!r}", why="mobilenetv5_300m_enc is served", fix="serve another checkpoint"
        )
    given = vision.inner("model_args")
    unknown = sorted(set(given.raw) - {"channel_multiplier", "msfa_output_resolution"})
    if unknown:
        raise UnsupportedModel(
            what=f"the tower's model_args have {', '.join(unknown)[:100]}",
            why="channel_multiplier and msfa_output_resolution are known",
            fix="serve another checkpoint",
        )
    times = given.positive("channel_multiplier", default=1.0)
    side = given.count("msfa_output_resolution", default=16)
    if pixels % (2 * SHRINK) or (pixels // SHRINK) % side:
        raise ConfigError(
            what=f"images have {pixels} x {pixels} pixels, of which {side} x {side} positions are left",
            why=f"the tower sees squares of {SHRINK} pixels, as many along a side for each position",
            fix="check size in preprocessor_config.json",
        )
    return MobileNetFacts(
        stem=_STEM if times < 1 else _rounded(_STEM * times),
        stages=_stages_300m(times),
        out=vision.count("hidden_size", default=_FUSED),
        side=side,
        pixels=pixels,
    )


def _stages_300m(times: float) -> tuple[tuple[MobileBlockFacts, ...], ...]:
    """As published. `times`: what channels are multiplied by."""
    first, second, third, fourth = (_rounded(channels * times) for channels in (128, 256, 640, 1280))

    def uib(channels: int, expansion: int, first: int = 0, middle: int = 0, stride: int = 1) -> UniversalIbFacts:
        return UniversalIbFacts(channels=channels, expansion=expansion, first=first, middle=middle, stride=stride)

    coarse = (MobileMqaFacts(channels=third, num_heads=12, head_dim=64, kv_stride=2), uib(third, 2))
    fine = (MobileMqaFacts(channels=fourth, num_heads=16, head_dim=96), uib(fourth, 2))
    fused = [FusedIbFacts(channels=first, expansion=4, size=3, stride=stride) for stride in (2, 1, 1)]
    return (
        tuple(fused),
        (uib(second, 6, first=3, middle=5, stride=2), *(uib(second, 4, first=size) for size in (5, 3, 5, 3))),
        (
            uib(third, 6, first=5, middle=5, stride=2),
            *(uib(third, 4, first=5) for _ in range(7)),
            uib(third, 1),
            *coarse * 14,
        ),
        (uib(fourth, 6, first=5, middle=5, stride=2), *fine * 19),
    )


def _rounded(channels: float) -> int:
    """A multiple of 8, at least nine tenths of it."""
    whole = max(8, int(channels + 4) // 8 * 8)
    return whole + 8 if whole < 0.9 * channels else whole
