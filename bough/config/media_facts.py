"""Facts about a model's media encoder (tower) that the memory plan needs. Shapes of single families are read where
their tower is built (`models/*_vision.py`); these are the facts that all towers have.
"""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.media import MediaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFacts:
    """A tower: the encoder of images, video frames or audio of a multimodal model. Its *tokens* are patches (or frames
    of audio); its outputs are *positions* of the prompt."""

    kinds: tuple[MediaKind, ...]
    num_parameters: int
    width: int
    """Values per position: the embedding, and the features that deeper layers add (deepstack)."""
    tokens_per_position: int
    """Tower tokens that are merged into one position."""
    values_per_token: int
    """Values per tower token at the widest point of a block."""
    max_positions: int
    """Positions of the largest item that the checkpoint's processor produces."""
    pixels_per_position: int = 0
    """Pixels of an image per position, if images keep their size; 0: each image has a fixed number of positions."""
    atomic: bool = False
    """The language model attends in both directions within an item: it is computed in one chunk, and no cached prefix ends
    inside it."""
    required: bool = False
    """Every request must have media (Whisper)."""
