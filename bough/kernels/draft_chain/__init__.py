"""What drafts that follow one another on the device need beside products and attention: where they stand, and what a head
reads.

in: rows as they are when their tokens have been drawn, tables of vectors. out: positions, lengths and KV locations of all
drafts of a step at once; two vectors of each token side by side. never: logits, or which token is drafted.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from bough.kernels.choices import standard

_IMPLEMENTATIONS = standard(__name__)


class ChainRows(NamedTuple):
    """R rows that are drafted for: int64 [R] each."""

    slots_R: Tensor
    kv_len_R: Tensor
    """KV tokens: the newest token stands at this position."""
    counter_R: Tensor
    """The number of the next draw."""


class ChainPages(NamedTuple):
    """Where the KV of rows lies."""

    room: Tensor
    """int64 [slots + 1]: KV tokens that a slot's pages hold. The last slot is spare."""
    page_table: Tensor
    """int32 [slots + 1, pages]"""
    page_size: int


class Ahead(NamedTuple):
    """Places behind the KV of each row, [P, R] of memory in which every place begins at a multiple of 16 bytes."""

    positions_PR: Tensor
    """int64"""
    counter_PR: Tensor
    """int64: the number of the draw behind each place."""
    kv_len_PR: Tensor
    """int32: KV tokens that a query there sees, as far as there are pages; one in the spare slot."""
    loc_PR: Tensor
    """int64: where its KV goes; -1: there is no page for it."""
    query_start_R1: Tensor
    """int32 [R + 1]: of one query a row."""
    slots_R: Tensor
    """int32"""


class ChainSide(NamedTuple):
    """A vector of each token."""

    x: Tensor
    """[T, W], or [V, W] with `at_T`."""
    at_T: Tensor | None = None
    """int64: the row of `x` that is each token's; None: they are in the tokens' order."""
    weight_W: Tensor | None = None
    """Of an RMS norm; None: the vector as it is."""
    eps: float = 0.0
    offset: float = 0.0


def look_ahead(rows: ChainRows, pages: ChainPages, places: int) -> Ahead:
    """Of the `places` positions behind each row's KV, the newest token's first."""
    made: Ahead = _IMPLEMENTATIONS.pick("look_ahead", rows.slots_R.device)(rows, pages, places)
    return made


def side_by_side(left: ChainSide, right: ChainSide) -> Tensor:
    """[T, W + W']: both vectors of each token, normed as `norm.rms_norm` does."""
    out: Tensor = _IMPLEMENTATIONS.pick("side_by_side", left.x.device)(left, right)
    return out
