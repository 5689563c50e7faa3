"""Applies the results of a step: tokens become output, rows end, memory is freed, messages are sent.

Rows are handled as arrays; only rows that end, that have a gate or that want more than token ids are looked at one by one.

Indices, by name: `row` is a row of the step, `slot` (arrays: `slot_ids`) its slot, and `at` an index of the rows that yield
tokens, a part of the step's rows. The object of a request in its slot (`Running`, `Leaving`) is its `phase`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bough.cache.prefix import PrefixCache
from bough.core.errors import BoughError, InvalidRequest, RequestFailed
from bough.core.messages import End, EndReason, RowOutput
from bough.core.step import I32, I64, Bool, Outcome
from bough.scheduler.commit import ChunkRow, Flight
from bough.scheduler.constrain import Gate
from bough.scheduler.drafting import NUM_DRAFT_POSITIONS, Drafter
from bough.scheduler.jump import jump, respells
from bough.scheduler.leave import (
    count_end,
    end_request,
    let_go,
    make_end,
    release_settled,
    take_extras,
    trace_chunk,
)
from bough.scheduler.queues import Job, Leaving, Queues, Running
from bough.scheduler.scores import add_output, add_prompt, add_unpredicted
from bough.scheduler.slots import ONE
from bough.scheduler.windows import pass_windows

_NO_TOKENS = np.empty(0, np.int32)


def settle(
    flight: Flight, outcome: Outcome, queues: Queues, cache: PrefixCache, *, now: float, tell: Callable[[], None]
) -> None:
    """Applies the outcome of the oldest step in flight: appends its tokens, ends requests, frees memory.

    `flight` is the step as it was committed, with the slot of each row (`flight.slot_ids`). Its rows are: those that decode,
    those with forced tokens, the chunks of prompts. The outcome has a count of tokens and the tokens of each row. Steps
    settle in the order in which they were launched.

    A slot keeps its request until no step in flight has a row of it (`leave.release`), so that a row of this step always
    belongs to the request that it was launched for. Rows that are not *live* are ignored: their request has ended since, or
    the row is void (`queues.void`).

    `tell` is called once the tokens and ends of this step are in `queues.mail`, before memory is freed, so that clients do
    not wait for the bookkeeping. Errors are rare: they are mailed after it, and sent with the next mail. `now`: seconds of
    the loop's monotonic clock.

    The order matters in two places: `_gather_hidden`, called by `_settle_tokens`, needs `slots.kv_settled` as it was before
    this step, and `_settle_kv` needs `slots.known` with the step's tokens.
    """
    step = flight.step
    live = _live_rows(flight, queues)
    queues.settled = step.index
    due = step.samples & live  # rows that were to yield a result: tokens, scores or a pooled vector
    yields = due & outcome.counts.astype(np.bool_)  # rows whose tokens are appended
    _settle_drafts(flight, outcome, queues, live, due, yields)
    errors = _errors(flight, outcome, live)
    if errors:
        yields[list(errors)] = False
    if flight.chunks:
        _settle_chunks(flight, outcome, queues, due, yields, now)
    ended = _settle_tokens(flight, outcome, queues, yields.nonzero()[0], now)
    for chunk in flight.chunks:
        if chunk.is_last and not yields[chunk.row] and chunk.row not in errors:
            ended += _finish_without_output(chunk, outcome, queues, due, now)
    tell()
    _settle_kv(flight, queues, cache, live)
    drafter = queues.drafter
    if drafter is not None and step.num_decodes and (len(step.drafts) or not drafter.is_resting):
        _learn(flight, outcome, queues, drafter, live)
    _free_ended(queues, cache, ended)
    # A decode row may yield nothing (`Outcome.counts`): it stays as it was and decodes again. Rows with forced tokens and
    # last chunks of prompts, which come after the decode rows, always yield a result, unless something is broken.
    for row in (due & ~yields).nonzero()[0].tolist():
        if row >= step.num_decodes:
            errors.setdefault(row, _unusable("the step yielded nothing for it"))
    for row, error in errors.items():
        _fail_request(int(flight.slot_ids[row]), error, queues, cache, now)
    release_settled(queues, cache)


def _live_rows(flight: Flight, queues: Queues) -> Bool:
    """Per row of the step: does its request still want tokens, and is what the step computed for it valid? Forced tokens
    that the step brought in become output first."""
    if flight.forced:
        _take_forced(flight, queues)
    live = queues.slots.live[flight.slot_ids]
    if queues.void:
        _leave_out_void(flight, queues, live)
    return live


def _settle_drafts(flight: Flight, outcome: Outcome, queues: Queues, live: Bool, due: Bool, yields: Bool) -> None:
    """Applies how many drafts were accepted: bounds of the rows' lengths, forced tokens, counters, proposals."""
    step = flight.step
    # Decode rows that yielded nothing, although they were to: `Outcome.counts` says what that means.
    idle = due[: step.num_decodes] & ~yields[: step.num_decodes]
    if len(step.drafts) or np.count_nonzero(idle):
        _tighten_bounds(flight, outcome, queues, live)
        if queues.gates:
            _take_back_forced(flight, queues, idle)
    if queues.drafter is not None:
        _count_drafts(flight, outcome, queues, live)
        if queues.gates:
            _keep_proposals(flight, outcome, queues, live)


def _keep_proposals(flight: Flight, outcome: Outcome, queues: Queues, live: Bool) -> None:
    """Keeps the drafts that the device proposed for constrained rows: masks of their next step are made for each."""
    if outcome.drafts is None:
        return
    for row in np.flatnonzero(np.isin(flight.slot_ids, list(queues.gates)) & live).tolist():
        parents = range(outcome.drafts.shape[1]) if outcome.parents is None else outcome.parents[row].tolist()
        queues.proposed[int(flight.slot_ids[row])] = list(zip(outcome.drafts[row].tolist(), parents, strict=True))


def _settle_kv(flight: Flight, queues: Queues, cache: PrefixCache, live: Bool) -> None:
    """Records how much KV of each row is certain, and gives back pages that windows have passed. Called after the tokens of
    the step are in `slots.known`: of a decode row, all of them but the newest have their KV."""
    step, slots, slot_ids = flight.step, queues.slots, flight.slot_ids
    kv_len = step.context + step.num_query
    kv_len[: step.num_decodes] = slots.known[slot_ids[: step.num_decodes]] - ONE
    slots.kv_settled[slot_ids[live]] = kv_len[live]
    cache.settle(step.index)  # pages that had to wait for the step are free, and what it wrote to the tree stays
    if slots.layout.windows:
        pass_windows(queues, cache, slot_ids[live])


def _learn(flight: Flight, outcome: Outcome, queues: Queues, drafter: Drafter, live: Bool) -> None:
    """Shows the drafter how many of each row's drafts were accepted."""
    step = flight.step
    decoded = live[: step.num_decodes].nonzero()[0]
    drafts = step.drafts[decoded] if len(step.drafts) else np.zeros(len(decoded), np.int32)
    drafter.learn(queues, flight.slot_ids[decoded], drafts, np.maximum(outcome.counts[decoded] - ONE, 0))


def _free_ended(queues: Queues, cache: PrefixCache, ended: list[Running | Leaving]) -> None:
    """Frees slots and memory of rows that have ended, and remembers the lengths of their outputs for estimates."""
    for gone in ended:
        num_output = int(queues.slots.out_settled[gone.slot])
        queues.ratio.observe(num_output, min(gone.job.limit, queues.limits.estimate_clip_tokens))
        let_go(queues, cache, gone, requeue=False)


def _leave_out_void(flight: Flight, queues: Queues, live: Bool) -> None:
    """Void rows: their newest token was respelled, or taken back, after this step had begun with the old one. What it yields
    for them is dropped."""
    for row in np.flatnonzero(np.isin(flight.slot_ids, list(queues.void))).tolist():
        slot = int(flight.slot_ids[row])
        if queues.is_void(slot, flight.step.index):
            live[row] = False
            if queues.void[slot] == flight.step.index:
                del queues.void[slot]


def _tighten_bounds(flight: Flight, outcome: Outcome, queues: Queues, live: Bool) -> None:
    """How many tokens the step's decode rows yield is known now: the bounds of what they have no longer allow for others."""
    slots, num = queues.slots, flight.step.num_decodes
    rows = live[:num].nonzero()[0]
    slot_ids, counts = flight.slot_ids[rows], outcome.counts[rows]
    too_many = flight.step.num_query[rows] - counts
    slots.kv_high[slot_ids] -= too_many
    slots.out_high[slot_ids] -= too_many
    slots.out_low[slot_ids] += counts - ONE


def _take_back_forced(flight: Flight, queues: Queues, idle: Bool) -> None:
    """Constrained rows that yielded nothing: tokens that were to follow the one that did not come are taken back, and what
    steps in flight yield for the row is dropped, because they may have begun with them. The row goes on from its newest
    settled token, which its next step brings in from the host, because the device may have gone on from another one."""
    slots = queues.slots
    for slot in flight.slot_ids[: len(idle)][idle].tolist():
        if slot not in queues.gates:
            continue
        queues.forced.pop(slot, None)
        if slots.last_step[slot] > flight.step.index:
            queues.void[slot] = int(slots.last_step[slot])
            slots.settle_bounds(slot)
            if slot in queues.running:
                queues.forced[slot] = [int(slots.history[slot, slots.known[slot] - ONE])]


def _count_drafts(flight: Flight, outcome: Outcome, queues: Queues, live: Bool) -> None:
    step, counters, slots = flight.step, queues.counters, queues.slots
    rows = live[: step.num_decodes].nonzero()[0]
    slot_ids = flight.slot_ids[rows]
    counters.decoded_rows += len(rows)
    slots.num_decoded[slot_ids] += ONE
    if len(step.drafts):
        drafts, accepted = step.drafts[rows], np.maximum(outcome.counts[rows] - ONE, 0)
        counters.draft_tokens += int(drafts.sum())
        counters.accepted_tokens += int(accepted.sum())
        counters.drafted_rows += int(np.count_nonzero(drafts))
        for count, rows_so_right in enumerate(np.bincount(accepted).tolist()):
            for position in range(count):
                counters.accepted_at[min(position, NUM_DRAFT_POSITIONS - 1)] += rows_so_right
        slots.num_drafts[slot_ids] += drafts
        slots.num_accepted[slot_ids] += accepted
        slots.num_right_in[slot_ids, accepted] += ONE


def _take_forced(flight: Flight, queues: Queues) -> None:
    """Forced tokens that a step brought in, all but the first of each run, are output now."""
    slots = queues.slots
    for row, tokens in flight.forced.items():
        slot = int(flight.slot_ids[row])
        if slots.live[slot] and not queues.is_void(slot, flight.step.index):
            known = int(slots.known[slot])
            slots.history[slot, known : known + len(tokens)] = tokens
            slots.known[slot] += len(tokens)
            slots.out_settled[slot] += len(tokens)
            queues.counters.output_tokens += len(tokens)
            queues.counters.forced_tokens += len(tokens)


# -- tokens ---------------------------------------------------------------------------------------


def _settle_tokens(flight: Flight, outcome: Outcome, queues: Queues, rows: I64, now: float) -> list[Running | Leaving]:
    """Appends the tokens of each of `rows`, up to the one that ends it, and puts in the mail what is to be sent. Returns the
    phases of requests that have ended."""
    if not len(rows):
        if outcome.hidden_states:
            _gather_hidden(flight, outcome, queues, rows, _NO_TOKENS)
        return []
    slots = queues.slots
    slot_ids = flight.slot_ids[rows]
    before, known = slots.out_settled[slot_ids], slots.known[slot_ids]
    tokens = outcome.tokens[rows]
    if tokens.shape[1] == 1:
        taken = np.ones(len(rows), np.int32)
        stops = _stops(queues, slot_ids, tokens[:, 0]) & (before >= slots.min_new[slot_ids])
        ended = stops | (before + ONE >= slots.out_limit[slot_ids])
    else:
        taken, stops, ended = _cut(queues, slot_ids, tokens, outcome.counts[rows])
    refused: dict[int, int] = {}
    cut: set[int] = set()
    if queues.gates:
        refused, cut = _walk_gates(queues, flight.step.index, slot_ids, tokens, taken, stops, ended)
    if tokens.shape[1] == 1:
        slots.history[slot_ids, known] = tokens[:, 0]
    else:
        offset = np.arange(tokens.shape[1])
        is_taken = offset < taken[:, None]
        slots.history[slot_ids.repeat(taken), (known[:, None] + offset)[is_taken]] = tokens[is_taken]
    num_output = before + taken
    slots.known[slot_ids] = known + taken
    slots.out_settled[slot_ids] = num_output
    queues.counters.output_tokens += int(taken.sum())
    newest = tokens[np.arange(len(rows)), taken - ONE]
    if queues.gates:
        _jump(queues, flight.step.index, slot_ids, newest, stops, ended, refused, cut)
    error_ends = {}
    for at, token in refused.items():
        slot, job = int(slot_ids[at]), _job_of(queues, int(slot_ids[at]))
        error_ends[at] = make_end(queues, job, slots.output(slot), now, "error", error=_misfit(job, token))
    if outcome.output_logprobs is not None:
        _gather_scores(outcome, queues, rows, slot_ids, taken)
    if outcome.hidden_states:
        _gather_hidden(flight, outcome, queues, rows, taken)
    _mail(queues, slot_ids, newest, num_output, stops, ended, error_ends, now)
    return [queues.running.get(slot) or queues.leaving[slot] for slot in slot_ids[ended].tolist()]


def _job_of(queues: Queues, slot: int) -> Job:
    return (queues.running.get(slot) or queues.leaving[slot]).job


def _cut(queues: Queues, slot_ids: I64, tokens: npt.NDArray[np.int32], counts: I32) -> tuple[I32, Bool, Bool]:
    """Of rows with several tokens: how many are taken, whether the last of them stops the row, whether the row has ended."""
    slots = queues.slots
    width = tokens.shape[1]
    offset = np.arange(width, dtype=np.int32)
    is_real = offset < counts[:, None]
    before = slots.out_settled[slot_ids][:, None] + offset
    hits = _stops(queues, slot_ids.repeat(width), tokens.reshape(-1)).reshape(tokens.shape)
    hits &= is_real & (before >= slots.min_new[slot_ids][:, None])
    last = hits | (is_real & (before + ONE >= slots.out_limit[slot_ids][:, None]))
    ended: Bool = np.logical_or.reduce(last, axis=1)
    first = last.argmax(axis=1)
    taken = np.where(ended, first + 1, counts).astype(np.int32)
    stops: Bool = hits[np.arange(len(slot_ids)), first] & ended
    return taken, stops, ended


def _stops(queues: Queues, slot_ids: I64, tokens: I32) -> Bool:
    """Which tokens end their rows."""
    slots = queues.slots
    stops = np.zeros(len(slot_ids), np.bool_)
    hits = slots.stop_ids.take(slot_ids, 0) == tokens[:, None]
    if np.count_nonzero(hits):
        stops[hits.nonzero()[0]] = True
    if slots.more_stops:
        for at, slot in enumerate(slot_ids.tolist()):
            more = slots.more_stops.get(slot)
            if more is not None and int(tokens[at]) in more:
                stops[at] = True
    return stops


def _walk_gates(
    queues: Queues, step_index: int, slot_ids: I64, tokens: npt.NDArray[np.int32], taken: I32, stops: Bool, ended: Bool
) -> tuple[dict[int, int], set[int]]:
    """Shows the gates of constrained rows their tokens, up to one that completes the grammar, that it refuses, or that is to
    be respelled; changes `taken`, `stops` and `ended` accordingly. Returns the rows whose token was refused, with that
    token, and the rows that were cut and go on. A refused token is the last one taken: it is output, and is sent with the
    error."""
    refused: dict[int, int] = {}
    cut: set[int] = set()
    for at in np.flatnonzero(np.isin(slot_ids, list(queues.gates))).tolist():
        slot, count = int(slot_ids[at]), int(taken[at])
        gate, phase = queues.gates[slot], queues.running.get(slot) or queues.leaving[slot]
        shown = tokens[at, : count - 1 if stops[at] else count].tolist()
        for number, token in enumerate(shown, 1):
            if not _accepts(gate, token):
                refused[at] = token
            elif number == count:
                break
            elif not gate.terminated and not respells(queues, step_index, phase):
                continue
            elif not gate.terminated:
                cut.add(at)
            taken[at] = number
            stops[at] = at not in refused and at not in cut
            ended[at] = at not in cut
            break
    return refused, cut


def _accepts(gate: Gate, token: int) -> bool:
    try:
        return gate.accept(token)
    except Exception:
        return False


def _jump(
    queues: Queues,
    step_index: int,
    slot_ids: I64,
    newest: I32,
    stops: Bool,
    ended: Bool,
    refused: dict[int, int],
    cut: set[int],
) -> None:
    """Constrained rows that go on take the tokens that are forced next; the newest token may be respelled for it. Marks rows
    whose grammar is complete in `stops` and `ended`, and adds to `refused` where the grammar raises."""
    for at in np.flatnonzero(np.isin(slot_ids, list(queues.gates)) & ~stops).tolist():
        slot = int(slot_ids[at])
        gate, token = queues.gates[slot], int(newest[at])
        if at in refused or gate.is_open:
            continue
        try:
            phase = queues.running.get(slot) or queues.leaving[slot]
            if not ended[at] and phase.job.jumps:
                newest[at] = jump(queues, step_index, phase, token, cut=at in cut)
            if gate.terminated:
                stops[at] = ended[at] = True
        except Exception:
            refused[at] = token
            ended[at] = True


def _misfit(job: Job, token: int) -> BoughError:
    """Why a token came that the grammar does not allow: the request left none to draw, or something is broken."""
    asked = job.ask.sampling
    given = {
        "allowed_token_ids": asked.allowed_token_ids,
        "bad_words": asked.bad_words,
        "logit_processor": asked.logit_processor,
    }
    others = [name for name, value in given.items() if value]
    if not others:
        return RequestFailed(what=f"the sampled token {token} is outside the grammar", fix="send it again")
    return InvalidRequest(
        what="no token can continue the answer",
        why=f"of those that its grammar allows next, none is left by {' and '.join(others)}",
        fix="let them agree, or leave one out",
        param=others[0],
    )


def _gather_scores(outcome: Outcome, queues: Queues, rows: I64, slot_ids: I64, taken: I32) -> None:
    arrays = outcome.output_logprobs
    assert arrays is not None, "called for steps with scores"
    left = dict(zip(rows.tolist(), taken.tolist(), strict=True))
    slot_of = dict(zip(rows.tolist(), slot_ids.tolist(), strict=True))
    for at, row in enumerate(arrays.row.tolist()):
        if left.get(row, 0):
            left[row] -= 1
            add_output(_job_of(queues, slot_of[row]), arrays, at)


def _take_next_scores(chunk: ChunkRow, outcome: Outcome) -> None:
    """Scores what was sampled for a row that wants no tokens. Nothing else is made of it."""
    arrays = outcome.output_logprobs
    if arrays is not None:
        for at in np.flatnonzero(arrays.row == chunk.row).tolist():
            add_output(chunk.job, arrays, at)


def _mail(
    queues: Queues,
    slot_ids: I64,
    tokens: I32,
    num_output: I32,
    stops: Bool,
    ended: Bool,
    error_ends: dict[int, End],
    now: float,
) -> None:
    """Puts in the mail the tokens of rows that have gathered enough of them (`slots.hold`), and of those that end. Ends and
    what rows yield beyond token ids (`queues.reporting`) go along. `error_ends`: by index of `slot_ids`."""
    slots = queues.slots
    pending = num_output - slots.emitted[slot_ids]
    sending = ((pending >= slots.hold[slot_ids]) | ended).nonzero()[0]
    if not len(sending):
        return
    senders, counts = slot_ids[sending], pending[sending]
    if not np.count_nonzero(counts > ONE):
        out = tokens[sending]
    else:
        owner = np.repeat(senders, counts)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        out = slots.history[owner, np.repeat(slots.known[senders] - counts, counts) + offset]
    first = queues.mail.add_rows(slots.request_id[senders], counts, out)
    slots.emitted[senders] = num_output[sending]
    special = ended[sending]
    if queues.reporting:
        special = special | np.isin(senders, list(queues.reporting))
    for number in special.nonzero()[0].tolist():
        slot, at = int(senders[number]), int(sending[number])
        job = _job_of(queues, slot)
        end = None
        if ended[at]:
            token = int(tokens[at])
            matched = token if stops[at] and token in job.stops else None
            reason: EndReason = "stop" if stops[at] else "length"
            end = error_ends.get(at) or make_end(queues, job, slots.output(slot), now, reason, matched=matched)
            if end.reason == "length" and slot in queues.gates and queues.gates[slot].ruler is not None:
                queues.counters.cut_grammars += 1
                end.message = f"cut after {end.completion_tokens} tokens, before its grammar was complete"
            count_end(queues, end)
        queues.mail.say(first + number, take_extras(job, end))


# -- prefill rows and what else rows yield ---------------------------------------------------------


def _settle_chunks(flight: Flight, outcome: Outcome, queues: Queues, due: Bool, yields: Bool, now: float) -> None:
    """Prompt scores of the step's chunks, and the time of first tokens. The sample of a request that wants only its score
    is not output: the row leaves `due` and `yields`."""
    scored = outcome.prompt_logprobs
    for chunk in flight.chunks:
        job = chunk.job
        if not queues.slots.live[chunk.slot]:
            continue
        if yields[chunk.row] and job.scores_next:
            _take_next_scores(chunk, outcome)
            due[chunk.row] = yields[chunk.row] = False
        if job.ask.trace:
            trace_chunk(job, chunk.start, chunk.num_tokens, flight.step.index, now)
        if scored is not None and job.scores_prompt:
            add_prompt(job, scored, np.flatnonzero(scored.row == chunk.row).tolist(), chunk.start)
        if chunk.is_last and job.scores_prompt and job.scored_to == 0:
            add_unpredicted(job)
        if yields[chunk.row] and not job.first_token_s:
            job.first_token_s = now


def _gather_hidden(flight: Flight, outcome: Outcome, queues: Queues, rows: I64, taken: I32) -> None:
    """Hidden states of rows that asked; those of drafts that were not taken are left out, and so are positions that were
    computed a second time after a retraction. `taken`: output tokens of the rows that yield any. Called before `_settle_kv`:
    a decode row began at `slots.kv_settled`."""
    step, slots = flight.step, queues.slots
    count_of = dict(zip(rows.tolist(), taken.tolist(), strict=True))
    for row, states in outcome.hidden_states.items():
        slot = int(flight.slot_ids[row])
        if not slots.live[slot]:
            continue
        phase = queues.running.get(slot) or queues.prefilling.get(slot) or queues.leaving[slot]
        job = phase.job
        drafts = int(step.drafts[row]) if row < len(step.drafts) else 0
        states = states[: len(states) - drafts + count_of.get(row, 1) - 1]
        if job.ask.hidden_states == "all":
            context = int(slots.kv_settled[slot] if row < step.num_decodes else step.context[row])
            fresh = states[max(0, job.hidden_to - context) :]
            job.hidden.extend(fresh.tolist())
            job.hidden_to += len(fresh)
        else:
            job.hidden = states[-1:].tolist()


def _errors(flight: Flight, outcome: Outcome, live: Bool) -> dict[int, BoughError]:
    """Rows whose result can't be used, and the error that their clients get. Rows that are not `live` have none: what the
    step computed for them is dropped, usable or not."""
    errors = {row: _unusable(why) for row, why in (outcome.failed | flight.rejected).items() if live[row]}
    for row in outcome.barred:
        if live[row]:
            errors.setdefault(row, _no_token_left())
    return errors


def _unusable(why: str) -> BoughError:
    return RequestFailed(what="the model's result for this request can't be used", why=why)


def _no_token_left() -> BoughError:
    return InvalidRequest(
        what="no token can continue the answer",
        why="every token of allowed_token_ids is forbidden by something else that was asked for",
        fix="let them agree, or leave one out",
        param="allowed_token_ids",
    )


def _fail_request(slot: int, error: BoughError, queues: Queues, cache: PrefixCache, now: float) -> None:
    phase = queues.running.get(slot) or queues.prefilling.get(slot) or queues.leaving[slot]
    end = make_end(queues, phase.job, queues.slots.output(slot), now, "error", error=error)
    end_request(queues, cache, phase, end)


def _finish_without_output(
    chunk: ChunkRow, outcome: Outcome, queues: Queues, due: Bool, now: float
) -> list[Running | Leaving]:
    """Ends a request that wants no tokens: a pooled result, or a prompt that was only to be scored. Returns its phase, and
    the row leaves `due`. If the pooled result is missing, it returns nothing and the row stays in `due`, so that `settle`
    fails the request."""
    job, slot = chunk.job, chunk.slot
    # `job.output` is what it had when it got its slot. A request that may say more should have yielded a token.
    if not queues.slots.live[slot] or (job.limit > len(job.output) and not job.ask.pool):
        return []
    # Not prefilling any more: `commit` moves a request on with its last chunk.
    phase: Running | Leaving = queues.running.get(slot) or queues.leaving[slot]
    job.first_token_s = job.first_token_s or now
    embedding = b""
    if job.ask.pool:
        pooled = outcome.embeddings.get(chunk.row)
        if pooled is None:
            return []
        embedding = pooled.astype("<f4").tobytes()
    end = make_end(queues, job, queues.slots.output(slot), now, "stop" if job.ask.pool else "length")
    count_end(queues, end)
    output: RowOutput = take_extras(job, end, embedding)
    queues.mail.add(job.id, row=output)
    due[chunk.row] = False
    return [phase]
