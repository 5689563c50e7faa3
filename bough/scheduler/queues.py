"""All requests of the engine, by phase. A phase is a class with its own queue; frequently used state is in
`SlotTable`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, ValuesView

import numpy as np
from msgspec import Struct, field

from bough.cache.nodes import Match, Node
from bough.core.grammar import GrammarQueue
from bough.core.messages import Generate, Ids, TokenLogprobs, TraceSpan
from bough.core.step import I64, KVMoves
from bough.scheduler.constrain import Gate
from bough.scheduler.drafting import NUM_DRAFT_POSITIONS, Drafter
from bough.scheduler.learn import HitRate, OutputRatio, StepCost
from bough.scheduler.limits import Limits
from bough.scheduler.mail import Mail
from bough.scheduler.media import JobMedia, MediaAccount
from bough.scheduler.slots import NEVER, SlotTable

_NO_IDS = np.empty(0, np.int32)
_CAP_HELD_STEPS = 64
"""Steps with prefills before the cap that is set after the device ran out of memory starts to grow. On a device that can't
do what the memory plan says, 10 of some 900 steps fail; 35 with 4, 4 with 256 (`benchmarks/scheduler_constants.py`)."""
_MOST_DEADLINES = 256
"""Number of deadlines that are kept even if their requests have ended: removing so few would cost more than they do."""


class Job(Struct, kw_only=True, eq=False):
    """A request from its arrival to its end: its parameters, and the state that all phases share."""

    ask: Generate
    id: int
    prompt: Ids
    key: I64
    """The prompt as the tree sees it: ids of media stand for their content."""
    media: JobMedia | None = None
    seq: int
    """Order of arrival."""
    limit: int
    """Output tokens at most: what was asked for, as far as context and memory allow."""
    stops: tuple[int, ...]
    accepted_s: float
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    grammar_s: float = 0.0
    """How long its grammar took to be compiled."""
    chunks: list[TraceSpan] = []
    """If it is traced: its prompt's chunks."""
    cached_tokens: int = 0
    retractions: int = 0
    """Times it lost its memory, for whatever reason."""
    dry_retractions: int = 0
    """Times it lost its memory because there was not enough."""
    oom_steps: int = 0
    output: Ids = field(default_factory=lambda: _NO_IDS)
    """Output so far, while it has no slot."""
    emitted: int = 0
    gate: Gate | None = None
    jumps: bool = False
    """Forced tokens may skip the sampler: nothing that it keeps or reports depends on seeing them."""
    may_draft: bool = False
    """A step may yield several of its tokens."""
    is_watched: bool = False
    """Its tokens are streamed to a client: they are sent before its end, and not only to look for a stop string."""
    scored_to: int = 0
    """Next prompt token to be scored, if prompt log-probabilities are wanted."""
    prompt_scores: TokenLogprobs | None = None
    output_scores: TokenLogprobs | None = None
    """Gathered, not sent yet."""
    hidden_to: int = 0
    """Positions whose hidden states have been gathered."""
    hidden: list[list[float]] = []
    drafted: tuple[int, int, int] = (0, 0, 0)
    """In slots that it had before: steps that it decoded in, drafts, and how many of them were right."""
    right_in: tuple[int, ...] = ()
    """Of those steps: how many had as many right drafts as the index says."""

    @property
    def scores_prompt(self) -> bool:
        """Prompt tokens remain to be scored."""
        spec = self.ask.logprobs
        return spec is not None and spec.start >= 0 and self.scored_to < len(self.prompt)

    @property
    def scores_next(self) -> bool:
        """Wants no output, but the log-probabilities of the token that would come first: it is sampled and dropped."""
        return self.limit == 0 and self.ask.logprobs is not None and not self.ask.pool and not self.ask.items

    @property
    def items_at(self) -> int:
        """Where the prompt's items begin; its length: it has none."""
        return len(self.prompt) - sum(self.ask.items)

    def tree_end(self, num_tokens: int) -> int:
        """How many of the row's first tokens may enter the prefix tree. Items to be scored do not: no prompt continues
        them."""
        return min(num_tokens, self.items_at) if self.ask.items else num_tokens

    def __post_init__(self) -> None:
        sampling = self.ask.sampling
        plain = not (sampling.penalised or sampling.bad_words or sampling.logit_processor)
        self.jumps = plain and self.ask.logprobs is None and not self.ask.hidden_states
        text, states = self.ask.text, bool(self.ask.hidden_states)
        cut_by_text = text is not None and bool(text.stop or text.stop_regex)
        self.may_draft = self.ask.speculate and not self.ask.pool and not (states and cut_by_text)
        self.is_watched = self.ask.stream and (self.ask.text is None or self.ask.text.every < NEVER)

    def match_limit(self, num_tokens: int) -> int:
        """How many of the request's tokens may come from the cache: what must be computed anew is left out."""
        limit = num_tokens - 1
        if self.scores_prompt:
            limit = min(limit, max(self.scored_to - 1, 0))
        if self.ask.hidden_states == "all":
            limit = min(limit, self.hidden_to)
        return 0 if self.ask.pool else limit


class Compiling(Struct, eq=False):
    """Its grammar is not ready."""

    job: Job


class Waiting(Struct, eq=False):
    """Has no memory yet, or has lost it."""

    job: Job
    key: I64
    """All tokens that must be in memory before the next one can be sampled."""
    skipped: int = 0
    """Steps in which younger requests ran while it was the oldest that waited. `commit` counts them."""
    memo: tuple[int, Match] | None = None
    """A match and the cache version it holds for."""


class Prefilling(Struct, eq=False):
    """Its tokens are being computed, chunk by chunk."""

    job: Job
    slot: int
    node: Node
    key: I64
    computed: int
    """0 <= computed < len(key): tokens whose KV is in memory or launched."""
    found: int = 0
    """As many as that when it got its slot."""
    in_tree: int = 0
    """As `Match.in_tree` then."""


class Running(Struct, eq=False):
    """Its last chunk is launched: it yields a token a step, or several."""

    job: Job
    slot: int
    node: Node


class Leaving(Struct, eq=False):
    """Has ended or lost its memory, but a step in flight still reads its pages. It is not planned any more, and keeps its
    slot and pages until that step has settled (`leave.let_go`, `leave.release`). If it goes back to the queue, tokens that
    its steps in flight yield still count, unless its KV is wrong."""

    job: Job
    slot: int
    node: Node
    requeue: bool
    """It will wait again; otherwise it has ended."""
    keep_kv: bool = True
    """Its full pages enter the prefix tree; otherwise what they hold is wrong."""


SlotPhase = Prefilling | Running | Leaving
"""Phases with a slot."""
Phase = Compiling | Waiting | Prefilling | Running | Leaving


class WaitingQueue:
    """Waiting requests: by priority if that counts, those that lost their memory first, then by arrival."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._returning: dict[int, dict[int, Waiting]] = {}
        self._fresh: dict[int, dict[int, Waiting]] = {}
        self._levels: list[int] = []
        self._size = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Waiting]:
        for returning, fresh in self.levels():
            yield from returning
            yield from fresh

    def add(self, waiting: Waiting) -> None:
        """Adds a new request."""
        level = self._level(waiting)
        self._fresh[level][waiting.job.id] = waiting
        self._count(waiting, 1)

    def put_back(self, waiting: Waiting) -> None:
        """Adds a retracted request: it comes before all others, except older retracted ones."""
        level = self._level(waiting)
        self._returning[level][waiting.job.id] = waiting
        ordered = sorted(self._returning[level].values(), key=lambda w: w.job.seq)
        self._returning[level] = {w.job.id: w for w in ordered}
        self._count(waiting, 1)

    def remove(self, waiting: Waiting) -> None:
        level = self._level(waiting)
        if self._returning[level].pop(waiting.job.id, None) is None:
            del self._fresh[level][waiting.job.id]
        if not self._returning[level] and not self._fresh[level]:
            del self._returning[level], self._fresh[level]
            self._levels = sorted(self._fresh, reverse=True)
        self._count(waiting, -1)

    def levels(self) -> Iterator[tuple[ValuesView[Waiting], ValuesView[Waiting]]]:
        """Per priority, most urgent first: those that return, and those that have just come, oldest first."""
        for level in self._levels:
            yield self._returning[level].values(), self._fresh[level].values()

    def oldest(self) -> Waiting | None:
        """The oldest of the most urgent."""
        if not self._levels:
            return None
        level = self._levels[0]
        back = next(iter(self._returning[level].values()), None)
        fresh = next(iter(self._fresh[level].values()), None)
        return back if fresh is None or (back is not None and back.job.seq < fresh.job.seq) else fresh

    def _level(self, waiting: Waiting) -> int:
        level = waiting.job.ask.priority if self._by_priority else 0
        if level not in self._fresh:
            self._fresh[level] = {}
            self._returning[level] = {}
            self._levels = sorted(self._fresh, reverse=True)
        return level

    def _count(self, waiting: Waiting, sign: int) -> None:
        self._size += sign
        self.num_tokens += sign * len(waiting.key)


class Counters(Struct):
    """Since the start."""

    accepted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    retractions: int = 0
    steps: int = 0
    failed_steps: int = 0
    oom_steps: int = 0
    """Of those, steps that ran the device out of memory."""
    prompt_tokens: int = 0
    """Computed, not found in the cache."""
    cached_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    """Of those, tokens that a grammar forced, taken without sampling."""
    draft_tokens: int = 0
    """Drafts that were verified."""
    accepted_tokens: int = 0
    """Of `draft_tokens`, those that were right."""
    accepted_at: list[int] = field(default_factory=lambda: [0] * NUM_DRAFT_POSITIONS)
    """The same by position behind the row's newest token; all further positions count at the last."""
    drafted_rows: int = 0
    """Times that a row was in a step with drafts."""
    decoded_rows: int = 0
    """Times that a row was in a step that yielded tokens for it, its first excepted."""
    cut_grammars: int = 0
    """Constrained answers that met their limit of tokens before their grammar was complete."""


class Queues:
    """The scheduler's state, all but the cache. `plan_step` reads it; `accept`, `commit`, `settle`, `leave` change it."""

    def __init__(self, limits: Limits, grammars: GrammarQueue | None = None) -> None:
        self.limits = limits
        self.grammars = grammars
        self.slots = SlotTable(limits)
        self.compiling: dict[int, Compiling] = {}
        self.waiting = WaitingQueue(by_priority=limits.priority)
        self.prefilling: dict[int, Prefilling] = {}
        self.running: dict[int, Running] = {}
        self.leaving: dict[int, Leaving] = {}
        self.where: dict[int, Phase] = {}
        """Request id -> its phase, for every request that has not ended."""
        self.gates: dict[int, Gate] = {}
        """Slot -> gate, for constrained rows."""
        self.forced: dict[int, list[int]] = {}
        """Slot -> the tokens that its next step brings in. The first is the row's newest token, which is output already or
        is being sampled, and has no KV yet; the others follow it without being sampled, and become output when that step
        settles (`Flight.forced`). `commit` removes the entry, even if the step takes only the first: the gate's mask then
        forces the next one, and `fill_masks` notes those after it."""
        self.proposed: dict[int, list[tuple[int, int]]] = {}
        """Slot -> the drafts that the device has for it, each with the one that it follows (counted from 1; 0: the newest
        token), for rows whose masks depend on them."""
        self.void: dict[int, int] = {}
        """Slot -> index of a step in flight: what it and all steps before it yield for the slot is dropped, because the
        row's newest token was changed after they began with the old one."""
        self.reporting: set[int] = set()
        """Slots whose rows yield more than token ids: log-probabilities, hidden states, a pooled vector."""
        self.moves: list[KVMoves] = []
        """KV to be moved before the next step computes anything."""
        self.deadlines: list[tuple[float, int]] = []
        self.media: MediaAccount | None = None
        """None: the model takes text only."""
        self.drafter: Drafter | None = None
        """Makes drafts for decode rows; None: each of them yields one token a step."""
        self.mail = Mail()
        self.ratio = OutputRatio(0.7)
        self.cost = StepCost()
        self.hits = HitRate()
        self.counters = Counters()
        self.next_seq = 0
        self.next_step = 0
        self.settled = -1
        """Every step up to this one has settled."""
        self.prefill_cap: int | None = None
        """Prefill tokens of a step at most, after the device ran out of memory (`shrink_prefills`); None: no such bound."""
        self._cap_held = 0
        self.owed_ms = 0.0
        """Milliseconds that slow prompts have taken from rows that decode beyond their part: they pause until it is given
        back."""
        self.draining = False
        self.screen: Callable[[Generate], None] | None = None
        """Called with every new request; raises for requests that must not be served."""
        self.epoch = 0
        """Changes with the set of running rows."""
        self._running_slots: I64 | None = None

    @property
    def num_live(self) -> int:
        """Rows that hold a slot."""
        return len(self.prefilling) + len(self.running) + len(self.leaving)

    def shrink_prefills(self, num_tokens: int) -> None:
        """Limits the prompt tokens of the next steps after the device ran out of memory."""
        self.prefill_cap, self._cap_held = num_tokens, _CAP_HELD_STEPS

    def grow_prefills(self) -> None:
        """Records that a step with prefills succeeded. The limit grows again only after a number of such steps."""
        if self.prefill_cap is None:
            return
        if self._cap_held:
            self._cap_held -= 1
            return
        self.prefill_cap += max(1, self.prefill_cap // 16)
        if self.prefill_cap >= self.limits.max_step_tokens:
            self.prefill_cap = None

    @property
    def idle(self) -> bool:
        """Nothing is queued and nothing runs."""
        return not self.where and not self.leaving

    def in_flight(self, slot: int) -> bool:
        return int(self.slots.last_step[slot]) > self.settled

    def is_void(self, slot: int, step: int) -> bool:
        """Whether the result of this step in flight is dropped for the row."""
        return bool(self.void) and step <= self.void.get(slot, -1)

    def start_running(self, row: Running) -> None:
        self.running[row.slot] = row
        self.where[row.job.id] = row
        self._running_slots = None
        self.epoch += 1

    def stop_running(self, slot: int) -> None:
        del self.running[slot]
        self._running_slots = None
        self.epoch += 1

    def running_slots(self) -> I64:
        """Slots of running rows, in the order in which they began to run. Not to be changed by the caller."""
        if self._running_slots is None:
            self._running_slots = np.fromiter(self.running, np.int64, len(self.running))
        return self._running_slots

    def take_moves(self) -> list[KVMoves]:
        moves, self.moves = self.moves, []
        return moves

    def add_deadline(self, job: Job) -> None:
        """Records a request's deadline. Deadlines of ended requests are removed from time to time."""
        if not job.ask.deadline_s:
            return
        if len(self.deadlines) >= _MOST_DEADLINES and len(self.deadlines) > 2 * len(self.where):
            self.deadlines = [entry for entry in self.deadlines if entry[1] in self.where]
            heapq.heapify(self.deadlines)
        heapq.heappush(self.deadlines, (job.ask.deadline_s, job.id))
