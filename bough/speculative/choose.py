"""How many drafts of which rows are worth verifying: those that make the most tokens a millisecond."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bough.core.step import I32
from bough.speculative.acceptance import F64

_MARGIN = 1.03
"""Drafts must promise this much more than none: what they promise is an estimate."""


def choose(survival: Sequence[F64], num_tokens: int, cost_ms: Callable[[int], float]) -> I32:
    """Drafts for each row. `survival[row][i]` is how likely the row's first i + 1 drafts are all right: it falls with i.

    Taken are the likeliest of all drafts, as many of them as make (tokens yielded) / (time of the step) largest, at most
    `num_tokens`. `cost_ms`: what a step takes, by its number of drafts.
    """
    num_rows = len(survival)
    counts = np.zeros(num_rows, np.int32)
    lengths = [len(each) for each in survival]
    if not sum(lengths) or num_tokens <= 0:
        return counts
    likely = np.concatenate(survival)
    owner = np.arange(num_rows).repeat(lengths)
    # A row's later drafts are no likelier than its earlier ones; where they are as likely, they come later.
    order = np.argsort(-likely, kind="stable")[:num_tokens]
    expected = num_rows + np.cumsum(likely[order])
    best, best_count = _MARGIN * num_rows / cost_ms(0), 0
    for count in _worth_a_look(len(order)):
        rate = expected[count - 1] / cost_ms(count)
        if rate > best:
            best, best_count = rate, count
    np.add.at(counts, owner[order[:best_count]], 1)
    return counts


def _worth_a_look(most: int) -> Sequence[int]:
    """Numbers of drafts that are tried: all small ones, then fewer."""
    if most <= 64:
        return range(1, most + 1)
    return [*range(1, 65), *range(72, most, 8), most]
