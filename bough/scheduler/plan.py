"""Plans the next step. `plan_step` is pure: it reads everything and changes nothing; `commit` applies the plan."""

from __future__ import annotations

from itertools import islice

import numpy as np
from msgspec import Struct

from bough.cache.prefix import CacheView
from bough.core.step import I32, I64, NO_PROPOSER, Bool
from bough.scheduler.drafting import Drafter, Offer
from bough.scheduler.estimate import columns_in
from bough.scheduler.limits import Limits
from bough.scheduler.preempt import coming, victims
from bough.scheduler.prefill import LOOK_AHEAD, PrefillRoom, Share, plan_prefill
from bough.scheduler.queues import Queues, Waiting
from bough.scheduler.slots import ONE

_NO_SLOTS = np.empty(0, np.int64)
_NO_DRAFTS = np.empty(0, np.int32)


class ForcedRun(Struct):
    """A row whose next tokens are forced. The step computes all of `queues.forced` at once, or only the first token."""

    slot: int
    tokens: list[int]
    num_new_columns: int


class StepPlan(Struct):
    """One step: decode rows, rows with forced tokens, and chunks of prompts; and rows that are retracted before it."""

    decodes: I64
    num_new_columns: I32
    """Per decode row."""
    drafts: I32 = _NO_DRAFTS
    """Per decode row: drafts that it brings in; empty: no row has any."""
    draft_tokens: I32 = _NO_DRAFTS
    """Those drafts, row after row."""
    proposals: int = NO_PROPOSER
    """Drafts that the proposer on the device leaves for the next step of every row that samples. The drafter chooses it for
    the decode rows; rows with forced tokens and prompts that end get as many, and rows that are preempted afterwards do not
    change it. The proposer runs even if there are no pages for it: it writes only where its row has pages (`Step.room`), and
    its drafts are then less often right."""
    runs: list[ForcedRun] = []
    num_kept_columns: int = 0
    """Columns that rows which sit this step out may need in the next one: the step does not give them to others."""
    shares: list[Share] = []
    retract: list[int] = []
    """Slots whose memory is needed."""
    preempt: list[int] = []
    """Slots that give way to a more urgent request."""
    owed_ms: float = 0.0
    """After this step: milliseconds that slow prompts have taken from rows that decode beyond their part. 0, and forgiven,
    after a step in which they have no bound (`_slow_part_ms`)."""

    @property
    def num_decode_columns(self) -> int:
        return int(self.num_new_columns.sum()) if len(self.num_new_columns) else 0

    @property
    def num_decode_tokens(self) -> int:
        return len(self.decodes) + len(self.draft_tokens)

    @property
    def has_rows(self) -> bool:
        return bool(len(self.decodes) or self.runs or self.shares)


def plan_step(queues: Queues, cache: CacheView, limits: Limits) -> StepPlan:
    """Chooses the next step: rows that decode first, as far as there is memory for their tokens, then prompts.

    Memory is counted in columns for rows and in pages for the pool: a column is the same tokens in all lines, one page in
    each. `cache.num_available` are pages that are free or hold cached prefixes that no row reads, which `commit` evicts.

    1. Every running row decodes one token (`_plan_decodes`), with drafts if a drafter offers some. If there are not enough
       pages, the requests that came last are retracted; then the step has no prompts, because their memory is needed.
    2. Prompts get what is left of the step's tokens and pages, bounded so that rows which decode keep their time per token
       (`prefill_budget`). Slow prompts, which would take more than a second by themselves, get a smaller part
       (`_slow_tokens`): they may take `part_ms` of each step on average, and what they took beyond that is carried to the
       next steps as `owed_ms`.
    3. `plan_prefill` shares the budget among prompts under way and waiting requests. If it preempts rows for a more urgent
       request, they leave this step (`_take_out`); their memory is free in the next one.
    4. If nothing can run and nothing in flight will free memory, one row is retracted, so that the others get on.

    Changes nothing: `commit` applies the plan.
    """
    wants_prefill = bool(queues.prefilling or len(queues.waiting))
    plan = _plan_decodes(queues, cache, limits, wants_prefill=wants_prefill)
    drafter = queues.drafter
    drafts = drafter is not None and not drafter.is_resting
    if drafter is not None and drafts:
        plan.proposals = drafter.proposals(len(plan.decodes), prompts=wants_prefill)
    num_decodes = len(plan.decodes) + len(plan.runs)
    height = limits.layout.column_pages
    run_columns = sum(run.num_new_columns for run in plan.runs)
    decode_pages = (plan.num_decode_columns + run_columns + plan.num_kept_columns) * height
    pages = cache.num_available - decode_pages
    tokens = limits.max_step_tokens - plan.num_decode_tokens - sum(len(run.tokens) for run in plan.runs)
    pace = _pace(queues, plan) if num_decodes else _UNWATCHED
    part_ms = _slow_part_ms(queues, limits, num_decodes, pace)
    if wants_prefill and not plan.retract:
        budget = prefill_budget(queues, limits, tokens, num_decodes, pace)
        decode_tokens = limits.max_step_tokens - tokens
        if budget >= limits.large_step_tokens and not limits.whole_prompts and _wanted_tokens(queues) > budget:
            # A large step is computed in tiles of tokens, at least eight; those of a tile that is not full are cheaper in
            # the next step.
            budget -= (decode_tokens + budget) % limits.tile_tokens
        slow_tokens = _slow_tokens(queues, limits, budget, part_ms)
        room = PrefillRoom(budget, slow_tokens, pages, decode_pages, decode_tokens)
        prefill = plan_prefill(queues, cache, limits, room)
        plan.shares = prefill.shares
        if prefill.preempt:
            _take_out(plan, prefill.preempt)
        elif drafter is not None and drafts:
            _plan_ahead(plan, limits, drafter.reach(plan.proposals), prefill.num_pages_left)
    if part_ms is not None:
        taken = sum(share.num_tokens for share in plan.shares if share.is_slow)
        owed_ms = queues.owed_ms + taken * queues.cost.prefill_token_ms - part_ms
        plan.owed_ms = min(max(0.0, owed_ms), _MOST_OWED * part_ms)
    if not plan.has_rows and not plan.retract and not plan.preempt and _stuck(queues):
        plan.retract = victims(queues, limits, short_pages=1)
    return plan


def _wanted_tokens(queues: Queues) -> int:
    """Prompt tokens of all requests that are not computed yet; some may turn out to be cached."""
    return queues.waiting.num_tokens + sum(len(phase.key) - phase.computed for phase in queues.prefilling.values())


def _take_out(plan: StepPlan, preempt: list[int]) -> None:
    """Removes preempted rows from the step."""
    plan.preempt = preempt
    stay = ~np.isin(plan.decodes, preempt)
    plan.decodes, plan.num_new_columns = plan.decodes[stay], plan.num_new_columns[stay]
    if len(plan.drafts):
        plan.draft_tokens = plan.draft_tokens[stay.repeat(plan.drafts)]
        plan.drafts = plan.drafts[stay] if len(plan.draft_tokens) else _NO_DRAFTS
    plan.runs = [run for run in plan.runs if run.slot not in preempt]
    plan.shares = [s for s in plan.shares if isinstance(s.phase, Waiting) or s.phase.slot not in preempt]


# Values below were compared with others by `benchmarks/scheduler_constants.py`; the results are in
# docs/decisions/scheduler_constants.md.

_CROWD = 8
"""Requests. If at least this many wait for their first token, they are a crowd: the target time per token is ignored until
they have it. Trades gaps of running streams (at most one full chunk: 0.22 s instead of 0.05 s) for 1 % of throughput."""
_CROWD_RATIO = 4
"""Rows that decode, per waiting request, up to which those that wait can be a crowd. If more decode, the target time per
token holds, because those that would lose are many more than those that gain."""

_BESIDE_SLOW = 1.7
"""Mean duration of a step with a part of a slow prompt, in decode steps. Running streams are slowed down by this factor: 1.4
makes a prompt of 60,000 tokens wait 6.6 s instead of 4.2 s for its first token, 3.0 makes it 2.6 s."""

_MOST_OWED = 32
"""Decode steps that a slow prompt pauses at most after it took more than its part. A safety bound, which ordinary traffic
does not reach: the cost of a token is an estimate, and after one very slow step the pause would be as long."""

_WATCHED = 1.0
_UNWATCHED = 8.0
"""Factors of the target time per token: of steps in which at least one row streams, and of steps in which none does, because
their answers are sent when they are complete. 8 times the default target (50 ms) is what the largest step of an H200 takes
by the cost model, so that it does not bound batches."""


def _pace(queues: Queues, plan: StepPlan) -> float:
    """Factor of the target time per token that applies to the step's rows."""
    watched = queues.slots.watched
    is_watched = np.count_nonzero(watched[plan.decodes]) or any(watched[run.slot] for run in plan.runs)
    return _WATCHED if is_watched else _UNWATCHED


def prefill_budget(queues: Queues, limits: Limits, tokens: int, num_decodes: int, pace: float) -> int:
    """Prompt tokens for a step that has `tokens` left, such that the rows that decode in it keep their time per token,
    `pace` times the target.

    While a crowd waits for its first tokens the target is ignored: larger chunks are more efficient, and the whole
    crowd gains what a few rows lose. `queues.prefill_cap` bounds steps after the device ran out of memory,
    `cost.tokens_within` is None while costs are not known or if there is no target.
    """
    budget = tokens if limits.whole_prompts else min(tokens, _chunk(queues, limits, pace))
    if queues.prefill_cap is not None:
        budget = min(budget, queues.prefill_cap)
    if num_decodes and not _has_crowd(queues, num_decodes):
        within = queues.cost.tokens_within(limits.tpot_target_ms, pace)
        if within is not None:
            budget = min(budget, max(within, limits.min_chunk_tokens))
    return budget


def _chunk(queues: Queues, limits: Limits, pace: float) -> int:
    """Maximum prompt tokens of a step: more if no request streams, neither those that decode nor those that wait."""
    if limits.unwatched_tokens <= limits.chunk_tokens or pace == _WATCHED:
        return limits.chunk_tokens
    is_watched = any(phase.job.is_watched for phase in queues.prefilling.values()) or any(
        waiting.job.is_watched for waiting in islice(queues.waiting, LOOK_AHEAD)
    )
    return limits.chunk_tokens if is_watched else limits.unwatched_tokens


def _has_crowd(queues: Queues, num_decodes: int) -> bool:
    num_waiting = len(queues.waiting) + len(queues.prefilling)
    return num_waiting >= _CROWD and num_decodes <= _CROWD_RATIO * num_waiting


def _slow_part_ms(queues: Queues, limits: Limits, num_decodes: int, pace: float) -> float | None:
    """Milliseconds of each step that slow prompts may take on average; None: they have no bound of their own, because
    nothing decodes, a crowd waits, there is no target time, or costs are not known yet."""
    if not num_decodes or limits.tpot_target_ms == 0.0 or _has_crowd(queues, num_decodes):
        return None
    if queues.cost.decode_ms <= 0.0 or queues.cost.prefill_token_ms <= 0.0:  # not known yet
        return None
    return pace * (_BESIDE_SLOW - 1.0) * queues.cost.decode_ms


def _slow_tokens(queues: Queues, limits: Limits, budget: int, part_ms: float | None) -> int:
    """How much of the step's budget slow prompts may have.

    If their part is too small for a chunk that justifies reading the prompt's KV again, they take a larger chunk and
    then pause until the excess is paid back.
    """
    if part_ms is None or limits.whole_prompts:
        return budget
    if queues.owed_ms > 0.0:
        return 0
    return max(int(part_ms / queues.cost.prefill_token_ms), limits.min_chunk_tokens)


def _stuck(queues: Queues) -> bool:
    """Prompts under way got no memory, and no step is in flight, nor a row leaving, that will free any."""
    return bool(queues.prefilling) and not queues.leaving and queues.settled == queues.next_step - 1


def _plan_decodes(queues: Queues, cache: CacheView, limits: Limits, *, wants_prefill: bool) -> StepPlan:
    """The rows that decode, with their new columns, drafts and forced tokens; rows to retract if memory is short.

    Rows are named by their slots. `slots.out_low`, `out_high`, `kv_high` bound what rows will have once the steps in flight
    have run (see the table at `SlotTable`): a row whose least output is its limit has nothing to do, and one whose KV may
    fill its pages needs a column. Rows may sit this step out: those that may not need their column after all have it kept
    (`num_kept_columns`). Those that wait for their drafts, or for a step or stage with room for them, do not: what rows will
    need was left free when prompts were admitted (`_Sharing.admit`).
    """
    slots, drafter = queues.slots, queues.drafter
    rows = queues.running_slots()
    if not len(rows):
        return StepPlan(_NO_SLOTS, _NO_DRAFTS)
    more = slots.out_low[rows] < slots.out_limit[rows]
    if np.count_nonzero(more) < len(rows):
        rows = rows[more]
    if drafter is not None:
        rows = _without_unsettled(queues, drafter, limits, rows)
    if limits.num_stages > 1:
        rows = _micro_batch(queues, limits, rows)
    rows = _within_tokens(queues, limits, rows, wants_prefill=wants_prefill)
    needs = slots.kv_high[rows] >= slots.num_columns[rows] * limits.page_size
    columns = columns_in(cache.num_available, limits)
    short = int(np.count_nonzero(needs)) - columns
    kept = 0
    if short > 0 and drafter is not None:
        # Rows whose drafts are being verified may turn out to have the column: they wait for that before anything is
        # retracted, and what is left of the memory waits for them.
        stay = ~needs | (slots.out_high[rows] == slots.out_low[rows])
        sit_out = len(rows) - int(np.count_nonzero(stay))
        rows, needs = rows[stay], needs[stay]
        short = int(np.count_nonzero(needs)) - columns
        kept = min(sit_out, max(0, -short))
        columns -= kept
    if short > 0:
        return _plan_dry(queues, limits, rows, needs, columns)
    runs: list[ForcedRun] = []
    if queues.forced:
        spare = columns - int(np.count_nonzero(needs))
        tokens = limits.max_step_tokens - len(rows)
        runs, rows, needs = _plan_runs(queues, limits, rows, needs, columns=spare, tokens=tokens)
    plan = StepPlan(rows, needs.astype(np.int32), runs=runs, num_kept_columns=kept)
    if drafter is not None and len(rows) and not drafter.is_resting:
        _plan_drafts(plan, queues, drafter, limits, columns=columns, wants_prefill=wants_prefill)
    return plan


def _without_unsettled(queues: Queues, drafter: Drafter, limits: Limits, rows: I64) -> I64:
    """Leaves out rows that should wait until their steps in flight have settled: those whose drafts depend on their
    last tokens, and those that could exceed the context if all their drafts are accepted."""
    slots = queues.slots
    unknown = slots.last_step[rows] > queues.settled
    if not np.count_nonzero(unknown):
        return rows
    waits = unknown & (slots.kv_high[rows] >= limits.context_length)
    in_flight = rows[unknown]
    waits[unknown] |= drafter.waits(queues, in_flight)
    return rows[~waits] if np.count_nonzero(waits) else rows


def _micro_batch(queues: Queues, limits: Limits, rows: I64) -> I64:
    """Rows that are in no pipeline stage, those first that have waited longest, so that every stage gets its share."""
    most = limits.micro_batch or -(-len(rows) // limits.num_stages)
    at_rest = rows[queues.slots.last_step[rows] <= queues.settled]
    if len(at_rest) <= most:
        return at_rest
    waited = np.argsort(queues.slots.last_step[at_rest], kind="stable")[:most]
    return at_rest[np.sort(waited)]


def _plan_drafts(
    plan: StepPlan, queues: Queues, drafter: Drafter, limits: Limits, *, columns: int, wants_prefill: bool
) -> None:
    """Adds drafts to the rows that decode, and pages for what a proposer writes behind them, as far as memory, tokens and
    the rows' own limits allow: pages that certain tokens need come first, then those of drafts."""
    offer = _offered(plan, queues, drafter, limits, wants_prefill=wants_prefill)
    columns -= sum(run.num_new_columns for run in plan.runs)
    reach = drafter.reach(drafter.proposals(len(plan.decodes), prompts=wants_prefill))
    for given, ahead in ((offer, reach), (offer, 0), (None, reach)):
        if given is None and not ahead:
            continue
        num_new = _new_columns(plan, queues, limits, given, ahead)
        if int(num_new.sum()) <= columns:
            plan.num_new_columns = num_new
            if given is not None:
                plan.drafts, plan.draft_tokens = given.counts, given.tokens
            return


def _offered(plan: StepPlan, queues: Queues, drafter: Drafter, limits: Limits, *, wants_prefill: bool) -> Offer | None:
    """Drafts that the step has tokens for."""
    slots, rows = queues.slots, plan.decodes
    spare = limits.max_step_tokens - len(rows) - sum(len(run.tokens) for run in plan.runs)
    if wants_prefill:
        spare -= max(1, min(limits.min_chunk_tokens, limits.max_step_tokens // 4))
    spare = min(spare, limits.max_step_drafts)
    most = np.minimum(slots.out_limit[rows] - slots.out_low[rows], limits.context_length - slots.kv_high[rows]) - ONE
    if spare <= 0 or not np.count_nonzero(most > 0):
        return None
    return drafter.offer(queues, rows, np.maximum(most, 0), spare)


def _new_columns(plan: StepPlan, queues: Queues, limits: Limits, offer: Offer | None, ahead: int) -> I32:
    """Per row: the columns that it lacks for its newest token, its drafts and `ahead` tokens behind them."""
    slots, rows = queues.slots, plan.decodes
    tokens = slots.kv_high[rows] + (ONE if offer is None else offer.counts + ONE)
    if ahead:
        tokens = np.minimum(tokens + np.int32(ahead), np.maximum(tokens, limits.context_length))
    missing: I32 = -(-tokens // limits.page_size) - slots.num_columns[rows]
    return np.maximum(missing, 0, dtype=np.int32, casting="unsafe")


def _plan_ahead(plan: StepPlan, limits: Limits, reach: int, left: int) -> None:
    """Prompts that end in the step get columns for what a proposer writes behind them, of `left` pages."""
    size, height = limits.page_size, limits.layout.column_pages
    for share in plan.shares:
        if reach and share.left == 0:
            had = share.num_new_columns(size)
            share.ahead = max(0, min(reach, limits.context_length - len(share.phase.key)))
            more = (share.num_new_columns(size) - had) * height
            if more > left:
                share.ahead = more = 0
            left -= more


def _within_tokens(queues: Queues, limits: Limits, rows: I64, *, wants_prefill: bool) -> I64:
    """If there are more rows than a step can have, those that have waited longest; a part of the step is kept for
    prompts."""
    cap = limits.max_step_tokens
    if wants_prefill and cap > 1:
        cap -= max(1, min(limits.min_chunk_tokens, cap // 4))
    if len(rows) <= cap:
        return rows
    waited = np.argsort(queues.slots.last_step[rows], kind="stable")[:cap]
    return rows[np.sort(waited)]


def _plan_dry(queues: Queues, limits: Limits, rows: I64, needs: Bool, columns: int) -> StepPlan:
    """Chooses the youngest requests to retract if there is not a column for every row, unless leaving rows are about to
    free enough pages."""
    short_pages = (int(np.count_nonzero(needs)) - columns) * limits.layout.column_pages
    retract = victims(queues, limits, short_pages=short_pages) if coming(queues) < short_pages else []
    fits = ~needs | (np.cumsum(needs) <= columns)
    if retract:
        fits &= ~np.isin(rows, retract)
    rows, needs = rows[fits], needs[fits]
    runs: list[ForcedRun] = []
    if queues.forced:
        runs, rows, needs = _plan_runs(queues, limits, rows, needs, columns=0, tokens=0)
    return StepPlan(rows, needs.astype(np.int32), runs=runs, retract=retract)


def _plan_runs(
    queues: Queues, limits: Limits, rows: I64, needs: Bool, *, columns: int, tokens: int
) -> tuple[list[ForcedRun], I64, Bool]:
    """Takes the rows with forced tokens out of the decode rows: they take all forced tokens at once if `columns` and
    `tokens` to spare allow; otherwise the first only, and the others are forced again (`queues.forced`). They can't decode
    instead: the device may have another newest token than the first one."""
    slots = queues.slots
    runs = []
    forced_rows = np.isin(rows, list(queues.forced))
    for slot, own in zip(rows[forced_rows].tolist(), needs[forced_rows].tolist(), strict=True):
        forced = queues.forced[slot]
        held = int(slots.num_columns[slot]) + own
        more = max(0, limits.columns_for(int(slots.kv_high[slot]) + len(forced)) - held)
        if len(forced) - 1 > tokens or more > columns:
            forced, more = forced[:1], 0
        runs.append(ForcedRun(slot, forced, more + own))
        tokens -= len(forced) - 1
        columns -= more
    return runs, rows[~forced_rows], needs[~forced_rows]
