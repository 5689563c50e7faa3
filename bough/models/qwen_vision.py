"""The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, as their configs describe them.

Patches of an image keep its shape: a grid of `h x w` patches, of which squares of `merge x merge` neighbours become one
position of the prompt. Two frames make a patch in time; an image counts as two equal frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import ImageFacts, image_facts, pixel_bounds, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Dense, NormFacts
from bough.config.tower_facts import TowerBlockFacts
from bough.core.errors import ConfigError

THETA = 10_000.0
LAYER_NORM = NormFacts(eps=1e-6, kind="layer", bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVision:
    """A tower of this family."""

    block: TowerBlockFacts
    depth: int
    patch: int
    temporal: int
    merge: int
    channels: int
    out: int
    """Width of the language model."""
    merger_norm: NormFacts
    patch_bias: bool = False
    window: int = 0
    """Patches along a side of a window, in blocks that are not among `full`; 0: every block sees all of an image."""
    full: frozenset[int] = frozenset()
    grid_side: int = 0
    """Learned positions along a side of their grid, which is stretched over an image; 0: there are none."""
    deep: tuple[int, ...] = ()
    """Blocks after which features are taken for leading layers of the language model."""
    theta: float = THETA
    image: ImageFacts
    max_pixels: int

    @property
    def merged(self) -> int:
        """Values of the patches that become one position."""
        return self.block.hidden * self.merge**2

    @property
    def kernel(self) -> tuple[int, ...]:
        return (self.channels, self.temporal, self.patch, self.patch)

    def num_parameters(self) -> int:
        hidden, merged = self.block.hidden, self.merged
        patches = math.prod(self.kernel) * hidden + (hidden if self.patch_bias else 0)
        merger = merged * merged + merged + merged * self.out + self.out
        norms = self.merger_norm.num_parameters(hidden) + len(self.deep) * self.merger_norm.num_parameters(merged)
        total = patches + self.depth * self.block.num_parameters() + (1 + len(self.deep)) * merger + norms
        return total + self.grid_side**2 * hidden

    def tower(self) -> TowerFacts:
        """What planning needs to know."""
        side = self.patch * self.merge
        return TowerFacts(
            kinds=("image", "video"),
            num_parameters=self.num_parameters(),
            width=self.out * (1 + len(self.deep)),
            tokens_per_position=self.merge**2,
            values_per_token=self.block.values_per_token + math.prod(self.kernel),
            max_positions=max(1, self.max_pixels // side**2),
            pixels_per_position=side**2,
        )


def read_vision(config: Fields, kind: str) -> QwenVision:
    """`kind`: "2", "2.5" or "3". Raises `ConfigError` for a config that makes no sense."""
    vision = config.inner("vision_config")
    settings = processor_fields(config)
    patch = vision.count("patch_size", default=16 if kind == "3" else 14)
    merge = vision.count("spatial_merge_size", default=2)
    hidden = vision.count("embed_dim", default=1280) if kind == "2" else vision.count("hidden_size")
    heads = vision.count("num_heads", default=16)
    if hidden % (4 * heads):
        raise ConfigError(
            what=f"the tower's width of {hidden} does not suit its {heads} heads",
            why="a head is rotated by height and width, a pair of values each",
            fix="check vision_config in config.json",
        )
    window = 0
    if kind == "2.5":
        window = vision.count("window_size", default=112) // patch // merge * merge
    rope = vision.inner("rope_parameters")
    return QwenVision(
        block=TowerBlockFacts(
            hidden=hidden,
            num_heads=heads,
            norm=NormFacts(eps=1e-6) if kind == "2.5" else LAYER_NORM,
            mlp=_mlp(vision, kind, hidden),
        ),
        depth=vision.count("depth"),
        patch=patch,
        temporal=vision.count("temporal_patch_size", default=2),
        merge=merge,
        channels=vision.count("in_channels", "in_chans", default=3),
        out=vision.count("hidden_size") if kind == "2" else vision.count("out_hidden_size"),
        merger_norm=NormFacts(eps=1e-6) if kind == "2.5" else LAYER_NORM,
        patch_bias=kind == "3",
        window=window,
        full=frozenset(int(each) for each in vision.numbers("fullatt_block_indexes") or ()) if window else frozenset(),
        grid_side=math.isqrt(vision.count("num_position_embeddings", default=2304)) if kind == "3" else 0,
        deep=tuple(int(each) for each in vision.numbers("deepstack_visual_indexes") or ()) if kind == "3" else (),
        theta=rope.number("rope_theta", default=THETA),
        image=image_facts(settings),
        max_pixels=pixel_bounds(settings)[1],
    )


def _mlp(vision: Fields, kind: str, hidden: int) -> Dense:
    inner = int(hidden * vision.number("mlp_ratio", default=4.0)) if kind == "2" else vision.count("intermediate_size")
    default = {"2": "quick_gelu", "2.5": "silu", "3": "gelu_pytorch_tanh"}[kind]
    activation = vision.choice(reading.ACTIVATIONS, "hidden_act", default=default)
    return Dense(intermediate=inner, activation=activation, gated=kind == "2.5", bias=True)
