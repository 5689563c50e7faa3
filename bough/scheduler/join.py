"""Joins the KV of branches, one after the other, into a new context. Nothing is computed again."""

from __future__ import annotations

from typing import Any

import numpy as np

from bough.cache.nodes import Node
from bough.cache.prefix import KeptTail, PrefixCache
from bough.core.errors import Conflict
from bough.core.messages import JoinBranches, Recall, pack_ids
from bough.core.step import I32, I64, KVMoves
from bough.scheduler.queues import Queues

_NO_PAGES = np.empty(0, np.int32)


def join(queues: Queues, cache: PrefixCache, ask: JoinBranches) -> dict[str, Any]:
    """Makes the joined context findable in its namespace; the next step moves the KV there before it computes anything.

    Raises `Conflict` with the reason if it can't be done; the cache is as before then.
    """
    branches = [_kept(cache, ask.namespace, name) for name in ask.branches]
    key = np.concatenate([branches[0].key, *(b.key[s:] for b, s in zip(branches[1:], ask.starts[1:], strict=True))])
    turns = _turns(branches, ask)
    _check(queues, cache, branches, ask, key, turns)
    nodes: list[Node] = []
    try:
        froms = (0, *ask.starts[1:])
        sources = [_places(cache, branch, nodes)[start:] for branch, start in zip(branches, froms, strict=True)]
        tree_pages, tail_page = _alloc(cache, len(key))
    finally:
        for node in nodes:
            cache.release(node, _NO_PAGES)
    source, turn = np.concatenate(sources), np.repeat(turns, [len(each) for each in sources])
    turn[: ask.starts[0]] = 0
    queues.moves.append(_moves(source, turn, tree_pages, tail_page, cache.page_size))
    root, _ = cache.lock(ask.joined, key, 0)
    whole = len(tree_pages) * cache.page_size
    node = cache.insert(root, key[:whole], tree_pages[None], step=queues.next_step).node
    cache.release(node, _NO_PAGES)
    cache.keep((ask.joined, ""), KeptTail(ask.joined, key, np.array([tail_page], np.int32), queues.next_step))
    return {"ids": pack_ids(key.astype(np.int32)), "tokens": len(key), "computed_tokens": 0}


def recall(cache: PrefixCache, ask: Recall) -> dict[str, Any]:
    """The tokens of kept requests, or of a joined context. Raises `Conflict` if one is not known any more."""
    return {"ids": [pack_ids(_kept(cache, ask.namespace, name).key.astype(np.int32)) for name in ask.names]}


def _kept(cache: PrefixCache, namespace: str, name: str) -> KeptTail:
    tail = cache.tails.get((namespace, name))
    if tail is None:
        raise Conflict(
            what=f"the KV of request {name!r} can't be reached" if name else "there is no such session",
            why="it was not sent with max_new_tokens 0, has not ended, or its memory was needed",
            fix="send it again with max_new_tokens 0 and join at once",
        )
    return tail


def _turns(branches: list[KeptTail], ask: JoinBranches) -> I32:
    """By how many positions each branch's own tokens are shifted."""
    starts = np.array(ask.starts)
    own = np.array([len(branch.key) for branch in branches]) - starts
    first = starts[0] + np.cumsum(own) - own
    turns: I32 = (first - starts + np.array(ask.shifts or (0,) * len(own))).astype(np.int32)
    return turns


def _check(
    queues: Queues, cache: PrefixCache, branches: list[KeptTail], ask: JoinBranches, key: I64, turns: I32
) -> None:
    if queues.limits.kv_stays:
        raise Conflict(
            what="contexts can't be joined with this model",
            why=queues.limits.kv_stays,
            fix="compute the joined text instead",
        )
    context = queues.limits.context_length
    if len(key) >= context:
        raise Conflict(what=f"the joined context has {len(key)} tokens", why=f"the context is {context} tokens")
    if len(key) < cache.page_size:  # without a node in the tree, a step that fails could not take the context back
        raise Conflict(what=f"the joined context has {len(key)} tokens", why=f"a page has {cache.page_size}")
    for start, turn, branch in zip(ask.starts, turns.tolist(), branches, strict=True):
        if branch.namespace != branches[0].namespace or not 0 <= start <= len(branch.key):
            raise Conflict(what="the branches do not go on from the same context")
        if start + turn < 0 or len(branch.key) + turn > context:
            raise Conflict(what="a shifted branch has positions outside the context", fix="shift it less")


def _places(cache: PrefixCache, tail: KeptTail, nodes: list[Node]) -> I64:
    """The place in memory of each token of a kept request. Locks its path, and adds the lock to `nodes`."""
    size = cache.page_size
    whole = len(tail.key) - len(tail.key) % size
    if cache.match_prefix(tail.namespace, tail.key, whole).num_tokens < whole:
        raise Conflict(what="the KV of a branch is gone", why="its memory was needed", fix="send the branch again")
    node, (pages,) = cache.lock(tail.namespace, tail.key, whole)
    nodes.append(node)
    pages = np.append(pages, tail.pages).astype(np.int64)
    at = np.arange(len(tail.key))
    places: I64 = pages[at // size] * size + at % size
    return places


def _alloc(cache: PrefixCache, num_tokens: int) -> tuple[I32, int]:
    """Allocates pages for the tree, and one for the tokens after the last page border, which rows that continue
    copy."""
    count = num_tokens // cache.page_size + 1
    if count > cache.num_available:
        raise Conflict(what=f"the joined context needs {count} pages of KV", why=f"{cache.num_available} can be had")
    pages = cache.alloc(count)
    return pages[:-1], int(pages[-1])


def _moves(source: I64, turn: I32, tree_pages: I32, tail_page: int, size: int) -> KVMoves:
    """Destinations of all tokens: in the tree's pages, and the last ones in the tail's page. At a border these are the
    same."""
    num = len(source)
    at = np.arange(num)
    whole = len(tree_pages) * size
    first = (num - 1) // size * size
    target = tree_pages.astype(np.int64)[at[:whole] // size] * size + at[:whole] % size
    tail = tail_page * size + at[first:] - first
    return KVMoves(
        source=np.concatenate([source[:whole], source[first:]]),
        target=np.concatenate([target, tail]),
        turn=np.concatenate([turn[:whole], turn[first:]]),
    )
