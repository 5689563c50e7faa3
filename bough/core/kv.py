"""What is kept of tokens, and for how long: the layers of a model in groups, by lifetime.

A page holds some tokens of the layers of one *line*, and every request has a line of the page table for each of them. Pages
of all lines have equal bytes, so that one pool serves all. A group is one line, or several where it has more layers than
others; its lines live and die together. A *column* holds the same `page_size` tokens in all lines: one page in each, or
several smaller *parts* in lines whose layers keep more of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Tokens = TypeVar("Tokens", int, npt.NDArray[np.int32])


@dataclass(frozen=True, slots=True)
class Grows:
    """Every token is kept as long as its request, or a prefix in the cache."""

    @property
    def summary(self) -> str:
        return "all tokens"


@dataclass(frozen=True, slots=True)
class Window:
    """Of a request, the last tokens are kept: those that a query to come can see."""

    tokens: int
    """How many a query sees, its own included..."""
    chunked: bool = False
    """...or: it sees those since the last multiple of `tokens`."""

    @property
    def summary(self) -> str:
        return f"chunks of {self.tokens:,} tokens" if self.chunked else f"the last {self.tokens:,} tokens"

    def first_needed(self, position: Tokens) -> Tokens:
        """The first token that a query at this position, or a later one, sees."""
        if self.chunked:
            return position // self.tokens * self.tokens
        if isinstance(position, int):
            return max(0, position - self.tokens + 1)
        return np.maximum(position - (self.tokens - 1), 0).astype(np.int32)

    def most_columns(self, page_size: int) -> int:
        """Columns that hold what one query sees, wherever it stands."""
        if self.chunked:
            return -(-self.tokens // page_size) + (1 if self.tokens % page_size else 0)
        return (self.tokens - 2) // page_size + 2 if self.tokens > 1 else 1


Lifetime = Grows | Window


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV has one lifetime."""

    lifetime: Lifetime
    layers: tuple[tuple[int, ...], ...] = ((),)
    """By line: the layers that it holds, as numbers of KV caches. Deciding needs only how many lines there are."""
    parts: int = 1
    """Pages of a column in each line."""

    @property
    def num_lines(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class WindowPages:
    """Where the pages of a group with a window stand in a column."""

    lifetime: Window
    pages: slice
    most_columns: int

    @property
    def num_pages(self) -> int:
        return int(self.pages.stop) - int(self.pages.start)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups of a model, as planning needs them. Lines that grow come first."""

    groups: tuple[KvGroup, ...]
    page_size: int
    """Tokens of a column."""
    column_pages: int = field(init=False)
    """Pages of a column, in all lines..."""
    growing_pages: int = field(init=False)
    """...and how many of them, the first ones, are of groups that grow."""
    windows: tuple[WindowPages, ...] = field(init=False)

    def __post_init__(self) -> None:
        kinds = [isinstance(group.lifetime, Window) for group in self.groups]
        if kinds != sorted(kinds):
            raise ValueError("groups that grow come before those with windows")
        windows, page = [], 0
        for group in self.groups:
            begin, page = page, page + group.num_lines * group.parts
            if isinstance(group.lifetime, Window):
                most = group.lifetime.most_columns(self.page_size)
                windows.append(WindowPages(group.lifetime, slice(begin, page), most))
        object.__setattr__(self, "column_pages", page)
        object.__setattr__(self, "windows", tuple(windows))
        object.__setattr__(self, "growing_pages", page - sum(each.num_pages for each in windows))

    @property
    def line_parts(self) -> tuple[int, ...]:
        """By line: pages of a column."""
        return tuple(group.parts for group in self.groups for _ in range(group.num_lines))

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of this length holds between steps, at most."""
        columns = -(-num_tokens // self.page_size)
        pages = self.growing_pages * columns
        for window in self.windows:
            pages += window.num_pages * min(columns, window.most_columns)
        return pages

    def tokens_in(self, num_pages: int, most: int) -> int:
        """Tokens that one request can have with this number of pages, up to `most`."""
        low, high = 0, -(-most // self.page_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_for(middle * self.page_size) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return min(most, low * self.page_size)

    def gone(self, num_tokens: int) -> npt.NDArray[np.int32]:
        """Per window: leading columns that a request of this length does not need any more."""
        size = self.page_size
        return np.array([each.lifetime.first_needed(num_tokens) // size for each in self.windows], np.int32)


def one_line(page_size: int) -> KvLayout:
    """A model whose layers all keep all tokens."""
    return KvLayout((KvGroup(Grows()),), page_size)


class TablePlaces:
    """Where a column of a slot stands in the page table of the device: line after line, each with room for `num_slots + 1`
    slots (the last is spare) of as many parts as `columns` columns have."""

    def __init__(self, layout: KvLayout, num_slots: int, columns: int) -> None:
        first, start, stride, step = 0, [], [], []
        for parts in layout.line_parts:
            for part in range(parts):
                start.append(first + part)
                stride.append(columns * parts)
                step.append(parts)
            first += (num_slots + 1) * columns * parts
        self.size = first
        """Entries of the whole table."""
        self._is_single = len(start) == 1
        self._columns = columns
        self._start, self._stride, self._step = (np.array(each, np.int64)[:, None] for each in (start, stride, step))

    def of(self, slot: int, first: int, last: int) -> npt.NDArray[np.int64]:
        """Columns `first .. last - 1` of a slot, in the order of `[pages of a column, columns]`."""
        if self._is_single:
            start = slot * self._columns
            return np.arange(start + first, start + last)
        places: npt.NDArray[np.int64] = self._start + slot * self._stride + np.arange(first, last) * self._step
        return places.reshape(-1)

    def of_rows(self, slots: npt.NDArray[np.int64], column: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """One column of each slot, in the same order."""
        if self._is_single:
            return slots * self._columns + column
        places: npt.NDArray[np.int64] = self._start + slots * self._stride + column * self._step
        return places.reshape(-1)
