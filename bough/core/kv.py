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
    """Tokens that a query sees, its own included."""
    chunked: bool = False
    """If true, a query sees the tokens since the last multiple of `tokens` instead."""

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


@dataclass(frozen=True, slots=True)
class Fixed:
    """Of a request, what its media became is kept as long as the request, or as a cache for others with the same media. It
    is written once, before the request's first token is computed, and does not grow (cross attention)."""

    positions: int
    """Of the media of a request together, at most."""

    @property
    def summary(self) -> str:
        return f"up to {self.positions:,} positions of media"


Lifetime = Grows | Window | Fixed


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
    """The groups of a model, as planning needs them. Lines that grow come first, then those with windows; at the end those
    whose content is fixed, which have columns of their own: those hold positions of media instead of tokens."""

    groups: tuple[KvGroup, ...]
    page_size: int
    """Tokens of a column."""
    column_pages: int = field(init=False)
    """Pages of a column, in all lines that hold tokens."""
    growing_pages: int = field(init=False)
    """Of `column_pages`, those of groups that grow, which come first."""
    windows: tuple[WindowPages, ...] = field(init=False)
    fixed_pages: int = field(init=False)
    """Pages of a column of media, in all lines whose content is fixed; 0: there are none."""
    fixed_positions: int = field(init=False)
    """Positions of media that a request has at most."""

    def __post_init__(self) -> None:
        kinds = [order(group.lifetime) for group in self.groups]
        if kinds != sorted(kinds) or kinds.count(order(Fixed(0))) > 1:
            raise ValueError(
                "groups that grow come before those with windows, and one whose content is fixed is the last"
            )
        windows, page, fixed = [], 0, None
        for group in self.groups:
            if isinstance(group.lifetime, Fixed):
                fixed = group
                break
            begin, page = page, page + group.num_lines * group.parts
            if isinstance(group.lifetime, Window):
                most = group.lifetime.most_columns(self.page_size)
                windows.append(WindowPages(group.lifetime, slice(begin, page), most))
        object.__setattr__(self, "column_pages", page)
        object.__setattr__(self, "windows", tuple(windows))
        object.__setattr__(self, "growing_pages", page - sum(each.num_pages for each in windows))
        object.__setattr__(self, "fixed_pages", 0 if fixed is None else fixed.num_lines * fixed.parts)
        positions = fixed.lifetime.positions if fixed is not None and isinstance(fixed.lifetime, Fixed) else 0
        object.__setattr__(self, "fixed_positions", positions)

    @property
    def line_parts(self) -> tuple[int, ...]:
        """By line that holds tokens: pages of a column."""
        return self._parts(is_fixed=False)

    @property
    def fixed_parts(self) -> tuple[int, ...]:
        """By line whose content is fixed: pages of a column."""
        return self._parts(is_fixed=True)

    def _parts(self, *, is_fixed: bool) -> tuple[int, ...]:
        groups = [group for group in self.groups if isinstance(group.lifetime, Fixed) == is_fixed]
        return tuple(group.parts for group in groups for _ in range(group.num_lines))

    def line_widths(self, columns: int) -> tuple[int, ...]:
        """By line, those of media last: pages of a slot, if it has this number of columns of tokens."""
        media = self.fixed_columns(self.fixed_positions)
        return (*(columns * parts for parts in self.line_parts), *(media * parts for parts in self.fixed_parts))

    def fixed_columns(self, num_positions: int) -> int:
        """Columns of media that hold this number of positions."""
        return -(-num_positions // self.page_size)

    def pages_of_media(self, num_positions: int) -> int:
        """Pages that hold this number of positions of media."""
        return self.fixed_pages * self.fixed_columns(num_positions)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of this length holds between steps, at most."""
        columns = -(-num_tokens // self.page_size)
        pages = self.growing_pages * columns + self.pages_of_media(self.fixed_positions)
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


def order(lifetime: Lifetime) -> int:
    """Where groups of this lifetime stand among others."""
    match lifetime:
        case Grows():
            return 0
        case Window():
            return 1
        case Fixed():
            return 2


def one_line(page_size: int) -> KvLayout:
    """A model whose layers all keep all tokens."""
    return KvLayout((KvGroup(Grows()),), page_size)


class TablePlaces:
    """Where a column of a slot stands in the page table of the device: line after line, each with room for `num_slots + 1`
    slots (the last is spare) of as many parts as `columns` columns have. Lines of media come last, with columns of their
    own."""

    def __init__(self, layout: KvLayout, num_slots: int, columns: int) -> None:
        first, start, stride, step = 0, [], [], []
        for parts in layout.line_parts:
            for part in range(parts):
                start.append(first + part)
                stride.append(columns * parts)
                step.append(parts)
            first += (num_slots + 1) * columns * parts
        self._media: list[tuple[int, int, int]] = []
        """By line of media: its first entry, those of a slot, and those of a column."""
        for parts, width in zip(layout.fixed_parts, layout.line_widths(columns)[len(layout.line_parts) :], strict=True):
            self._media.append((first, width, parts))
            first += (num_slots + 1) * width
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

    def of_media(self, slot: int, columns: int) -> npt.NDArray[np.int64]:
        """The first columns of a slot in the lines of media, in the order of `[pages of a column of media, columns]`."""
        places = [
            first + slot * width + np.arange(columns) * parts + part
            for first, width, parts in self._media
            for part in range(parts)
        ]
        return np.concatenate(places)
