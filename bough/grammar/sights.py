"""The sight of a place in a grammar (its mask and derived facts): computed once, and cached for all matchers that get
there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from bough.core.step import I32, Mask
from bough.grammar.backend import NativeMatcher
from bough.grammar.bits import has_bit
from bough.grammar.cache import ByteCache

FEW = 2048
"""If more tokens than this are allowed, no text is forced."""
_CACHE_BYTES = 64 * 2**20


class Sight(Struct, frozen=True, eq=False):
    """The allowed next tokens at a place. Shared and immutable."""

    mask: I32
    num_allowed: int
    """Tokens in the mask, end tokens among them."""
    is_complete: bool
    """Whether the text so far is a complete answer."""
    is_end: bool
    """Whether nothing can follow."""
    is_open: bool
    """Many tokens are allowed, and the answer is not complete."""


def make_sights(masks: Mask, natives: Sequence[NativeMatcher], stop_ids: Sequence[int]) -> list[Sight]:
    """The sights of matchers whose masks these are."""
    words = masks.view(np.uint64) if masks.shape[1] % 2 == 0 else masks.view(np.uint32)
    counts = np.bitwise_count(words).sum(1, dtype=np.uint32).tolist()
    sights = []
    for mask, native, num_allowed in zip(masks, natives, counts, strict=True):
        is_complete = native.is_complete()
        is_end = is_complete and num_allowed == sum(has_bit(mask, token) for token in stop_ids)
        sights.append(Sight(mask.copy(), num_allowed, is_complete, is_end, num_allowed > FEW and not is_complete))
    return sights


class Sights:
    """LRU cache of sights, by the number of a grammar and of the sight in it."""

    def __init__(self, max_bytes: int = _CACHE_BYTES) -> None:
        self._kept: ByteCache[tuple[int, int], Sight] = ByteCache(max_bytes)

    def find(self, view: tuple[int, int]) -> Sight | None:
        return self._kept.get(view)

    def keep(self, view: tuple[int, int], sight: Sight) -> None:
        if self._kept.get(view) is not sight:
            self._kept.put(view, sight, sight.mask.nbytes)
