"""How tiny models of families whose towers see tiles are described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import SIZES as TEXT_SIZES
from tiny_vision import EOS, VOCAB
from torch import Tensor

TEXT = {**TEXT_SIZES, "vocab_size": VOCAB, "eos_token_id": EOS, "head_dim": 16}
VIT = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
HALF = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
SQUARE = {"height": 16, "width": 16}


def pooled(model: Any, given: dict[str, Any]) -> Tensor:
    """As most models name them."""
    found = model.model.get_image_features(**given).pooler_output
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in found])


@dataclass(frozen=True)
class VideoKind:
    """transformers' video processor of a family."""

    path: str
    """Of its class, below `transformers.models`."""
    settings: dict[str, Any]
    mark: str = "<video>"
    """What stands for a video in a text."""


@dataclass(frozen=True)
class TileFamily:
    """How a tiny model of a family and transformers' processor of it are made."""

    prefix: str
    config: dict[str, Any]
    processor: dict[str, Any]
    """Settings of the image processor..."""
    theirs: Callable[[Any, dict[str, Any]], Any]
    """...and what makes transformers' processor of a tokenizer and them."""
    special: dict[int, str] = field(default_factory=dict)
    mark: str = "<image>"
    """What stands for an image in a text."""
    video: VideoKind | None = None
    """Where the family takes videos."""
    save: Callable[[Any, Path], None] | None = None
    """Writes the checkpoint, where transformers writes another one than is published."""
    files: dict[str, Any] | None = None
    """preprocessor_config.json, if it holds other words than those of transformers' image processor."""
    features: Callable[[Any, dict[str, Any]], Tensor] = pooled
    """What transformers' model makes of what its processor made of images: [positions, width]."""
