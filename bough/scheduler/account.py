"""The books, checked: every page has one owner, and every row's table says what the tree says."""

from __future__ import annotations

import numpy as np

from bough.cache.prefix import AccountError, PrefixCache
from bough.cache.radix import Node
from bough.scheduler.queues import Queues, Row


def check_account(queues: Queues, cache: PrefixCache) -> None:
    """Raises `AccountError` on the first thing that does not add up. For tests: it looks at every page."""
    slots = queues.slots
    rows: list[Row] = [*queues.prefilling.values(), *queues.running.values(), *queues.leaving.values()]
    if len(rows) + slots.num_free != slots.num_slots or len({row.slot for row in rows}) != len(rows):
        raise AccountError(f"{len(rows)} rows and {slots.num_free} free slots of {slots.num_slots}")
    private = [slots.private_pages(row.slot) for row in rows]
    cache.check(np.concatenate(private) if private else np.empty(0, np.int32))
    locks: dict[int, int] = {}
    for row in rows:
        path: list[Node] = []
        node: Node | None = row.node
        while node is not None:
            locks[id(node)] = locks.get(id(node), 0) + 1
            path.append(node)
            node = node.parent
        pages = np.concatenate([node.pages for node in reversed(path)])
        held = slots.table[row.slot, : int(slots.tree_pages[row.slot])]
        if not np.array_equal(pages, held):
            raise AccountError(f"slot {row.slot} reads pages {held.tolist()}, its path has {pages.tolist()}")
        if slots.kv_high[row.slot] > slots.num_pages[row.slot] * cache.page_size:
            raise AccountError(
                f"slot {row.slot} has {slots.kv_high[row.slot]} tokens in {slots.num_pages[row.slot]} pages"
            )
        if not slots.out_settled[row.slot] <= slots.out_low[row.slot] <= slots.out_high[row.slot]:
            raise AccountError(
                f"slot {row.slot} has {slots.out_settled[row.slot]} output tokens, and expects "
                f"{slots.out_low[row.slot]} to {slots.out_high[row.slot]}"
            )
    for node in cache.tree.nodes():
        if node.locks != locks.get(id(node), 0):
            raise AccountError(f"{node!r} is locked by {locks.get(id(node), 0)} rows")
