"""Vocabulary bit masks: int32 words, bit t % 32 of word t // 32 is token t."""

from __future__ import annotations

import numpy as np

from bough.core.step import I32


def set_bit(mask: I32, token: int) -> None:
    mask.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))


def clear_bit(mask: I32, token: int) -> None:
    mask.view(np.uint32)[token >> 5] &= ~np.uint32(1 << (token & 31))


def has_bit(mask: I32, token: int) -> bool:
    return bool(int(mask.view(np.uint32)[token >> 5]) >> (token & 31) & 1)


def count_bits(mask: I32) -> int:
    return int(np.bitwise_count(mask.view(np.uint32)).sum())


def bits(mask: I32) -> list[int]:
    """The tokens of a mask with few of them."""
    words = np.flatnonzero(mask)
    spread = np.unpackbits(mask[words].view(np.uint8).reshape(len(words), 4), axis=1, bitorder="little")
    rows, columns = np.nonzero(spread)
    return (words[rows] * 32 + columns).tolist()  # type: ignore[no-any-return]


def first_bit(mask: I32) -> int:
    word = int(np.flatnonzero(mask)[0])
    bits = int(mask.view(np.uint32)[word])
    return 32 * word + (bits & -bits).bit_length() - 1
