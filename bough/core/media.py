"""Media as they cross from station to station: what an item is, where its features lie, which positions it fills.

An *item* is what a tower computes at once: an image, or a frame of a video that is encoded by itself. Its *key* says what it
is by content, so that equal items are computed once and share KV. Its *features* (pixels as a processor has cut them) lie in
shared memory that belongs to the API process; the process that opens them keeps them mapped.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

MediaKind = Literal["image", "video", "audio"]
KEY_BYTES = 32
"""Of a content key: a SHA-256 digest."""
_KEY_IDS = KEY_BYTES // 8
_ID_MASK = (1 << 62) - 1


class Features(Struct, frozen=True, kw_only=True):
    """An array in shared memory. The segment begins with the digest of what it holds (`ipc.features`)."""

    path: str
    """Where processes of this machine and user can open the segment."""
    digest: bytes
    """What the segment must begin with: a path may mean another segment after its owner let go of this one."""
    dtype: Literal["uint8", "float32"]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * (1 if self.dtype == "uint8" else 4)


class MediaItem(Struct, frozen=True, kw_only=True):
    """One item of a prompt: positions `start .. start + length - 1`, of which those with the id `token` get its embeddings,
    in order."""

    key: bytes
    """SHA-256 of the encoded bytes with the processor's identity and options, the item's number, and the tenant where
    tenants share nothing."""
    kind: MediaKind
    start: int
    length: int
    token: int
    """The placeholder's id. It is in the vocabulary, so that whatever looks ids up finds something."""
    count: int
    """Positions that get embeddings: how often `token` occurs."""
    cost: int
    """Tower tokens."""
    grid: tuple[int, ...]
    """The shape that the tower computes it in, in the family's own words."""
    features: Features
    first: int = 0
    last: int = 0
    """The item is `features[first:last]`; 0 and 0: all of it."""
    embedded: bool = False
    """Its features are what a tower would give for it: nothing is computed."""

    @property
    def stop(self) -> int:
        return self.start + self.length


def key_ids(key: bytes, count: int) -> npt.NDArray[np.int64]:
    """Ids that stand for an item's positions in the radix key. They are negative, so that none is a token's; four
    neighbours hold 248 bits of the content key, so that items share KV only if their keys are equal."""
    words = np.frombuffer(key, "<u8")
    place = np.arange(count, dtype=np.uint64)
    mixed = words[place % _KEY_IDS] + place * np.uint64(0x9E3779B97F4A7C15)
    ids: npt.NDArray[np.int64] = -1 - (mixed & np.uint64(_ID_MASK)).astype(np.int64)
    return ids
