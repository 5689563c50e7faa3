"""Prepared media of one API process, by what they are: those that requests use now, and others as long as there is room."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass

from bough.core.errors import Overloaded
from bough.multimodal.errors import MediaTooLarge
from bough.multimodal.processor import Prepared

_MOST_HELD = 768
"""Media at most: each is a descriptor of this process."""
_MOST_NAMES = 4096
"""Names of media at most, 64 bytes and an entry of a table each. Several may name one medium."""


@dataclass(slots=True)
class _Held:
    prepared: Prepared
    descriptor: int
    users: int = 0


class FeatureCache:
    """Bounded by bytes and by number. What is in use stays; of the rest, what was used longest ago goes first."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._names: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._held)

    def use(self, digest: bytes) -> Prepared | None:
        """A medium that is there, for one more user."""
        held = self._held.get(digest)
        if held is None:
            self.misses += 1
            return None
        self.hits += 1
        held.users += 1
        self._held.move_to_end(digest)
        return held.prepared

    def name(self, name: bytes, digest: bytes) -> None:
        """From now on `use_named` finds a medium by this name, as long as it is there."""
        self._names[name] = digest
        self._names.move_to_end(name)
        if len(self._names) > _MOST_NAMES:
            self._names.popitem(last=False)

    def use_named(self, name: bytes) -> Prepared | None:
        """A medium that is there and has this name, for one more user. That there is none is no miss yet."""
        digest = self._names.get(name)
        if digest is None or digest not in self._held:
            return None
        self._names.move_to_end(name)
        return self.use(digest)

    def add(self, prepared: Prepared, descriptor: int) -> None:
        """Takes over a medium and its descriptor. Raises `MediaTooLarge` or `Overloaded` if there is no room for it; the
        descriptor is closed then."""
        size = prepared.features.num_bytes
        try:
            if size > self._most_bytes:
                raise MediaTooLarge(
                    what=f"this medium takes {size:,} bytes once it is prepared",
                    why=f"at most {self._most_bytes:,} are kept (--mm-processor-cache-size)",
                    fix="send a smaller one",
                )
            while self.num_bytes + size > self._most_bytes or len(self._held) >= _MOST_HELD:
                oldest = next((digest for digest, held in self._held.items() if not held.users), None)
                if oldest is None:
                    raise Overloaded(
                        what="media of other requests take all memory that is set aside for them",
                        why=f"it is {self._most_bytes:,} bytes (--mm-processor-cache-size)",
                        fix="come back later",
                    )
                self._drop(oldest)
        except BaseException:
            os.close(descriptor)
            raise
        self._held[prepared.digest] = _Held(prepared, descriptor)
        self.num_bytes += size

    def done(self, digest: bytes) -> None:
        """One user less."""
        held = self._held.get(digest)
        if held is not None:
            held.users -= 1

    def close(self) -> None:
        self._names.clear()
        for digest in list(self._held):
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        held = self._held.pop(digest)
        self.num_bytes -= held.prepared.features.num_bytes
        os.close(held.descriptor)
