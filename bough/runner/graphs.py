"""Captured CUDA graphs of small steps: one per padded token count, row count and kind, captured when first wanted.

A graph serves any mixture of rows that fits its sizes, since attention reads its work from device buffers; steps of decode
rows alone have graphs of their own, without the launches that longer rows need. While a size is not captured, the next
larger one serves: for decode rows if it is not too wasteful, for mixtures always, since launching a small step kernel by
kernel takes the host longer than the largest graph takes the device. All graphs share one memory pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bough.runner.capture import capture
from bough.runner.forward import Extent, Forward
from bough.runner.inputs import Layout, Sizes, StepTensors

Kind = Literal["sampled", "logits"]
"""`sampled` ends in tokens; `logits` ends in logits, for steps whose rows need more than a plain draw."""

WASTE = 1.5
"""A captured graph serves a smaller decode step if it has at most this many times the step's tokens..."""
CHEAP_TOKENS = 64
"""...or this many: such steps take the time of reading the weights, however few their tokens."""
TABLE_ROOM = 256
"""Page-table writes that a step may make beyond two a row: those of a prompt whose beginning is cached."""
WORTH_IT = 4
"""Mixed steps that no graph can serve are run eagerly this often before one is captured for them in passing."""


class GraphKey(NamedTuple):
    """What a graph was captured for."""

    tokens: int
    rows: int
    kind: Kind
    shared: bool
    decode: bool
    """Serves steps of decode rows only, one token each; otherwise any mixture."""


@dataclass(slots=True)
class Captured:
    """A graph with its inputs and outputs, which it overwrites on each replay."""

    layout: Layout
    buffer: Tensor
    tensors: StepTensors
    graph: torch.cuda.CUDAGraph
    result: Tensor
    """Tokens [rows] or logits [rows, vocab]."""

    def replay(self, packed: Tensor) -> None:
        """Queues a step whose inputs are packed in pinned memory."""
        self.buffer.copy_(packed, non_blocking=True)
        self.graph.replay()


def token_sizes(largest: int) -> list[int]:
    """Token counts worth a graph: fine steps where padding costs most. With 8B parameters on an H200, 288 cost as much as
    320, and 352 to 480 more than 512, which fills the tiles of every product."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), 256, 320, 512]
    return [size for size in sizes if size <= largest]


class Graphs:
    """The captured graphs of one runner."""

    def __init__(self, forward: Forward, *, max_tokens: int, context_length: int, spare_slot: int) -> None:
        self._forward = forward
        self._sizes = token_sizes(max_tokens)
        self._context_length = context_length
        self._spare_slot = spare_slot
        self._pool: Any = None
        self._captured: dict[GraphKey, Captured] = {}
        self._stand_ins: dict[GraphKey, Captured] = {}
        """What serves instead of sizes that are not captured, until another one is."""
        self._wanted: list[GraphKey] = []
        self._missed: Counter[GraphKey] = Counter()

    def serve(self, num_tokens: int, num_rows: int, kind: Kind, shared: bool) -> Captured | None:
        """The graph for a step. None: run it eagerly, for it is too large, or of a mixture that has been rare so far.

        A decode size without a graph that could stand in is captured at once: it will be used for many steps.
        """
        key = self._key(num_tokens, num_rows, kind, shared)
        if key is None:
            return None
        if key in self._captured:
            return self._captured[key]
        if key in self._stand_ins:
            return self._stand_ins[key]
        stand_in = self._larger(key)
        if stand_in is not None:
            if key not in self._wanted:
                self._wanted.append(key)
            self._stand_ins[key] = stand_in
            return stand_in
        if not key.decode:
            self._missed[key] += 1
            if self._missed[key] <= WORTH_IT:
                return None
        return self.capture(key)

    def capture_one_wanted(self) -> bool:
        """Captures one size that a larger one stands in for. For idle moments."""
        while self._wanted:
            key = self._wanted.pop()
            if key not in self._captured:
                self.capture(key)
                return True
        return False

    def warm_up(self, steps: Iterable[tuple[int, int]]) -> None:
        """Captures graphs for steps of (tokens, rows), largest first so that the others fit in its memory."""
        for tokens, rows in sorted(set(steps), reverse=True):
            key = self._key(tokens, rows, "sampled", False)
            if key is not None and key not in self._captured:
                self.capture(key)

    def want(self, token_counts: list[int], *, shared: bool = False) -> None:
        """Notes decode sizes to be captured in idle moments, in their order, after what is noted already."""
        keys = [self._key(size, size, "sampled", shared) for size in reversed(token_counts)]
        self._wanted[:0] = [key for key in keys if key is not None]

    def _key(self, num_tokens: int, num_rows: int, kind: Kind, shared: bool) -> GraphKey | None:
        at = bisect_left(self._sizes, num_tokens)
        if at == len(self._sizes):
            return None
        tokens = self._sizes[at]
        decode = num_rows == num_tokens
        rows = tokens
        if not decode:
            rows = next((size for size in (1, 8, 64) if num_rows <= size < tokens), tokens)
        return GraphKey(tokens, rows, kind, shared, decode)

    def _larger(self, key: GraphKey) -> Captured | None:
        most = max(CHEAP_TOKENS, WASTE * key.tokens) if key.decode else self._sizes[-1]
        fits = [
            other
            for other in self._captured
            if other.kind == key.kind
            and other.shared == key.shared
            and other.decode == key.decode
            and key.tokens <= other.tokens <= most
            and key.rows <= other.rows
        ]
        return self._captured[min(fits, key=lambda k: (k.tokens, k.rows))] if fits else None

    def capture(self, key: GraphKey) -> Captured:
        captured = self._captured[key] = self._record(key)
        self._stand_ins.clear()
        return captured

    def _record(self, key: GraphKey) -> Captured:
        layout = Layout(Sizes(tokens=key.tokens, rows=key.rows, writes=2 * key.rows + TABLE_ROOM))
        device = self._forward.state.page_table.device
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        tensors = layout.tensors(buffer)
        self._make_idle(tensors)
        extent = Extent(max_query=1 if key.decode else key.tokens, max_kv=self._context_length, shared=key.shared)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, result = capture(lambda: self._run(tensors, extent, key.kind), self._pool)
        return Captured(layout, buffer, tensors, graph, result)

    def _run(self, tensors: StepTensors, extent: Extent, kind: Kind) -> Tensor:
        logits = self._forward.model.logits(self._forward.hidden(tensors, extent, tensors.last_at_R))
        return self._forward.draw(logits, tensors) if kind == "sampled" else logits

    def _make_idle(self, tensors: StepTensors) -> None:
        """Inputs under which a run touches nothing that matters."""
        tensors.token_slots_T.fill_(self._spare_slot)
        tensors.loc_T.fill_(-1)
        tensors.slots_R.fill_(self._spare_slot)
        tensors.sample_slots_R.fill_(self._spare_slot)
        tensors.table_at_U.fill_(self._spare_slot * self._forward.state.page_table.shape[1])
        tensors.top_p_R.fill_(1.0)
        tensors.top_k_R.fill_(1)
