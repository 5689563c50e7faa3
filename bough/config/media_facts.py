"""What a config says about the part of a model that turns media into embeddings: what memory is planned from.

Each family's own shapes are read where its tower is built (`models/*_vision.py`); this is what all towers have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.media import MediaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFacts:
    """A tower: an encoder of images, frames or sound beside a language model. Its *tokens* are patches (or frames of
    sound); what it leaves for the language model are *positions* of the prompt."""

    kinds: tuple[MediaKind, ...]
    num_parameters: int
    width: int
    """Values that it leaves for each position: the embedding, and what deeper layers add (deepstack)."""
    tokens_per_position: int
    """Tower tokens that are merged into one position."""
    values_per_token: int
    """Values that exist for each tower token at the widest point of a block."""
    max_positions: int
    """Positions of the largest item that the checkpoint's own processor makes."""
    pixels_per_position: int = 0
    """Pixels of an image behind one position, where images keep their size; 0: each has a fixed number of positions."""
    atomic: bool = False
    """The language model attends in both directions within an item: it is computed in one chunk, and no cached prefix ends
    inside it."""
    required: bool = False
    """Every request has media: the model knows nothing else."""
