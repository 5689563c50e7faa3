"""Pages with the keys and values of media for cross attention: written once, read by every request with the same media.
They are found by a key of their content. Content that no request reads stays cached and is evicted, least recently used
first, when its pages are needed.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from bough.cache.pages import PagePool
from bough.core.step import I32, Pages

_NONE = np.empty(0, np.int32)


class FixedContent:
    """The media of a request, as cross attention reads them."""

    __slots__ = ("is_lost", "items", "key", "num_positions", "pages", "step", "users")

    def __init__(self, key: bytes, pages: Pages, num_positions: int, items: tuple[bytes, ...], step: int) -> None:
        self.key = key
        self.pages = pages
        """[pages of a column of media, columns]"""
        self.num_positions = num_positions
        self.items = items
        """Keys of the media that it is made of."""
        self.step = step
        """The step that writes it."""
        self.users: set[int] = set()
        """Slots whose rows read it."""
        self.is_lost = False
        """It was never written: requests that read it have to be computed again."""

    def __repr__(self) -> str:
        return f"FixedContent({self.num_positions} positions, {self.pages.size} pages, users={sorted(self.users)})"


class FixedPages:
    """Which pages hold which content."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._kept: OrderedDict[bytes, FixedContent] = OrderedDict()
        """Least recently used first."""
        self._lost: list[FixedContent] = []
        """Not to be found any more, but rows that read it have not let go yet."""
        self.num_evictable = 0
        """Pages of content that no row reads."""
        self.num_cached = 0
        """Pages of content that a lookup can find."""
        self.num_detached = 0
        """Pages of content that no lookup can find but that rows hold."""

    def find(self, key: bytes) -> FixedContent | None:
        """Changes nothing."""
        return self._kept.get(key)

    def add(self, content: FixedContent) -> None:
        """Content whose pages were taken from the pool; nothing reads it yet."""
        self._kept[content.key] = content
        self.num_cached += content.pages.size
        self.num_evictable += content.pages.size

    def use(self, content: FixedContent, slot: int) -> None:
        """A row reads it from now on."""
        self._kept.move_to_end(content.key)
        if not content.users:
            self.num_evictable -= content.pages.size
        content.users.add(slot)

    def let_go(self, content: FixedContent, slot: int, *, keep: bool = True) -> None:
        """A row does not read it any more, nor does a step in flight for it. Without `keep` it is forgotten with its last
        reader."""
        content.users.remove(slot)
        if content.users:
            return
        if content.is_lost:
            self._lost.remove(content)
            self.num_detached -= content.pages.size
            self._pool.free(content.pages.ravel())
            return
        self.num_evictable += content.pages.size
        if not keep:
            self._drop(content)

    def evict(self, num_pages: int) -> int:
        """Frees at least `num_pages` pages of content that no row reads, or all of them if there are fewer. Returns how
        many."""
        freed = 0
        for content in [each for each in self._kept.values() if not each.users]:
            if freed >= num_pages:
                break
            freed += content.pages.size
            self._drop(content)
        return freed

    def drop_step(self, step: int, items: set[bytes]) -> None:
        """`step` has failed: what it was to write is lost, and so is what later steps write of `items`, media that it was to
        compute."""
        for content in list(self._kept.values()):
            if content.step == step or (content.step > step and not items.isdisjoint(content.items)):
                if not content.users:
                    self._drop(content)
                    continue
                del self._kept[content.key]
                self.num_cached -= content.pages.size
                content.is_lost = True
                self._lost.append(content)
                self.num_detached += content.pages.size

    def clear(self) -> int:
        """Evicts all content that no row reads. Returns the number of pages freed."""
        return self.evict(self.num_evictable)

    def forget(self) -> None:
        """Drops everything without freeing its pages, for a pool that is rebuilt."""
        self._kept.clear()
        self._lost.clear()
        self.num_cached = self.num_evictable = self.num_detached = 0

    def pages(self) -> I32:
        """All pages, found or held."""
        held = [content.pages.ravel() for content in (*self._kept.values(), *self._lost)]
        return np.concatenate(held) if held else _NONE

    def contents(self) -> list[FixedContent]:
        return [*self._kept.values(), *self._lost]

    def _drop(self, content: FixedContent) -> None:
        del self._kept[content.key]
        self.num_cached -= content.pages.size
        self.num_evictable -= content.pages.size
        self._pool.free(content.pages.ravel())
