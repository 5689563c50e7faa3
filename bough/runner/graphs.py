"""Captured CUDA graphs of small steps: one per padded token, row and sample count and kind, captured when first wanted.

A graph serves any mixture of rows that fits its sizes, since attention reads its work from device buffers; steps of decode
rows alone have graphs of their own, without the launches that longer rows need, and so have steps with drafts, whose rows
have several samples. While a size is not captured, the next
larger one serves if it is not too wasteful: of small mixtures any, since launching a small step kernel by kernel takes the
host longer than a graph of 512 tokens takes the device. All graphs share one memory pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bough.core.step import MOST_LEVELS, NO_PROPOSER
from bough.memory.states import StatePool
from bough.runner.capture import capture
from bough.runner.forward import Extent, Forward
from bough.runner.inputs import Sizes, StepLayout, StepTensors
from bough.runner.proposing import Bounds, Read
from bough.runner.states import StepState

Kind = Literal["sampled", "logits"]
"""`sampled` ends in tokens; `logits` ends in logits, for steps whose rows need more than a plain draw."""

WASTE = 1.5
"""A captured graph serves a smaller decode step if it has at most this many times the step's tokens..."""
CHEAP_TOKENS = 64
"""...or this many: such steps take the time of reading the weights, however few their tokens."""
TABLE_ROOM = 256
"""Columns that a step may write to page tables beyond two a row: those of a prompt whose beginning is cached."""
SMALL_MIXTURE, MIXTURE_WASTE = 512, 1.25
"""A graph of at most SMALL_MIXTURE tokens serves any mixture that fits; a larger one serves mixtures of which it has at
most MIXTURE_WASTE times the tokens."""
WORTH_IT = 4
"""Mixed steps that no graph can serve are run eagerly this often before one is captured for them in passing."""


class GraphKey(NamedTuple):
    """What a graph was captured for."""

    tokens: int
    rows: int
    samples: int
    width: int
    """Samples of a row at most: 1, or a power of two where drafts are verified."""
    kind: Kind
    shared: bool
    decode: bool
    """No row has more than `width` tokens; otherwise any mixture."""
    proposals: int = NO_PROPOSER
    """As `Step.proposals`. Where a proposer runs, `decode` is of steps whose rows all decode."""
    drafted: bool = False
    """Layers keep states, and rows have drafts, or had some."""
    adapted: bool = False
    """Rows may have adapters."""


class Extents(NamedTuple):
    """How large a step is, as far as its graph depends on it."""

    tokens: int
    rows: int
    samples: int
    width: int = 1
    """Samples of the row that has most of them."""
    max_query: int = 1
    """Query tokens of the row that has most of them."""
    proposals: int = NO_PROPOSER
    drafted: bool = False
    """As in `GraphKey`..."""
    adapted: bool = False
    """...both of them."""


@dataclass(slots=True)
class Captured:
    """A graph with its inputs and outputs, which it overwrites on each replay."""

    layout: StepLayout
    buffer: Tensor
    tensors: StepTensors
    graph: torch.cuda.CUDAGraph
    result: Tensor
    """Tokens [samples], where there are drafts [rows, 1 + width] as `Forward.verify` gives it, where a proposer leaves some
    as `Forward.propose` gives it; or logits [samples, vocab]."""
    read: Read | None = None
    """For the proposer, where it runs behind the graph."""

    def replay(self, packed: Tensor) -> None:
        """Queues a step whose inputs are packed in pinned memory."""
        self.buffer.copy_(packed, non_blocking=True)
        self.graph.replay()


def token_sizes(largest: int) -> list[int]:
    """Token counts worth a graph: fine steps where padding costs most. With 8B parameters on an H200, 288 cost as much as
    320, and 352 to 480 more than 512, which fills the tiles of every product. From there on, tiles of 128 tokens.
    Experts of up to four tokens have a kernel that chooses them itself, also those of padding."""
    sizes = [1, 2, 3, 4, 8, *range(16, 64, 8), *range(64, 256, 16), 256, 320, 512, *range(640, largest + 1, 128)]
    return [size for size in sizes if size <= largest]


class Graphs:
    """The captured graphs of one runner."""

    def __init__(
        self,
        forward: Forward,
        *,
        max_tokens: int,
        context_length: int,
        spare_slot: int,
        column_pages: int = 1,
        states: StatePool | None = None,
    ) -> None:
        """`column_pages`: page-table writes that a column takes. `states`: of layers that keep one. How a row's tokens are
        cut is known on the host alone, so there are graphs only of steps whose rows have one token each, drafts aside."""
        self._forward = forward
        self._column_pages = column_pages
        self._states = states
        self._sizes = token_sizes(max_tokens)
        self._context_length = context_length
        self._spare_slot = spare_slot
        self._pool: Any = None
        self._captured: dict[GraphKey, Captured] = {}
        self._stand_ins: dict[GraphKey, Captured] = {}
        """What serves instead of sizes that are not captured, until another one is."""
        self._wanted: list[GraphKey] = []
        self._missed: Counter[GraphKey] = Counter()

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    def serve(self, size: Extents, kind: Kind, shared: bool) -> Captured | None:
        """The graph for a step. None: run it eagerly, for it is too large, or of a mixture that has been rare so far.

        A decode size without a graph that could stand in is captured at once: it will be used for many steps.
        """
        key = self._key(size, kind, shared)
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

    def forget(self) -> None:
        """Drops all graphs, because what they hold is to change."""
        self._captured.clear()
        self._stand_ins.clear()
        self._wanted.clear()
        self._pool = None

    def warm_up(self, steps: Iterable[Extents]) -> None:
        """Captures graphs for steps of these sizes, largest first so that the others fit in its memory."""
        for size in sorted(set(steps), reverse=True):
            key = self._key(size, "sampled", False)
            if key is not None and key not in self._captured:
                self.capture(key)

    def want(self, token_counts: list[int], *, shared: bool = False) -> None:
        """Notes decode sizes to be captured in idle moments, in their order, after what is noted already."""
        keys = [self._key(Extents(size, size, size), "sampled", shared) for size in reversed(token_counts)]
        self._wanted[:0] = [key for key in keys if key is not None]

    def _key(self, size: Extents, kind: Kind, shared: bool) -> GraphKey | None:
        tokens = self._padded(size.tokens)
        if tokens is None:
            return None
        width = 1 << (size.width - 1).bit_length()
        decode = size.max_query <= width
        if self._states is not None and not decode:
            return None
        rows = samples = tokens
        if not decode:
            rows = next((most for most in (1, 8, 64, 512) if size.rows <= most < tokens), tokens)
            samples = rows
        elif width > 1:
            rows = self._padded(size.rows) or tokens
        if size.samples > samples:
            samples = self._padded(size.samples) or tokens
        return GraphKey(tokens, rows, samples, width, kind, shared, decode, size.proposals, size.drafted, size.adapted)

    def _padded(self, count: int) -> int | None:
        """The next captured size; None: there is none as large."""
        at = bisect_left(self._sizes, count)
        return self._sizes[at] if at < len(self._sizes) else None

    def _larger(self, key: GraphKey) -> Captured | None:
        cheap, waste = (CHEAP_TOKENS, WASTE) if key.decode else (SMALL_MIXTURE, MIXTURE_WASTE)
        most = max(cheap, waste * key.tokens)
        fits = [
            other
            for other in self._captured
            if other.kind == key.kind
            and other.shared == key.shared
            and other.decode == key.decode
            and other.proposals == key.proposals
            and other.drafted == key.drafted
            and other.adapted == key.adapted
            and (other.width == 1) == (key.width == 1)
            and key.width <= other.width
            and key.tokens <= other.tokens <= most
            and key.rows <= other.rows
            and key.samples <= other.samples
        ]
        best = min(fits, key=lambda k: (k.tokens, k.samples, k.rows, k.width), default=None)
        return None if best is None else self._captured[best]

    def capture(self, key: GraphKey) -> Captured:
        captured = self._captured[key] = self._record(key)
        self._stand_ins.clear()
        return captured

    def rehearse(self, size: Extents, kind: Kind = "sampled", *, shared: bool = False) -> None:
        """Runs a step that its graph could serve, and that touches nothing that matters, without capturing it. One that is
        too large for graphs isn't run."""
        key = self._key(size, kind, shared)
        if key is not None:
            _, _, tensors, extent = self._idle_step(key)
            self._run(tensors, extent, key)

    def _record(self, key: GraphKey) -> Captured:
        layout, buffer, tensors, extent = self._idle_step(key)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, (result, read) = capture(lambda: self._run(tensors, extent, key), self._pool)
        return Captured(layout, buffer, tensors, graph, result, read)

    def _idle_step(self, key: GraphKey) -> tuple[StepLayout, Tensor, StepTensors, Extent]:
        members = MOST_LEVELS * key.rows if key.shared else 0
        writes = (2 * key.rows + TABLE_ROOM) * self._column_pages
        layout = StepLayout(Sizes(key.tokens, key.rows, key.samples, writes, members))
        device = self._forward.state.page_table.device
        buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        tensors = layout.tensors(buffer)
        self._make_idle(tensors)
        extent = Extent(
            max_query=key.width if key.decode else key.tokens,
            max_kv=self._context_length,
            span_tokens=key.tokens if key.shared else 0,
            has_drafts=key.width > 1,
            adapted=key.adapted,
        )
        return layout, buffer, tensors, extent

    def _run(self, tensors: StepTensors, extent: Extent, key: GraphKey) -> tuple[Tensor, Read | None]:
        forward = self._forward
        read = forward.reading(key.proposals)
        states = None if self._states is None else StepState(self._states, key.width if key.drafted else 0)
        hidden = forward.hidden(tensors, extent, tensors.sample_at_L, read=read, states=states)
        if read is not None:
            read.sampled_LD = hidden
        logits = forward.model.logits(hidden)
        if key.kind == "logits":
            return logits, read
        drawn = forward.draw(logits, tensors, has_drafts=key.width > 1)
        if key.width == 1:
            result = forward.keep(drawn, tensors)
        elif read is not None and read.tree is not None:
            walked = forward.walk(read, tensors, drawn, key.rows)
            tensors, drawn, result = walked.tensors, walked.drawn_L, walked.path.result
        else:
            result = forward.verify(drawn, tensors, key.rows, key.width)
        if read is None or not read.proposes:
            return result, None
        bounds = Bounds(kv_len=None, max_kv=self._context_length, only_decodes=key.decode, greedy=False)
        return forward.propose(read, tensors, drawn, result, bounds, key.proposals), None

    def _make_idle(self, tensors: StepTensors) -> None:
        """Inputs under which a run touches nothing that matters."""
        tensors.token_slots_T.fill_(self._spare_slot)
        tensors.loc_T.fill_(-1)
        tensors.slots_R.fill_(self._spare_slot)
        tensors.sample_slots_L.fill_(self._spare_slot)
        tensors.table_at_U.fill_(self._spare_slot * self._forward.state.page_table.shape[1])
        tensors.top_p_L.fill_(1.0)
        tensors.top_k_L.fill_(1)
