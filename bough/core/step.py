"""What the deciding half hands to the computing half: one step of the model over many rows, as plain arrays.

Rows are requests. A row brings `num_query[row]` tokens into the step on top of those whose KV is already in its pages, and
yields tokens if `samples[row]`. The last `drafts[row]` of its query tokens are *drafts*: guesses of what follows, which the
step verifies; the others are *certain*. A row yields one token, and one more for each draft that turns out to be right.

Decode rows come first, then rows with forced tokens, then chunks of prompts. What a row needs on the device lives by *slot*:
the page table's line, the newest token, the number of KV tokens, the number of output tokens, the sampling parameters. A
slot is set up once (`SlotSetup`) and then only advanced, by the device itself: a decode step of a thousand rows carries
arrays and no objects, and the host may plan the next step before it knows how many tokens this one yields. Until it has
`Outcome.counts`, it works with bounds.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from bough.core.kv import Grows, KvGroup, KvLayout
from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
Pages = npt.NDArray[np.int32]
"""Page numbers by line and column (`core.kv`)."""
Mask = npt.NDArray[np.int32]
"""Vocabulary bit masks, [samples, ceil(vocab / 32)]; a set bit allows the token."""

FROM_DEVICE = -1
"""In `Step.tokens` of decode rows: the slot's newest token, which the host may not have seen yet."""
FIRST_DRAFT = -2
"""In `Step.tokens` of decode rows: the first draft that a proposer on the device left for the slot. `FIRST_DRAFT - i` is
draft i."""
NO_PROPOSER = -1
"""As `Step.proposals`: the proposer does not run in this step, or there is none."""


def _no_rows() -> I32:
    return np.empty(0, np.int32)


class SlotSetup(Struct, kw_only=True):
    """Fills a slot before the step's forward pass."""

    slot: int
    sampling: SamplingParams
    eos_ids: tuple[int, ...] = ()
    """Masked until `min_new_tokens` are out."""
    prompt: I32 | None = None
    """Prompt ids, only if a repetition penalty needs them."""
    output: I32 | None = None
    """Output ids so far, only if penalties or bad words need them (a request re-entering after retraction)."""
    num_output: int = 0
    """How many output tokens the request had already: a seeded row continues its own stream of draws."""
    rng_seed: int = 0
    """The seed to draw with: the request's own or one made for it."""
    logprobs: LogprobSpec | None = None
    hidden_states: str = ""
    second_at: int = 0
    """Pooling models: where a pair's second text begins; 0: there is one text."""
    items: I32 | None = None
    """Lengths of the items that the prompt ends in (`Generate.items`), from token `items_at` on; None: it has none."""
    items_at: int = 0


MOST_LEVELS = 4
"""Spans of a row at most: levels of a prefix tree that attention reads one by one."""


class SharedSpans(Struct, kw_only=True):
    """Spans of KV that several decode rows have in common; each is read once for all its rows.

    `rows[start[s]:start[s + 1]]` are the rows of span s. KV tokens `first[s] .. last[s] - 1` (multiples of the page size) of
    each of them lie in the same pages, those of the table of the span's first row. A row's spans are its KV tokens from 0
    on without a gap; span number n of a row has `level[s] == n`, so that spans of one level have no row in common. Levels
    ascend.
    """

    rows: I32
    start: I32
    first: I32
    last: I32
    level: I32


class SpanCosts(Struct, frozen=True, kw_only=True):
    """What attention takes for KV that is read per row, and for shared spans. Times are those of one layer. As they are by
    default, whatever can be shared is worth it."""

    read_ns: float = 1.0
    """One KV token, read from memory once."""
    row_queries: int = 1
    """Query tokens of a row that one read of its KV serves."""
    tile_ns: float = 0.0
    """One KV token of a span for one tile of query tokens, if it need not come from memory."""
    tile_queries: int = 1
    """Query tokens of a tile."""
    span_ns: float = 0.0
    """Beginning and ending a span."""
    merge_ns: float = 0.0
    """One query token's result of a span, written and read again."""
    fixed_ns: float = 0.0
    """What a step takes longer because spans are shared at all."""
    levels: int = MOST_LEVELS
    """Spans that a row may have."""
    most_queries: int = 1 << 30
    """Rows with more query tokens are not in spans."""

    def per_row_token(self, num_query: int) -> float:
        """Nanoseconds for one KV token that a row of `num_query` query tokens reads by itself."""
        return -(-num_query // self.row_queries) * self.read_ns

    def per_span_token(self, num_query: int) -> float:
        """Nanoseconds for one KV token of a span whose rows have `num_query` query tokens in all."""
        return max(self.read_ns, -(-num_query // self.tile_queries) * self.tile_ns)

    def per_span(self, num_query: int) -> float:
        """Nanoseconds for such a span besides its tokens."""
        return self.span_ns + num_query * self.merge_ns


class KVMoves(Struct, kw_only=True):
    """KV of single tokens, copied to other places and turned to other positions, in every layer.

    Places are `page * page_size + offset`. All sources are read before the first target is written.
    """

    source: I64
    target: I64
    turn: I32
    """How many positions further each token stands at its target; its key is rotated by as many."""


class Encode(Struct, kw_only=True):
    """An item of media that the tower computes before the step's forward pass."""

    features: npt.NDArray[Any]
    """As a processor has prepared it; never written to."""
    grid: tuple[int, ...]
    """As `core.media.MediaItem.grid`."""
    rows: I32
    """Of the embedding store: where what it gives for each of the item's positions goes."""
    embedded: bool = False
    """As `core.media.MediaItem.embedded`."""


class StepMedia(Struct, kw_only=True):
    """What a step has beyond tokens."""

    encode: list[Encode] = []
    at: I32 = _no_rows()
    """Tokens of the step (indices into `Step.tokens`) whose embeddings come from the store."""
    rows: I32 = _no_rows()
    """Rows of the store, one for each of `at`."""
    axes_at: I32 = _no_rows()
    """Tokens of the step whose positions have axes that differ, with those around them in their rows."""
    axes: npt.NDArray[np.int32] = np.empty((0, 0), np.int32)
    """Positions of the tokens in `axes_at`, [axes, len(axes_at)]. All axes of other tokens are the KV
    position, plus their slot's turn."""
    turn_slots: I32 = _no_rows()
    """Slots whose turn changes, from this step on."""
    turns: I32 = _no_rows()
    """The new turns: how far positions behind the media of a prompt are from the index of their KV."""
    spans: npt.NDArray[np.int32] = np.empty((0, 4), np.int32)
    """[items, 4], where tokens of an item see each other in both directions: slot, first token in the step, first position,
    tokens."""

    fixed_slots: I32 = _no_rows()
    """Slots whose cross attention reads other media than before, from this step on."""
    fixed_lengths: I32 = _no_rows()
    """Positions that the media of each of `fixed_slots` have; 0: there are none."""
    fixed_rows: I32 = _no_rows()
    """Rows of the store whose keys and values every layer with cross attention writes in this step."""
    fixed_at: npt.NDArray[np.int64] = np.empty((0, 0), np.int64)
    """Where they are written, [lines of media, len(fixed_rows)]: `page * page size + offset` of the line."""
    sights: npt.NDArray[np.int32] = np.empty((0, 5), np.int32)
    """[runs, 5], where tokens of prompts read other media of their slot than its answer will: slot, the first column of
    media that they read, positions, first token in the step, tokens."""


class StepStates(Struct, kw_only=True):
    """Where states come from and go, in models with layers that keep one. Places of snapshots count from 1 on."""

    load_slots: I32 = _no_rows()
    """Slots whose state is loaded before the forward pass."""
    load_from: I32 = _no_rows()
    """Where the states of `load_slots` are loaded from; 0: the row begins, with an empty state."""
    save_rows: I32 = _no_rows()
    """Rows of the step whose state is saved, in ascending order."""
    save_after: I32 = _no_rows()
    """Query tokens of the row after which its state is saved, ascending in each row."""
    save_to: I32 = _no_rows()
    """Where the states of `save_rows` are saved."""


class Step(Struct, kw_only=True):
    """One launch. Arrays are owned by the step: nothing changes them after `commit`."""

    index: int
    num_decodes: int
    """Leading rows that go on from what the device has of their slot. All of them sample."""
    slots: I32
    num_query: I32
    context: I32
    """KV tokens of the row before the step. Of decode rows an upper bound: their pages hold `context + num_query` tokens."""
    samples: Bool
    tokens: I32
    """Input ids of all rows, concatenated: those of decode rows begin with `FROM_DEVICE`."""
    drafts: I32 = _no_rows()
    """Per decode row: how many of its query tokens, the last ones, are drafts. Empty: the step has none."""
    table_at: I64
    """Page-table writes, made before the forward pass: flat positions `(line * (num_slots + 1) + slot) * pages_per_slot +
    column`, because each line has a spare slot."""
    table_pages: I32
    """The pages that are written at `table_at`."""
    moves: list[KVMoves] = []
    """Token-wise KV copies, one after the other, made before everything else."""
    copy_from: I32 = _no_rows()
    copy_to: I32 = _no_rows()
    """Page-to-page KV copies, made before the forward pass."""
    setups: list[SlotSetup] = []
    constrained: I32 = _no_rows()
    """Rows whose sample needs a grammar mask, given to `Launched.sample`."""
    prompt_logprobs: I32 = _no_rows()
    """Rows of prefill chunks whose input tokens are scored (from the slot's `LogprobSpec.start` on)."""
    following: I32 = _no_rows()
    """For each row of `prompt_logprobs`: the prompt token after its chunk, which its last position scores; -1: none."""
    shared: SharedSpans | None = None
    proposals: int = NO_PROPOSER
    """Drafts that the proposer on the device leaves for each row that samples; 0: it only keeps up with the rows' tokens."""
    room: I32 = _no_rows()
    """Where a proposer runs, per row: the KV tokens that its pages hold. It may write beyond the row's own within them."""
    following_ids: I32 = _no_rows()
    """Where a proposer runs, per row: the prompt token behind its last query token. 0 where the row samples one."""
    adapters: I32 = _no_rows()
    """Per row: its adapter, counted from 1; 0: it has none. Empty: no row has one."""
    media: StepMedia | None = None
    states: StepStates | None = None

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_decode_tokens(self) -> int:
        """Query tokens of decode rows."""
        return self.num_decodes + int(self.drafts.sum()) if len(self.drafts) else self.num_decodes


class LogprobArrays(Struct, kw_only=True):
    """Scores of `len(row)` positions. Widths are the largest asked for in the step; unused places hold id -1."""

    row: I32
    token_ids: I32
    logprobs: F32
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    chosen_logprobs: npt.NDArray[np.float32]
    """[positions, widest LogprobSpec.token_ids]"""


class Outcome(Struct, kw_only=True):
    """What a step produced, on the host. Row i yielded `tokens[i, :counts[i]]`."""

    tokens: I32
    """[rows, most tokens a row yielded]"""
    counts: I32
    """0 to 1 + drafts. A decode row that yields nothing is as it was before the step. Any runner may do so; the model runner
    does with rows that are `barred` and have drafts."""
    drafts: npt.NDArray[np.int32] | None = None
    """[rows, `Step.proposals`]: what the proposer on the device left for the rows' slots, which the host needs for masks;
    None where it left nothing."""
    parents: npt.NDArray[np.int32] | None = None
    """Of the same shape: the draft that each follows, counted from 1; 0: the row's newest token. None: each follows the one
    before it."""
    output_logprobs: LogprobArrays | None = None
    """In the order of rows, and of each row's tokens. A row may have more positions than it yields tokens."""
    prompt_logprobs: LogprobArrays | None = None
    """Position p of a row's chunk scores token p + 1 of its prompt; the last position of the last chunk is an output's."""
    hidden_states: dict[int, npt.NDArray[np.float32]] = {}
    """Row -> [tokens, width], for rows that asked. The last `drafts` of a row belong to its drafts, right or not."""
    embeddings: dict[int, npt.NDArray[np.float32]] = {}
    """Row -> pooled result, for pooling models."""
    failed: dict[int, str] = {}
    """Row -> why its result can't be used (say, logits that are not finite)."""
    barred: tuple[int, ...] = ()
    """Rows whose request forbids every token that its `allowed_token_ids` allow: what was drawn for them means nothing."""


class Launched(Protocol):
    """A step whose device work is queued."""

    @property
    def step(self) -> Step: ...

    @property
    def needs_masks(self) -> bool:
        """True until `sample` was called, if the step has constrained rows."""
        ...

    def sample(self, masks: Mask) -> None:
        """Queues sampling with masks applied to the samples of the rows `step.constrained`, in order: one for each row, and
        one more for each of its drafts. Waits for nothing."""
        ...

    def wait(self) -> Outcome:
        """Waits for the device and returns what the step produced. The only call that waits."""
        ...


class Runner(Protocol):
    """Runs steps in order."""

    def launch(self, step: Step) -> Launched:
        """Queues the step's device work and returns at once."""
        ...

    def clear(self) -> None:
        """Waits for everything queued; called when the engine idles or ends."""
        ...


class MediaLimits(Struct, frozen=True, kw_only=True):
    """What a runner can hold of media."""

    num_rows: int
    """Positions whose embeddings it keeps: those that steps are about to read, and others as a cache."""
    step_tokens: int
    """Tower tokens that a step computes at most, unless one item alone has more."""
    axes: int = 0
    """Axes of a position, where it has several; 0: it has one."""
    atomic: bool = False
    """As `TowerFacts.atomic`."""
    most_atomic: int = 0
    """Tokens of an atomic item, at most: what a step can prefill."""
    fixed: int = 0
    """Where cross attention reads the media: positions of a request's media at most; 0: they stand in the prompt."""
    required: bool = False
    """As `TowerFacts.required`."""


class RunnerLimits(Struct, frozen=True, kw_only=True):
    """What the computing half can hold; the deciding half plans within it."""

    num_slots: int
    """Rows that can be live at once (running requests)."""
    num_pages: int
    """KV pages, all of them free at the start. Page 0 is kept by the runner for padded rows and is never handed out."""
    page_size: int
    pages_per_slot: int
    """Columns of the page table: `ceil(context_length / page_size)`."""
    context_length: int
    max_step_tokens: int
    """Largest `Step.num_tokens`."""
    vocab_size: int
    spans: SpanCosts | None = None
    """None: attention has no use for shared spans."""
    kv_stays: str = ""
    """Why KV that was computed at some positions can't be moved to others; empty: it can."""
    groups: tuple[KvGroup, ...] = (KvGroup(Grows()),)
    """What is kept, and for how long."""
    num_snapshots: int | None = None
    """Places for states beside those of slots; None: no layer keeps a state."""
    media: MediaLimits | None = None
    """None: the model takes text only."""
    num_adapters: int = 0
    """Adapters that rows may have."""

    @property
    def layout(self) -> KvLayout:
        return KvLayout(self.groups, self.page_size)
