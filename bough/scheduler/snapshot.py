"""A view of the prefix tree and its requests for the playground: bounded in size, with numbers only, unless the first
tokens of spans are requested. A span is a run of tree nodes that the same requests read and where nothing branches off.
The paths of live requests come first, the rest by how recently it grew.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from msgspec import Struct

from bough.cache.nodes import Node
from bough.cache.prefix import PrefixCache
from bough.scheduler.queues import Compiling, Prefilling, Queues, Running, Waiting

SIBLINGS = 64
"""Maximum number of children of a span that are visited, beyond those on a live request's path."""
CHAIN = 1024
"""Nodes of one span at most; a longer run is drawn as several spans."""

TOP = 0
"""Parent of the topmost spans. The id of a span is its first page, and page 0 is never allocated; its address, if windows
have left it no page."""


class TreeSpan(Struct, frozen=True):
    """Consecutive tokens of the tree, and how many requests read them."""

    id: int
    parent: int
    tokens: int
    pages: int
    depth: int
    """Tokens from the root to the span's end."""
    requests: int
    """Live requests whose prefix goes through it."""
    hits: int
    """Requests that found it cached."""
    children: int
    """Branches below it, drawn or not."""
    first_ids: list[int] = []
    """Its first tokens, if they were asked for."""


class RowView(Struct, frozen=True, kw_only=True):
    """One request in the engine, in numbers."""

    rid: str
    phase: str
    prompt_tokens: int
    computed_tokens: int
    """Tokens whose KV is in memory."""
    cached_tokens: int
    """Of the prompt, what was found in the tree."""
    shared_tokens: int
    """Leading tokens that it reads together with another live request."""
    output_tokens: int
    output_limit: int
    span: int
    """The drawn span in which its prefix ends; 0: none."""
    seconds: float
    """Since it arrived."""


class Snapshot(Struct, frozen=True):
    spans: list[TreeSpan]
    """Parents before their children."""
    rows: list[RowView]
    more_spans: bool
    """The tree has more than could be drawn."""
    more_rows: int
    """Requests that are not among the rows."""


def snapshot(
    queues: Queues, cache: PrefixCache, *, max_spans: int, max_rows: int, now: float, span_tokens: int = 0
) -> Snapshot:
    """Reads, changes nothing. Costs at most the paths of `max_rows` requests and `max_spans * SIBLINGS` nodes.

    `span_tokens`: how many of each span's first token ids are in the picture.
    """
    phases = list(islice(_phases(queues), max_rows))
    live = [phase.node for phase in phases if isinstance(phase, Prefilling | Running)]
    drawing = _Drawing(live, max_spans, span_tokens)
    drawing.draw(cache.tree.roots())
    return Snapshot(
        spans=drawing.spans,
        rows=[_row(phase, queues, drawing, now) for phase in phases],
        more_spans=drawing.left_out,
        more_rows=max(0, len(queues.where) - len(phases)),
    )


Shown = Running | Prefilling | Waiting | Compiling


def _phases(queues: Queues) -> Iterator[Shown]:
    """Running requests, oldest first, then waiting ones in their order."""
    yield from queues.running.values()
    yield from queues.prefilling.values()
    yield from queues.waiting
    yield from queues.compiling.values()


class _Drawing:
    """Walks the tree from its roots, live paths first."""

    def __init__(self, live: list[Node], max_spans: int, span_tokens: int) -> None:
        self.spans: list[TreeSpan] = []
        self.left_out = False
        self._max_spans = max_spans
        self._span_tokens = span_tokens
        self._place: dict[int, int] = {}
        """Address of a node that was walked -> the id of its span."""
        self._on_path: dict[int, dict[int, Node]] = {}
        """Address of a node -> its children on the paths of live requests."""
        for node in live:
            self._note_path(node)

    def _note_path(self, node: Node) -> None:
        parent = node.parent
        while parent is not None:
            known = self._on_path.setdefault(id(parent), {})
            if id(node) in known:
                return
            known[id(node)] = node
            node, parent = parent, parent.parent

    def draw(self, roots: list[Node]) -> None:
        """Breadth first, so that a bound cuts the deepest branches; live ones go before all others."""
        pending = [(child, TOP) for root in roots for child in self._children(root)]
        while pending:
            live = [entry for entry in pending if entry[0].locks]
            quiet = [entry for entry in pending if not entry[0].locks]
            pending = []
            for node, parent in live or quiet:
                if len(self.spans) == self._max_spans:
                    self.left_out = True
                    return
                end = self._add(node, parent)
                pending += [(child, name_of(node)) for child in self._children(end)]
            if live:
                pending += quiet

    def _children(self, node: Node) -> list[Node]:
        known = self._on_path.get(id(node), {})
        newest = islice(reversed(node.children.values()), SIBLINGS)
        found = {**known, **{id(child): child for child in newest}}
        if len(node.children) > len(found):
            self.left_out = True
        return [child for child in found.values() if not child.detached]

    def _add(self, first: Node, parent: int) -> Node:
        """Draws the span that begins with `first`. Returns its last node."""
        name = name_of(first)
        tokens, pages, last = 0, 0, first
        ids: list[int] = []
        for last in _chain(first):
            if len(ids) < self._span_tokens:
                ids += last.key[: self._span_tokens - len(ids)].tolist()
            tokens, pages = tokens + len(last.key), pages + int(np.count_nonzero(last.pages))
            self._place[id(last)] = name
        self.spans.append(
            TreeSpan(name, parent, tokens, pages, last.depth, first.locks, first.hits, len(last.children), ids)
        )
        return last

    def span_of(self, node: Node) -> int:
        """The deepest drawn span on the node's path."""
        walk: Node | None = node
        while walk is not None:
            if id(walk) in self._place:
                return self._place[id(walk)]
            walk = walk.parent
        return TOP


def name_of(node: Node) -> int:
    """The id of a span that begins with this node."""
    return int(node.pages[:, 0].max(initial=0)) or id(node)


def _chain(first: Node) -> Iterator[Node]:
    """The node and those below it, as long as nothing branches off and the same requests read on."""
    node = first
    for _ in range(CHAIN):
        yield node
        if len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.locks != first.locks:
            return
        node = child


def _row(phase: Shown, queues: Queues, drawing: _Drawing, now: float) -> RowView:
    job, slots = phase.job, queues.slots
    computed, shared, output, span = 0, 0, len(job.output), TOP
    if isinstance(phase, Running | Prefilling):
        computed, output = int(slots.kv_settled[phase.slot]), int(slots.out_settled[phase.slot])
        shared, span = _shared_tokens(phase.node), drawing.span_of(phase.node)
    return RowView(
        rid=job.ask.rid,
        phase=type(phase).__name__.lower(),
        prompt_tokens=len(job.prompt),
        computed_tokens=computed,
        cached_tokens=job.cached_tokens,
        shared_tokens=shared,
        output_tokens=output,
        output_limit=job.limit,
        span=span,
        seconds=round(now - job.accepted_s, 3),
    )


def _shared_tokens(node: Node) -> int:
    walk: Node | None = node
    while walk is not None and walk.locks < 2:
        walk = walk.parent
    return walk.depth if walk is not None else 0
