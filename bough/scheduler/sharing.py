"""Which decode rows read the same KV: groups of rows below one node of the tree, for attention that reads a span once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bough.cache.radix import Node
from bough.core.step import I64, SharedSpans
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues


class Groups:
    """Remembers the grouping until the set of decode rows changes."""

    def __init__(self) -> None:
        self._slots: I64 | None = None
        self._epoch = -1
        self._shared: SharedSpans | None = None

    def of(self, queues: Queues, limits: Limits, slots: I64) -> SharedSpans | None:
        if (
            self._slots is None
            or self._epoch != queues.epoch
            or len(slots) != len(self._slots)
            or not np.array_equal(slots, self._slots)
        ):
            self._slots, self._epoch = slots, queues.epoch
            nodes = [queues.running[slot].node for slot in slots.tolist()]
            self._shared = shared_spans(nodes, limits.group_min_tokens, limits.group_min_saved)
        return self._shared


def shared_spans(nodes: Sequence[Node], min_tokens: int, min_saved: int) -> SharedSpans | None:
    """Disjoint groups of rows, `nodes[row]` being where a row's shared path ends.

    Greedy: the cut that saves most, (rows - 1) x tokens, comes first; its rows are out; and so on while a span of at least
    `min_tokens` saves at least `min_saved`.
    """
    floor = max(min_tokens, 1)
    members: dict[Node, list[int]] = {}
    for row, node in enumerate(nodes):
        while node.locks < 2 and (above := node.parent) is not None:
            node = above
        if node.depth >= floor:
            if node in members:
                members[node].append(row)
            else:
                members[node] = [row]
    paths = {node: _ancestors(node, floor) for node in members}
    count: dict[Node, int] = {}
    for node, rows in members.items():
        for above in paths[node]:
            count[above] = count.get(above, 0) + len(rows)
    chosen: list[tuple[int, list[int]]] = []
    while count:
        best = max(count, key=lambda n: ((count[n] - 1) * n.depth, n.depth))
        if count[best] < 2 or (count[best] - 1) * best.depth < min_saved:
            break
        taken: list[int] = []
        for node in [n for n in members if best in paths[n]]:
            rows = members.pop(node)
            taken += rows
            for above in paths[node]:
                count[above] -= len(rows)
        chosen.append((best.depth, sorted(taken)))
    if not chosen:
        return None
    sizes = [len(rows) for _, rows in chosen]
    return SharedSpans(
        rows=np.array([row for _, rows in chosen for row in rows], np.int32),
        start=np.cumsum([0, *sizes]).astype(np.int32),
        num_tokens=np.array([depth for depth, _ in chosen], np.int32),
    )


def _ancestors(node: Node, min_tokens: int) -> list[Node]:
    """The node and those above it that are long enough."""
    path = []
    walk: Node | None = node
    while walk is not None and walk.depth >= min_tokens:
        path.append(walk)
        walk = walk.parent
    return path
