"""DeepSeek-OCR 2's tower, as configs describe it. Read by the tower and by the processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import HALF, ImageFacts, image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Dense, NormFacts
from bough.config.tower_facts import TowerBlockFacts
from bough.core.errors import ConfigError

SHRINK: Final = 4
"""Factor by which two convolutions reduce the patches along a side."""
TILE_QUERIES, WHOLE_QUERIES = 144, 256
"""Number of learned queries for a tile, and for the whole image; each becomes one position."""
NECK_NORM: Final = NormFacts(eps=1e-6, kind="layer", bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamFacts:
    """SAM's vision transformer: most blocks attend within windows, with relative positions of rows and columns."""

    block: TowerBlockFacts
    depth: int
    patch: int
    side: int
    """Learned positions along a side of their square."""
    window: int
    """Patches along a side of a window, in blocks that are not among `full`."""
    full: frozenset[int]
    neck: int
    """Channels after the blocks."""
    channels: tuple[int, int]
    """Channels after each of the convolutions that reduce the patches."""

    def num_parameters(self) -> int:
        hidden, head = self.block.hidden, self.block.head_dim
        apart = sum(2 * (2 * (self.side if at in self.full else self.window) - 1) * head for at in range(self.depth))
        patches = (3 * self.patch**2 + 1 + self.side**2) * hidden
        neck = hidden * self.neck + 9 * self.neck**2 + 2 * NECK_NORM.num_parameters(self.neck)
        shrinking = 9 * (self.neck * self.channels[0] + self.channels[0] * self.channels[1])
        return patches + self.depth * self.block.num_parameters() + apart + neck + shrinking


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFacts:
    """Qwen2's blocks over SAM's output for an image, followed by the learned queries."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    depth: int
    norm: NormFacts
    mlp: Dense
    theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    def num_parameters(self) -> int:
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        attention = self.hidden * heads + heads + self.num_heads * self.head_dim * self.hidden
        norms = 2 * self.norm.num_parameters(self.hidden)
        block = attention + norms + self.mlp.num_parameters(self.hidden)
        queries = (TILE_QUERIES + WHOLE_QUERIES) * self.hidden
        return self.depth * block + self.norm.num_parameters(self.hidden) + queries


@dataclass(frozen=True, slots=True, kw_only=True)
class OcrVision:
    """Both encoders, and how an image is cut into tiles."""

    sam: SamFacts
    queries: QueryFacts
    out: int
    image: ImageFacts
    whole: int
    """Edge of the whole image, in pixels."""
    tile: int
    """Edge of a tile, in pixels."""
    least: int
    most: int
    """Maximum number of tiles of an image; 1: images are not cut."""

    def tokens(self, edge: int) -> int:
        """Tokens of SAM for a square of `edge` pixels."""
        return (edge // self.sam.patch) ** 2

    def positions(self, tiles: int, edge: int) -> int:
        """Positions of an image with `tiles` tiles and a whole view of `edge` pixels, the separator included."""
        return tiles * TILE_QUERIES + (TILE_QUERIES if edge == self.tile else WHOLE_QUERIES) + 1

    def tower(self) -> TowerFacts:
        sam = self.sam.block
        apart = 2 * sam.num_heads * self.tokens(self.whole)  # what heads add to each pair of patches
        return TowerFacts(
            kinds=("image",),
            num_parameters=self.sam.num_parameters()
            + self.queries.num_parameters()
            + self.queries.hidden * self.out
            + 2 * self.out,
            width=self.out,
            tokens_per_position=SHRINK**2,
            values_per_token=sam.values_per_token + apart,
            max_positions=1 + self.most * TILE_QUERIES + WHOLE_QUERIES,
        )


def read_ocr2(config: Fields) -> OcrVision:
    """Raises `ConfigError` for what is not served."""
    vision, settings = config.inner("vision_config"), processor_fields(config)
    sam, encoder = vision.inner("sam_config"), vision.inner("encoder_config")
    hidden, patch = sam.count("hidden_size", default=768), sam.count("patch_size", default=16)
    channels = sam.sizes("downsample_channels") or (512, 896)
    whole = settings.inner("size").count("height", default=1024)
    tile = settings.count("tile_size", default=768)
    shrunk = [edge / (patch * SHRINK) for edge in (tile, whole)]
    if [edge**2 for edge in shrunk] != [TILE_QUERIES, WHOLE_QUERIES]:
        raise ConfigError(
            what=f"tiles have {tile} x {tile} pixels, and images {whole} x {whole}",
            why=f"{TILE_QUERIES} and {WHOLE_QUERIES} queries read squares of {patch * SHRINK} pixels",
            fix="check tile_size and size in preprocessor_config.json",
        )
    if not sam.flag("use_rel_pos", default=True) or not sam.flag("use_abs_pos", default=True):
        raise ConfigError(what="the tower has no positions", why="it reads both kinds", fix="serve another checkpoint")
    width = encoder.count("hidden_size", default=4096)
    heads = encoder.count("num_attention_heads", default=32)
    if channels[-1] != width or encoder.flag("use_sliding_window"):
        raise ConfigError(
            what="queries can't read what the first encoder leaves",
            why=f"it has {channels[-1]} values where they have {width}, or they see a window only",
            fix="serve another checkpoint",
        )
    rope = encoder.inner("rope_parameters")
    cuts = settings.flag("crop_to_patches", default=True)
    return OcrVision(
        sam=SamFacts(
            block=TowerBlockFacts(
                hidden=hidden,
                num_heads=sam.count("num_attention_heads", default=12),
                norm=NormFacts(eps=sam.number("layer_norm_eps", default=1e-6), kind="layer", bias=True),
                mlp=Dense(
                    intermediate=sam.count("mlp_dim", default=int(hidden * sam.positive("mlp_ratio", default=4.0))),
                    activation=sam.choice(reading.ACTIVATIONS, "hidden_act", default="gelu"),
                    gated=False,
                    bias=True,
                ),
                qkv_bias=sam.flag("qkv_bias", default=True),
            ),
            depth=sam.count("num_hidden_layers", default=12),
            patch=patch,
            side=sam.count("image_size", default=1024) // patch,
            window=sam.count("window_size", default=14),
            full=frozenset(int(each) for each in sam.numbers("global_attn_indexes") or (2, 5, 8, 11)),
            neck=sam.count("output_channels", default=256),
            channels=(int(channels[0]), int(channels[1])),
        ),
        queries=QueryFacts(
            hidden=width,
            num_heads=heads,
            num_kv_heads=encoder.count("num_key_value_heads", default=heads),
            depth=encoder.count("num_hidden_layers", default=32),
            norm=reading.rms_norm(encoder),
            mlp=Dense(
                intermediate=encoder.count("intermediate_size", default=22_016),
                activation=encoder.choice(reading.ACTIVATIONS, "hidden_act", default="silu"),
                gated=True,
                bias=False,
            ),
            theta=rope.positive("rope_theta", default=encoder.positive("rope_theta", default=1e4)),
        ),
        out=config.count("hidden_size"),
        image=image_facts(settings, mean=HALF, std=HALF),
        whole=whole if cuts else tile,
        tile=tile,
        least=settings.count("min_patches", default=2),
        most=settings.count("max_patches", default=6) if cuts else 1,
    )
