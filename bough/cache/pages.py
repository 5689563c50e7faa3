"""The pool of KV pages: a stack of free page numbers."""

from __future__ import annotations

from collections import deque

import numpy as np

from bough.core.step import I32

_NONE = np.empty(0, np.int32)


class PoolDry(Exception):
    """More pages were asked for than are free: a planning error, never a user's."""


class PagePool:
    """Hands out page numbers 1..num_pages-1. Page 0 belongs to the runner and is never handed out.

    A page must not be reused while an unsettled step still reads it: `free_after` keeps it back until `settle` says that
    the step is over.
    """

    __slots__ = ("_later", "_stack", "_top", "num_deferred", "total")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is the runner's), got {num_pages}")
        self.total = num_pages - 1
        self.num_deferred = 0
        self._later: deque[tuple[int, I32]] = deque()
        self._stack: I32 = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._top = self.total

    @property
    def num_free(self) -> int:
        return self._top

    def alloc(self, count: int) -> I32:
        """Takes `count` pages. Raises `PoolDry` and takes none if there are fewer."""
        if count == 0:
            return _NONE
        top = self._top - count
        if top < 0:
            raise PoolDry(f"{count} pages asked for, {self._top} are free")
        pages = self._stack[top : self._top][::-1].copy()
        self._top = top
        return pages

    def free(self, pages: I32) -> None:
        """Gives pages back at once: no unsettled step may read them."""
        top = self._top + len(pages)
        if top > self.total:
            raise ValueError(f"{len(pages)} pages freed, but only {self.total - self._top} are out")
        self._stack[self._top : top] = pages[::-1]
        self._top = top

    def free_after(self, step: int, pages: I32) -> None:
        """Gives pages back once `step` has settled. Steps come in rising order."""
        if len(pages):
            self._later.append((step, pages))
            self.num_deferred += len(pages)

    def settle(self, step: int) -> None:
        """Frees pages that were kept back: every step up to `step` has settled."""
        while self._later and self._later[0][0] <= step:
            pages = self._later.popleft()[1]
            self.num_deferred -= len(pages)
            self.free(pages)

    def free_pages(self) -> I32:
        """A copy of the free page numbers."""
        return self._stack[: self._top].copy()

    def deferred_pages(self) -> I32:
        return np.concatenate([pages for _, pages in self._later]) if self._later else _NONE

    def rebuild(self, used: I32) -> None:
        """Makes exactly the pages outside `used` free, and forgets what was deferred (repair)."""
        free = np.ones(self.total + 1, np.bool_)
        free[0] = False
        free[used] = False
        pages = np.flatnonzero(free).astype(np.int32)
        self._top = len(pages)
        self._stack[: self._top] = pages[::-1]
        self._later.clear()
        self.num_deferred = 0
