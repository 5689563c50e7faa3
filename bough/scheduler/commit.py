"""Applies a plan on the host: changes slots, pages and the tree, and returns a `Step` of plain arrays."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from bough.cache.fixed import FixedContent
from bough.cache.nodes import Node
from bough.cache.prefix import PrefixCache
from bough.core.messages import LogprobSpec
from bough.core.step import FROM_DEVICE, I32, I64, NO_PROPOSER, SlotSetup, Step, StepMedia
from bough.scheduler.leave import retract
from bough.scheduler.limits import Limits
from bough.scheduler.media import FixedRow, MediaChunk, MediaStep
from bough.scheduler.plan import StepPlan
from bough.scheduler.policy import mix
from bough.scheduler.prefill import Share
from bough.scheduler.queues import Job, Prefilling, Queues, Running
from bough.scheduler.sharing import Groups
from bough.scheduler.slots import NEVER, NO_TOKEN, ONE
from bough.scheduler.states import StateSave, StateStep, keep_state

_NO_PLACES = np.empty(0, np.int64)
_NO_PAGES = np.empty(0, np.int32)

HELD_WITH_STOPS = 16
"""Maximum number of output tokens collected before they are sent, for requests with stop strings. Only the detokenizer
finds stop strings, so a request runs at most this many steps too long."""


class ChunkRow(Struct):
    """A prefill row of a step."""

    row: int
    slot: int
    job: Job
    key: I64
    start: int
    num_tokens: int
    is_last: bool
    in_tree: int = 0
    """As `Match.in_tree`."""


class Flight(Struct):
    """A committed step and what settling it needs to know."""

    step: Step
    slot_ids: I64
    """`step.slots` as int64, with which numpy indexes faster."""
    chunks: list[ChunkRow]
    forced: dict[int, list[int]]
    """Row -> forced tokens that it brought in, without the first, which is output already or is sampled by the step before.
    They become output when the step settles."""
    forced_accepted: bool = False
    rejected: dict[int, str] = {}
    """Row -> the error of its grammar."""
    saves: list[StateSave] = []
    """Recurrent states of chunks to be saved in the tree."""

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class _Arrays:
    """Builds the step's arrays for the rows after the `num_decodes` decode rows."""

    def __init__(self, num_decodes: int) -> None:
        self.num_decodes = num_decodes
        self.slots: list[int] = []
        self.num_query: list[int] = []
        self.context: list[int] = []
        self.samples: list[bool] = []
        self.tokens: list[I32] = []
        self.following_ids: list[int] = []
        self.table_at: list[I64] = []
        self.table_pages: list[I32] = []
        self.setups: list[SlotSetup] = []
        self.loads: list[tuple[int, int]] = []
        """Slots whose state is loaded, and from where."""
        self.tails: list[tuple[int, I32]] = []
        """Slots whose first private column begins as a copy, and the pages to copy."""

    def add(self, slot: int, context: int, tokens: I32, *, samples: bool, following_id: int = 0) -> int:
        """Returns the row's number in the step. `tokens` may be a view. `following_id`: as in `Step.following_ids`."""
        self.slots.append(slot)
        self.num_query.append(len(tokens))
        self.context.append(context)
        self.samples.append(samples)
        self.tokens.append(tokens)
        self.following_ids.append(following_id)
        return self.num_decodes + len(self.slots) - 1


def commit(
    plan: StepPlan, queues: Queues, cache: PrefixCache, groups: Groups, limits: Limits, *, now: float
) -> Flight | None:
    """Changes the queues and the cache as planned; `grow_tree` must follow. None: the plan only took memory away."""
    for slot in plan.retract:
        retract(queues, cache, _phase_of(queues, slot), dry=True)
    for slot in plan.preempt:
        retract(queues, cache, _phase_of(queues, slot), dry=False)
    if not plan.has_rows:
        return None
    queues.owed_ms = plan.owed_ms
    index = queues.next_step
    queues.next_step += 1
    queues.counters.steps += 1
    _count_overtaken(plan, queues)
    num = len(plan.decodes)
    arrays = _Arrays(num)
    prompts = [_enter(share, queues, cache, limits, arrays, now) for share in plan.shares]
    fixed = _take_media(plan, prompts, queues, cache, arrays, index) if limits.layout.fixed_pages else {}
    _give_pages(plan, prompts, queues, cache, limits, arrays)
    forced = _runs(plan, queues, arrays, index)
    chunks = _chunks(plan, prompts, queues, arrays, index)
    context = _decodes(plan, queues, index)
    if queues.slots.dirty:
        _resend_dirty(queues, arrays, index)
    slot_ids = _column(num, plan.decodes, arrays.slots, np.int64)
    step = Step(
        index=index,
        num_decodes=num,
        slots=slot_ids.astype(np.int32),
        num_query=_column(num, plan.drafts + ONE if len(plan.drafts) else 1, arrays.num_query, np.int32),
        context=_column(num, context, arrays.context, np.int32),
        samples=_column(num, True, arrays.samples, np.bool_),
        tokens=np.concatenate([_decode_tokens(plan), *arrays.tokens] if num else arrays.tokens),
        drafts=plan.drafts,
        table_at=np.concatenate(arrays.table_at) if arrays.table_at else _NO_PLACES,
        table_pages=np.concatenate(arrays.table_pages) if arrays.table_pages else _NO_PAGES,
        moves=queues.take_moves(),
        setups=arrays.setups,
        shared=groups.of(queues, limits, plan.decodes, _queries(plan)) if cache.enabled and num > 1 else None,
    )
    if limits.num_adapters:
        adapters = queues.slots.adapter[slot_ids]
        if adapters.any():
            step.adapters = adapters
    if queues.media is not None and chunks:
        at = plan.num_decode_tokens + sum(len(run.tokens) for run in plan.runs)
        step.media = _media(queues, chunks, fixed, at, index)
    if arrays.tails:
        table, first = queues.slots.table, queues.slots.tree_columns
        step.copy_from = np.concatenate([pages for _, pages in arrays.tails])
        step.copy_to = np.concatenate([table[:, slot, first[slot]] for slot, _ in arrays.tails])
    if queues.drafter is not None:
        _mark_proposals(step, slot_ids, plan, queues, arrays)
    flight = Flight(step, slot_ids, chunks, forced)
    if limits.num_snapshots is not None:
        made = StateStep(queues, cache, arrays.loads)
        made.add_decodes(slot_ids[:num], step.context[:num])
        for chunk in chunks:
            given = (chunk.row, chunk.slot, chunk.start, chunk.num_tokens, chunk.job, chunk.in_tree)
            made.add_chunk(*given, is_last=chunk.is_last)
        step.states, flight.saves = made.done(), made.saves
    _mark_scored(flight)
    if queues.gates:
        _mark_constrained(flight, queues)
    return flight


def _mark_proposals(step: Step, slot_ids: I64, plan: StepPlan, queues: Queues, arrays: _Arrays) -> None:
    """Sets what a proposer on the device does in the step, and records how many drafts rows will have."""
    slots = queues.slots
    slots.num_proposed[slot_ids[step.samples]] = max(plan.proposals, 0)
    if plan.proposals != NO_PROPOSER:
        step.proposals = plan.proposals
        step.room = slots.num_columns[slot_ids] * np.int32(queues.limits.page_size)
        step.following_ids = _column(len(plan.decodes), 0, arrays.following_ids, np.int32)


_T = TypeVar("_T", bound=np.generic)


def _column(num: int, decodes: npt.NDArray[Any] | int, rest: list[int] | list[bool], kind: type[_T]) -> npt.NDArray[_T]:
    """The values of `num` decode rows, then the others'."""
    if not num:
        return np.array(rest, kind)
    column = np.empty(num + len(rest), kind)
    column[:num] = decodes
    if rest:
        column[num:] = rest
    return column


def _phase_of(queues: Queues, slot: int) -> Prefilling | Running:
    phase = queues.prefilling.get(slot)
    return phase if phase is not None else queues.running[slot]


def _count_overtaken(plan: StepPlan, queues: Queues) -> None:
    """Counts a step in which younger requests run while the oldest one waits (`Waiting.skipped`, `policy.is_starved`)."""
    oldest = queues.waiting.oldest()
    if oldest is None or any(share.phase is oldest for share in plan.shares):
        return
    rows = queues.running_slots()
    youngest = max((share.phase.job.seq for share in plan.shares), default=0)
    if max(youngest, int(queues.slots.seq[rows].max()) if len(rows) else 0) > oldest.job.seq:
        oldest.skipped += 1


# -- admission ------------------------------------------------------------------------------------


def _enter(share: Share, queues: Queues, cache: PrefixCache, limits: Limits, arrays: _Arrays, now: float) -> Prefilling:
    """The row of a share: a prefill in progress, or a waiting request, which gets its slot and the pages of its prefix
    now."""
    waiting = share.phase
    if isinstance(waiting, Prefilling):
        return waiting
    job, slots = waiting.job, queues.slots
    queues.waiting.remove(waiting)
    node, pages = cache.lock(job.ask.namespace, waiting.key, share.start, job.ask.priority)
    slot = slots.take()
    phase = Prefilling(job, slot, node, waiting.key, share.start, share.start, share.in_tree)
    queues.prefilling[slot] = queues.where[job.id] = phase
    _fill_slot(queues, phase, limits)
    columns = pages.shape[1]
    slots.num_columns[slot] = slots.tree_columns[slot] = columns
    if slots.layout.windows:
        slots.gone[:, slot] = slots.layout.gone(columns * slots.layout.page_size)
    if limits.num_snapshots is not None:
        place, step = cache.snapshot_of(node) if share.start else (0, -1)
        arrays.loads.append((slot, place))
        slots.state_step[slot] = step
    if share.tail_pages is not None:
        arrays.tails.append((slot, share.tail_pages))
    if columns:
        slots.table[:, slot, :columns] = pages
        arrays.table_at.append(slots.places.of(slot, 0, columns))
        arrays.table_pages.append(pages.reshape(-1))
    if not job.admitted_s:
        job.admitted_s = now
        job.cached_tokens = share.start
        queues.hits.observe(len(job.prompt), share.start)
        queues.counters.cached_tokens += share.start
    arrays.setups.append(_setup(job, slot, len(job.output), limits))
    return phase


def _fill_slot(queues: Queues, phase: Prefilling, limits: Limits) -> None:
    slots, slot, job = queues.slots, phase.slot, phase.job
    num_prompt, num_output = len(job.prompt), len(job.output)
    slots.request_id[slot] = job.id
    slots.seq[slot] = job.seq
    slots.priority[slot] = max(-(2**31), min(job.ask.priority, 2**31 - 1))
    slots.history[slot, :num_prompt] = job.prompt
    if num_output:
        slots.history[slot, num_prompt : num_prompt + num_output] = job.output
    slots.prompt_len[slot] = num_prompt
    slots.known[slot] = num_prompt + num_output
    slots.kv_high[slot] = slots.kv_settled[slot] = phase.computed
    slots.out_high[slot] = slots.out_low[slot] = slots.out_settled[slot] = num_output
    slots.out_limit[slot] = job.limit
    slots.num_decoded[slot] = slots.num_drafts[slot] = slots.num_accepted[slot] = slots.num_proposed[slot] = 0
    if queues.drafter is not None:
        slots.num_right_in[slot] = 0
    slots.min_new[slot] = job.ask.sampling.min_new_tokens
    slots.adapter[slot] = job.ask.adapter
    slots.set_stops(slot, job.stops)
    slots.last_step[slot] = -1
    slots.live[slot] = True
    slots.emitted[slot] = job.emitted
    slots.hold[slot] = _hold(job)
    slots.watched[slot] = job.is_watched
    slots.pinned[slot] = job.dry_retractions >= limits.max_retractions
    if job.gate is not None:
        queues.gates[slot] = job.gate
    if job.ask.logprobs is not None or job.ask.hidden_states or job.ask.pool:
        queues.reporting.add(slot)
    if queues.drafter is not None:
        queues.drafter.begin(slot, job)


def _hold(job: Job) -> int:
    """Output tokens to gather before they are sent on."""
    text = job.ask.text
    every = max(text.every, 1) if text is not None else 1
    if not job.ask.stream:
        every = int(NEVER)
    watched = text is not None and bool(text.stop or text.stop_regex)
    if watched and job.ask.hidden_states:  # hidden states after the stop must not be sent
        return 1
    return min(every, HELD_WITH_STOPS) if watched else every


def _setup(job: Job, slot: int, num_output: int, limits: Limits) -> SlotSetup:
    ask, sampling, spec = job.ask, job.ask.sampling, job.ask.logprobs
    if spec is not None and spec.start >= 0 and not job.scores_prompt:
        spec = LogprobSpec(top=spec.top, token_ids=spec.token_ids, processed=spec.processed)
    needs_output = sampling.penalised or bool(sampling.bad_words) or sampling.logit_processor is not None
    return SlotSetup(
        slot=slot,
        sampling=sampling,
        eos_ids=job.stops,
        prompt=job.prompt if sampling.repetition_penalty != 1.0 else None,
        output=job.output if needs_output and len(job.output) else None,
        num_output=num_output,
        rng_seed=sampling.seed if sampling.seed is not None else mix(limits.seed, job.id) >> 1,
        logprobs=spec,
        hidden_states=ask.hidden_states,
        second_at=ask.second_at,
        items=np.array(ask.items, np.int32) if ask.items else None,
        items_at=job.items_at if ask.items else 0,
    )


# -- pages ----------------------------------------------------------------------------------------


def _give_pages(
    plan: StepPlan, prompts: list[Prefilling], queues: Queues, cache: PrefixCache, limits: Limits, arrays: _Arrays
) -> None:
    """Allocates the step's new columns."""
    slots, size, height = queues.slots, limits.page_size, limits.layout.column_pages
    growing = plan.decodes.repeat(plan.num_new_columns) if plan.num_decode_columns else plan.decodes[:0]
    wants = [(run.slot, run.num_new_columns) for run in plan.runs]
    wants += [(phase.slot, share.num_new_columns(size)) for phase, share in zip(prompts, plan.shares, strict=True)]
    at = len(growing)
    columns = at + sum(count for _, count in wants)
    pages = cache.alloc(columns * height).reshape(height, columns)
    if at:
        column = slots.num_columns[growing]
        if at > np.count_nonzero(plan.num_new_columns):  # some rows get several
            first = np.cumsum(plan.num_new_columns) - plan.num_new_columns
            column = column + (np.arange(at) - first.repeat(plan.num_new_columns)).astype(np.int32)
        slots.table[:, growing, column] = pages[:, :at]
        slots.num_columns[growing] = column + ONE
        arrays.table_at.append(slots.places.of_rows(growing, column))
        arrays.table_pages.append(pages[:, :at].reshape(-1))
    for slot, count in wants:
        if count > 0:
            held = int(slots.num_columns[slot])
            mine = pages[:, at : at + count]
            slots.table[:, slot, held : held + count] = mine
            slots.num_columns[slot] = held + count
            arrays.table_at.append(slots.places.of(slot, held, held + count))
            arrays.table_pages.append(mine.reshape(-1))
            at += count


def _take_media(
    plan: StepPlan, prompts: list[Prefilling], queues: Queues, cache: PrefixCache, arrays: _Arrays, index: int
) -> dict[int, FixedRow]:
    """Gives new rows the pages of their media for cross attention. Returns what each reads, by slot. Cached content is
    locked first, so that it is not evicted for new content."""
    slots = queues.slots
    begun = [phase for phase, share in zip(prompts, plan.shares, strict=True) if share.phase is not phase]
    found = {phase.slot: FixedRow() for phase in begun}
    for phase in sorted(begun, key=lambda each: _fixed_content(cache, each) is None):
        media = phase.job.media
        if media is None or not media.fixed_key:
            continue
        content = _fixed_content(cache, phase)
        fresh = content is None
        if content is None:
            items = tuple(item.key for item in media.items)
            content = cache.add_fixed(media.fixed_key, media.fixed.size, items, index)
        cache.fixed.use(content, phase.slot)
        slots.content[phase.slot] = content
        places = media.fixed_places(slots.layout, content.pages) if fresh else None
        found[phase.slot] = FixedRow(media.fixed.sights[-1].length, places)
        arrays.table_at.append(slots.places.of_media(phase.slot, content.pages.shape[1]))
        arrays.table_pages.append(content.pages.reshape(-1))
    return found


def _fixed_content(cache: PrefixCache, phase: Prefilling) -> FixedContent | None:
    media = phase.job.media
    return None if media is None else cache.find_fixed(media.fixed_key)


def _resend_dirty(queues: Queues, arrays: _Arrays, index: int) -> None:
    """Sends page-table entries that changed since the row's last step."""
    slots = queues.slots
    for slot in [slot for slot in slots.dirty if slots.last_step[slot] == index]:
        lo, hi = slots.dirty.pop(slot)
        arrays.table_at.append(slots.places.of(slot, lo, hi))
        arrays.table_pages.append(slots.table[:, slot, lo:hi].flatten())


def grow_tree(flight: Flight, queues: Queues, cache: PrefixCache) -> None:
    """Adds the full pages of a committed step's chunks to the tree. The next step can read them because the device
    executes steps in order. Call it after the launch, which does not need it, and before anything else reads the tree
    or the queues.
    """
    if not cache.enabled:
        return
    size = cache.page_size
    for chunk in flight.chunks:
        for save in [each for each in flight.saves if each.slot == chunk.slot]:
            node = _grow_to(save.num_tokens, chunk, flight, queues, cache)
            keep_state(cache, node, save, flight.step.index)
        end = chunk.job.tree_end(chunk.start + chunk.num_tokens)
        _grow_to(end - end % size, chunk, flight, queues, cache)
    flight.saves = []


def _grow_to(end: int, chunk: ChunkRow, flight: Flight, queues: Queues, cache: PrefixCache) -> Node:
    """Enters a chunk's pages up to `end` into the tree. Returns the row's node."""
    slots, size, slot = queues.slots, cache.page_size, chunk.slot
    phase = _phase_of(queues, slot)
    node = phase.node
    if end <= node.depth:
        return node
    first = node.depth // size
    extended = cache.insert(
        node,
        chunk.key[node.depth : end],
        slots.table[:, slot, first : end // size],
        step=flight.step.index,
        gone=slots.gone[:, slot],
        priority=chunk.job.ask.priority,
    )
    phase.node = extended.node
    slots.tree_columns[slot] = end // size
    for at, pages in extended.switched:
        lo, hi = first + at, first + at + pages.shape[1]
        slots.table[:, slot, lo:hi] = pages
        slots.mark_dirty(slot, lo, hi)
    return extended.node


# -- rows -----------------------------------------------------------------------------------------


def _queries(plan: StepPlan) -> I64 | None:
    """Query tokens of the rows that decode; None: one each."""
    return plan.drafts.astype(np.int64) + 1 if len(plan.drafts) else None


def _decode_tokens(plan: StepPlan) -> I32:
    """Input ids of the decode rows: each row's last sampled token, and its drafts."""
    num = len(plan.decodes)
    if not len(plan.drafts):
        return np.full(num, FROM_DEVICE, np.int32)
    ids = np.empty(num + len(plan.draft_tokens), np.int32)
    is_draft = np.ones(len(ids), np.bool_)
    is_draft[np.cumsum(plan.drafts + ONE) - plan.drafts - ONE] = False
    ids[~is_draft] = FROM_DEVICE
    ids[is_draft] = plan.draft_tokens
    return ids


def _decodes(plan: StepPlan, queues: Queues, index: int) -> I32:
    """Advances the bounds of the rows that decode. Returns the tokens they have in memory before the step, at most."""
    slots, rows = queues.slots, plan.decodes
    if not len(rows):
        return _NO_PAGES
    context: I32 = slots.kv_high[rows]
    most = plan.drafts + ONE if len(plan.drafts) else ONE
    slots.kv_high[rows] = context + most
    slots.out_high[rows] += most
    slots.out_low[rows] += ONE
    slots.last_step[rows] = index
    if queues.forced:
        for slot in rows[np.isin(rows, list(queues.forced))].tolist():
            del queues.forced[slot]
    return context


def _runs(plan: StepPlan, queues: Queues, arrays: _Arrays, index: int) -> dict[int, list[int]]:
    """Adds rows with forced tokens: all of these are known, so the slot's output count is set exactly. Returns the
    tokens that become output (`Flight.forced`)."""
    slots = queues.slots
    forced = {}
    for run in plan.runs:
        slot, job = run.slot, queues.running[run.slot].job
        following = run.tokens[1:]
        row = arrays.add(slot, int(slots.kv_high[slot]), np.array(run.tokens, np.int32), samples=True)
        forced[row] = following
        num_output = int(slots.out_high[slot]) + len(following)
        arrays.setups.append(_setup(job, slot, num_output, queues.limits))
        slots.kv_high[slot] += len(run.tokens)
        slots.out_high[slot] = slots.out_low[slot] = num_output + 1
        slots.last_step[slot] = index
        del queues.forced[slot]
    return forced


def _chunks(plan: StepPlan, prompts: list[Prefilling], queues: Queues, arrays: _Arrays, index: int) -> list[ChunkRow]:
    """Adds prompt chunks. A row with its last chunk is running from now on."""
    slots = queues.slots
    chunks = []
    for phase, share in zip(prompts, plan.shares, strict=True):
        slot, job, count = phase.slot, phase.job, share.num_tokens
        is_last = share.left == 0
        samples = is_last and (job.limit > 0 or job.scores_next or bool(job.ask.pool))
        end = phase.computed + count
        following_id = 0 if is_last else int(slots.history[slot, end])
        tokens = slots.history[slot, phase.computed : end]
        at = arrays.add(slot, phase.computed, tokens, samples=samples, following_id=following_id)
        chunks.append(ChunkRow(at, slot, job, phase.key, phase.computed, count, is_last, phase.in_tree))
        phase.computed += count
        slots.kv_high[slot] = phase.computed
        slots.last_step[slot] = index
        queues.counters.prompt_tokens += count
        if is_last:
            drawn = 1 if samples and not job.ask.pool else 0
            slots.out_high[slot] += drawn
            slots.out_low[slot] += drawn
            del queues.prefilling[slot]
            queues.start_running(Running(job, slot, phase.node))
    return chunks


def _media(queues: Queues, chunks: list[ChunkRow], fixed: dict[int, FixedRow], at: int, index: int) -> StepMedia | None:
    """The media of the step's chunks. `fixed`: the result of `_take_media`. `at`: index in the step of the first
    chunk's first token."""
    assert queues.media is not None
    found = []
    for chunk in chunks:
        stop = chunk.start + chunk.num_tokens
        begun = fixed.get(chunk.slot)
        found.append(MediaChunk(chunk.slot, chunk.job.id, chunk.job.media, chunk.start, stop, at, begun))
        at += chunk.num_tokens
    made = MediaStep(queues.media, queues.slots.turn, index, queues.slots.media_len)
    made.add_all(found)
    return made.done()


def _mark_scored(flight: Flight) -> None:
    """Marks the rows whose prompt tokens are scored: position p of a chunk scores token p + 1."""
    rows, following = [], []
    for chunk in flight.chunks:
        prompt, end = chunk.job.prompt, chunk.start + chunk.num_tokens
        if chunk.job.scores_prompt and min(end, len(prompt) - 1) >= max(chunk.job.scored_to, 1):
            rows.append(chunk.row)
            following.append(int(prompt[end]) if end < len(prompt) else NO_TOKEN)
    if rows:
        flight.step.prompt_logprobs = np.array(rows, np.int32)
        flight.step.following = np.array(following, np.int32)


def _mark_constrained(flight: Flight, queues: Queues) -> None:
    """Marks the rows whose sample may need a mask."""
    step, slots = flight.step, queues.slots
    gated = np.flatnonzero(np.isin(step.slots, list(queues.gates)) & step.samples)
    slot_ids = step.slots[gated]
    rows = [
        row
        for row, slot, most in zip(gated.tolist(), slot_ids.tolist(), slots.out_high[slot_ids].tolist(), strict=True)
        if queues.gates[slot].may_constrain(most - 1)
    ]
    if rows:
        step.constrained = np.array(rows, np.int32)
