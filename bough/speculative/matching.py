"""Where a text has been before: earlier places whose last tokens are those at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bough.core.step import I32, I64

_NOWHERE: I64 = np.empty(0, np.int64)


class MatchPlaces(NamedTuple):
    """Places in a text, each behind the same last tokens as the end that was looked for."""

    ends: I64
    """Ascending. The token at each of them is what followed there."""
    length: int
    """How many tokens before each of them agree with the end; as many as any place has."""


NOWHERE = MatchPlaces(_NOWHERE, 0)
_AT_ONCE = 2048
"""Tokens that are compared at once: a few calls for all lengths take less than a few for each."""


def earlier(text: I32, most: int) -> MatchPlaces:
    """The earlier places in a text that agree with its own end in most tokens, of which at most `most` count."""
    count = len(text)
    if count < 2:
        return NOWHERE
    return narrow(text, np.flatnonzero(text[: count - 1] == text[count - 1]) + 1, text, 1, most)


def earlier_by_length(text: I32, most: int) -> Iterator[MatchPlaces]:
    """The earlier places that agree with a text's own end in 1, 2, ... tokens. Lengths with the same places as the next
    one are left out, and so are places beyond `most` tokens."""
    count = len(text)
    if count < 2:
        return
    ends = np.flatnonzero(text[: count - 1] == text[count - 1]) + 1
    length = 1
    while len(ends):
        further = ends[ends > length] if length < min(most, count) else ends[:0]
        further = further[text[further - 1 - length] == text[count - 1 - length]]
        if len(further) < len(ends):
            yield MatchPlaces(ends, length)
        ends, length = further, length + 1


def narrow(text: I32, ends: I64, suffix: I32, length: int, most: int) -> MatchPlaces:
    """Of places in `text` that agree with the end of `suffix` in `length` tokens, those that agree in most, up to `most`."""
    if not len(ends):
        return NOWHERE
    most = min(most, len(suffix))
    if length < most and len(ends) * (most - length) <= _AT_ONCE:
        back = np.arange(length, most)
        at = ends[:, None] - 1 - back
        same = (text[np.maximum(at, 0)] == suffix[len(suffix) - 1 - back]) & (at >= 0)
        lengths = length + np.logical_and.accumulate(same, axis=1).sum(1)
        longest = int(lengths.max())
        return MatchPlaces(ends[lengths == longest], longest)
    while length < most:
        further = ends[ends > length]
        further = further[text[further - 1 - length] == suffix[len(suffix) - 1 - length]]
        if not len(further):
            break
        ends, length = further, length + 1
    return MatchPlaces(ends, length)


def following(text: I32, end: int, count: int) -> I32:
    """The tokens from a place on. Where the text ends it goes on as it did from there: it is taken to repeat itself."""
    left = len(text) - end
    if count <= left:
        return text[end : end + count]
    return text[end + np.arange(count) % left]
