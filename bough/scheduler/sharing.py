"""Which spans of KV decode rows read together: chosen from the prefix tree such that attention of the step is cheapest.

Rows below a node of the tree have the KV of its path in common. Attention may read a stretch of a path once for all rows
below its end (a *span*), on several levels of the tree, and the rest row by row. Every span costs something by itself, so
`shared_spans` weighs them with `SpanCosts`, by dynamic programming from the leaves to the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bough.cache.nodes import Node
from bough.core.step import I64, SharedSpans, SpanCosts
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues

MOST_CUTS = 64
"""Maximum number of nodes considered as ends of spans: those that could save the most KV tokens. 64 take 1 to 2 ms of
host time."""


class Groups:
    """Caches the spans until the decode rows or their numbers of query tokens change."""

    def __init__(self) -> None:
        self._slots: I64 | None = None
        self._queries: I64 | None = None
        self._epoch = -1
        self._shared: SharedSpans | None = None

    def of(self, queues: Queues, limits: Limits, slots: I64, queries: I64 | None = None) -> SharedSpans | None:
        """The spans of a step in which the rows of `slots` decode, with `queries[row]` query tokens each (None: one)."""
        if limits.spans is None:
            return None
        if (
            self._slots is None
            or self._epoch != queues.epoch
            or not np.array_equal(slots, self._slots)
            or not _same(queries, self._queries)
        ):
            self._slots, self._queries, self._epoch = slots, queries, queues.epoch
            nodes = [queues.running[slot].node for slot in slots.tolist()]
            self._shared = shared_spans(nodes, limits.spans, None if queries is None else queries.tolist())
        return self._shared


def _same(one: I64 | None, other: I64 | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


@dataclass(slots=True)
class _Cut:
    """A node where spans may end: several rows lie below it, and not all of them below one child."""

    depth: int
    rows: list[int] = field(default_factory=list)
    """Rows that have nothing in common with others beyond this node."""
    below: list[_Cut] = field(default_factory=list)
    num_query: int = 0
    """Query tokens of all rows below."""
    own_ns: float = 0.0
    """For one KV token, if each of `rows` reads it by itself."""
    takes: npt.NDArray[np.bool_] | None = None
    """[cut above that the span before ended at, spans so far]: whether a span should end here."""


def shared_spans(nodes: Sequence[Node], costs: SpanCosts, queries: Sequence[int] | None = None) -> SharedSpans | None:
    """The cheapest spans for rows of which `nodes[row]` is where the cached path ends and `queries[row]` is the number of
    query tokens (None: one each). Returns None if reading row by row is cheapest."""
    left_out = set() if queries is None else {row for row, count in enumerate(queries) if count > costs.most_queries}
    top = _cuts(nodes, left_out)
    if not top:
        return None
    _sum_up(top, costs, queries)
    above = np.zeros(1)
    saved = sum(_apart(cut) - float(_weigh(cut, above, costs)[0, 0]) for cut in top)
    if saved <= costs.fixed_ns:
        return None
    chosen: list[tuple[int, int, int, list[int]]] = []
    for cut in top:
        _choose(cut, 0, [0], 0, chosen)
    chosen.sort(key=lambda span: span[0])
    sizes = [len(rows) for *_, rows in chosen]
    return SharedSpans(
        rows=np.array([row for *_, rows in chosen for row in rows], np.int32),
        start=np.cumsum([0, *sizes]).astype(np.int32),
        first=np.array([first for _, first, _, _ in chosen], np.int32),
        last=np.array([last for _, _, last, _ in chosen], np.int32),
        level=np.array([level for level, *_ in chosen], np.int32),
    )


def _cuts(nodes: Sequence[Node], left_out: set[int]) -> list[_Cut]:
    """The topmost cuts of the tree below which rows share something, with all others below them."""
    ends: dict[Node, list[int]] = {}
    for row, node in enumerate(nodes):
        if row in left_out:
            continue
        while node.locks < 2 and (above := node.parent) is not None:
            node = above
        if node.depth:
            if node in ends:
                ends[node].append(row)
            else:
                ends[node] = [row]
    count = {node: len(rows) for node, rows in ends.items()}
    for node in ends:
        while (above := node.parent) is not None and above.depth and above not in count:
            count[above] = 0
            node = above
    most: dict[Node, int] = {}
    """Rows below the child that has most of them."""
    for node in sorted(count, key=_depth, reverse=True):
        above = node.parent
        if above is not None and above.depth:
            count[above] += count[node]
            most[above] = max(most.get(above, 0), count[node])
    ordered = sorted((node for node, below in count.items() if below > max(1, most.get(node, 0))), key=_depth)
    if len(ordered) > MOST_CUTS:
        ordered = _worthiest(ordered, count)
    made = {node: _Cut(node.depth) for node in ordered}
    top: list[_Cut] = []
    for node, cut in made.items():
        above = _nearest(node.parent, made)
        (top if above is None else made[above].below).append(cut)
    for node, rows in ends.items():
        at = _nearest(node, made)
        if at is not None:
            made[at].rows += rows
    return top


def _depth(node: Node) -> int:
    return node.depth


def _nearest(node: Node | None, made: dict[Node, _Cut]) -> Node | None:
    while node is not None and node not in made:
        node = node.parent
    return node


def _worthiest(nodes: list[Node], count: dict[Node, int]) -> list[Node]:
    """Those that most could be saved at: KV tokens since the node above, once less than there are rows."""
    kept = set(nodes)
    worth = {}
    for node in nodes:
        above = node.parent
        while above is not None and above not in kept:
            above = above.parent
        worth[node] = (count[node] - 1) * (node.depth - (above.depth if above is not None else 0))
    least = sorted(worth.values(), reverse=True)[MOST_CUTS - 1]
    return [node for node in nodes if worth[node] >= least][:MOST_CUTS]


def _sum_up(cuts: list[_Cut], costs: SpanCosts, queries: Sequence[int] | None) -> int:
    """Fills what cuts know of the rows below them. Returns the query tokens of all those rows."""
    for cut in cuts:
        if queries is None:
            own = len(cut.rows)
            cut.own_ns = own * costs.per_row_token(1)
        else:
            own = sum(queries[row] for row in cut.rows)
            cut.own_ns = sum(costs.per_row_token(queries[row]) for row in cut.rows)
        cut.num_query = own + _sum_up(cut.below, costs, queries)
    return sum(cut.num_query for cut in cuts)


def _apart(cut: _Cut) -> float:
    """Nanoseconds if all rows below a cut read by themselves what they could share."""
    return cut.own_ns * cut.depth + sum(_apart(each) for each in cut.below)


def _weigh(cut: _Cut, above: npt.NDArray[np.float64], costs: SpanCosts) -> npt.NDArray[np.float64]:
    """Least nanoseconds for the rows below a cut, [cut above that their last span ended at, spans so far]; notes which
    choice that is. `above`: depths of the cuts above, from the root's on."""
    here = np.append(above, float(cut.depth))
    rest = np.zeros((len(here), costs.levels + 1))
    for each in cut.below:
        rest += _weigh(each, here, costs)
    length = (cut.depth - above)[:, None]
    apart = length * cut.own_ns + rest[:-1]
    together = np.full_like(apart, np.inf)
    together[:, :-1] = length * costs.per_span_token(cut.num_query) + costs.per_span(cut.num_query) + rest[-1, 1:]
    cut.takes = together < apart
    return np.minimum(apart, together)


def _choose(
    cut: _Cut, at: int, above: list[int], level: int, chosen: list[tuple[int, int, int, list[int]]]
) -> list[int]:
    """Adds the spans that `_weigh` found best if the last one ended at depth `above[at]`. Returns the rows below."""
    assert cut.takes is not None
    here = [*above, cut.depth]
    takes = bool(cut.takes[at, level])
    rows = list(cut.rows)
    for each in cut.below:
        rows += _choose(each, len(above) if takes else at, here, level + takes, chosen)
    if takes:
        chosen.append((level, above[at], cut.depth, sorted(rows)))
    return rows
