"""Gemma 4's vision encoder, as configs describe it: images keep their aspect ratio, and patches have 2D positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bough.config import reading
from bough.config.fields import Fields
from bough.config.image_facts import ImageFacts, image_facts, processor_fields
from bough.config.media_facts import TowerFacts
from bough.config.model_facts import Activation, NormFacts
from bough.core.errors import ConfigError

BUDGETS: Final = (70, 140, 280, 560, 1120)
"""Numbers of positions that an image can have."""
_ZEROS: Final = (0.0, 0.0, 0.0)
_ONES: Final = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Vision:
    """A tower of this family."""

    hidden: int
    intermediate: int
    activation: Activation
    depth: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormFacts
    theta: float
    patch: int
    pool: int
    """Patches along a side of a position (they are pooled)."""
    num_positions: int
    """Number of columns, and of rows, that have a learned position."""
    clipped: bool
    """Linear layers clamp their inputs and outputs."""
    standardised: bool
    """Pooled patches are shifted and scaled by learned vectors."""
    most: int
    """Maximum number of positions of an image."""
    image: ImageFacts

    @property
    def unit(self) -> int:
        """Pixels along a side of a position."""
        return self.patch * self.pool

    def num_parameters(self, width: int) -> int:
        """`width`: of the language model."""
        hidden, heads = self.hidden, self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        block = hidden * (2 * heads + 2 * kv) + 3 * hidden * self.intermediate + 4 * hidden + 2 * self.head_dim
        block += 7 * 4 if self.clipped else 0
        ends = 3 * self.patch**2 * hidden + 2 * self.num_positions * hidden + hidden * width
        return self.depth * block + ends + (2 * hidden if self.standardised else 0)

    def tower(self, width: int, *, atomic: bool) -> TowerFacts:
        """What planning needs to know."""
        widest = max(5 * self.num_heads * self.head_dim, 3 * self.intermediate)
        return TowerFacts(
            kinds=("image",),
            num_parameters=self.num_parameters(width),
            width=width,
            tokens_per_position=self.pool**2,
            values_per_token=3 * self.hidden + widest + 3 * self.patch**2,
            max_positions=self.most,
            pixels_per_position=self.unit**2,
            atomic=atomic,
        )


def read_gemma4_vision(config: Fields) -> Gemma4Vision:
    """Raises `ConfigError` for what is not served."""
    vision, settings = config.inner("vision_config"), processor_fields(config)
    hidden, heads = vision.count("hidden_size", default=768), vision.count("num_attention_heads", default=12)
    kv_heads, width = vision.count("num_key_value_heads", default=heads), vision.count("head_dim", default=64)
    if width % 4 or kv_heads != heads or vision.flag("attention_bias"):
        raise ConfigError(
            what=f"the tower has {heads} heads of {width} values over {kv_heads} key-value heads",
            why="each has a key of its own without a bias, and is rotated by column and row, pairs of values each",
            fix="check vision_config in config.json",
        )
    most = settings.count("max_soft_tokens", default=280)
    if most not in BUDGETS:
        raise ConfigError(
            what=f"max_soft_tokens is {most}",
            why=f"images have {', '.join(map(str, BUDGETS))} positions at most",
            fix="check the image processor's settings",
        )
    rope = vision.inner("rope_parameters")
    return Gemma4Vision(
        hidden=hidden,
        intermediate=vision.count("intermediate_size", default=3072),
        activation=vision.choice(reading.ACTIVATIONS, "hidden_activation", default="gelu_pytorch_tanh"),
        depth=vision.count("num_hidden_layers", default=16),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        norm=reading.rms_norm(vision),
        theta=rope.number("rope_theta", default=100.0),
        patch=settings.count("patch_size", default=vision.count("patch_size", default=16)),
        pool=settings.count("pooling_kernel_size", default=vision.count("pooling_kernel_size", default=3)),
        num_positions=vision.count("position_embedding_size", default=10_240),
        clipped=vision.flag("use_clipped_linears"),
        standardised=vision.flag("standardize"),
        most=most,
        image=image_facts(settings.put(do_normalize=settings.flag("do_normalize")), mean=_ZEROS, std=_ONES),
    )
