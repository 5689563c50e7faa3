"""Integers that are held once, however often they occur: a long list of token ids takes a quarter of the memory so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

_NUM_SHARED: Final = 131_072
"""Ids of most vocabularies are below."""


def shared(numbers: Iterable[int]) -> list[int]:
    """Equal numbers, of which the small ones are the same objects in every list that comes from here."""
    same = _same()
    return [same[each] if 0 <= each < _NUM_SHARED else each for each in numbers]


@lru_cache(maxsize=1)
def _same() -> list[int]:
    return list(range(_NUM_SHARED))
