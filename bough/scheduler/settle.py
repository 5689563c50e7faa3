"""What a step produced becomes output: tokens join their rows, rows end, memory goes back, messages go out.

Decode rows are handled as columns; only rows that end or that want more than token ids are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bough.cache.prefix import PrefixCache
from bough.core.errors import BoughError, InvalidRequest, RequestFailed
from bough.core.messages import End, EndReason, RowOutput
from bough.core.step import I32, I64, Bool, Outcome
from bough.scheduler.commit import ChunkRow, Flight
from bough.scheduler.jump import jump
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


def settle(
    flight: Flight, outcome: Outcome, queues: Queues, cache: PrefixCache, *, now: float, tell: Callable[[], None]
) -> None:
    """Takes in the outcome of the oldest step in flight. What rows that have ended yield is dropped.

    `tell` is called when the step's tokens and the ends that come with them are in the mail, before any memory goes back:
    whoever waits for them need not wait for that.
    """
    step, slots, where = flight.step, queues.slots, flight.where
    if flight.tails:
        take_tails(flight, queues)
    live = slots.live[where]
    if queues.void:
        _leave_out_void(flight, queues, live)
    queues.settled = step.index
    due = step.samples & live
    yields = due & outcome.counts.astype(np.bool_)
    errors: dict[int, BoughError] = {}
    if outcome.failed or outcome.barred or flight.rejected:
        errors = _errors(flight, outcome)
        yields[list(errors)] = False
    if outcome.hidden_states:
        _gather_hidden(flight, outcome, queues)
    if flight.chunks:
        _settle_chunks(flight, outcome, queues, yields, now)
    rows = yields.nonzero()[0]
    ended = _settle_tokens(flight, outcome, queues, rows, now) if len(rows) else []
    for chunk in flight.chunks:
        if chunk.is_last and not yields[chunk.row] and chunk.row not in errors:
            ended += _finish_without_output(chunk, outcome, queues, now)
    tell()
    slots.kv_settled[where[live]] = (step.context + step.num_query)[live]
    cache.settle(step.index)
    for gone in ended:
        queues.ratio.observe(int(slots.out_settled[gone.slot]), min(gone.job.limit, queues.limits.estimate_clip_tokens))
        let_go(queues, cache, gone, requeue=False)
    for row, error in errors.items():
        _fail_row(int(where[row]), error, queues, cache, now)
    for row in (due > yields).nonzero()[0].tolist():
        _fail_row(int(where[row]), _unusable("the step yielded nothing for it"), queues, cache, now)
    release_settled(queues, cache)


def _leave_out_void(flight: Flight, queues: Queues, live: Bool) -> None:
    """Rows whose last token was respelled after this step had begun with the old one: what it yields for them is dropped."""
    for row in np.flatnonzero(np.isin(flight.step.slots, list(queues.void))).tolist():
        if queues.void[int(flight.step.slots[row])] == flight.step.index:
            del queues.void[int(flight.step.slots[row])]
            live[row] = False


def take_tails(flight: Flight, queues: Queues) -> None:
    """Forced tokens that a step brought in are output now."""
    slots = queues.slots
    for row, tail in flight.tails.items():
        slot = int(flight.step.slots[row])
        if slots.live[slot]:
            known = int(slots.known[slot])
            slots.history[slot, known : known + len(tail)] = tail
            slots.known[slot] += len(tail)
            slots.out_settled[slot] += len(tail)
            queues.counters.output_tokens += len(tail)
            queues.counters.forced_tokens += len(tail)


# -- tokens ---------------------------------------------------------------------------------------


def _settle_tokens(flight: Flight, outcome: Outcome, queues: Queues, rows: I64, now: float) -> list[Running | Leaving]:
    """Appends each row's token and puts what is due in the mail. Returns the rows that have ended."""
    slots = queues.slots
    where = flight.where[rows]
    tokens = outcome.tokens[:, 0][rows]
    known = slots.known[where]
    slots.history[where, known] = tokens
    slots.known[where] = known + ONE
    num_output = slots.out_settled[where] + ONE
    slots.out_settled[where] = num_output
    queues.counters.output_tokens += len(rows)
    stops = _stops(queues, where, tokens) & (num_output > slots.min_new[where])
    ended = stops | (num_output >= slots.out_limit[where])
    failed: dict[int, End] = {}
    if queues.gates:
        failed = _accept(queues, flight.step.index, where, tokens, stops, ended, now)
    if outcome.output_logprobs is not None:
        _gather_scores(outcome, queues, rows, where)
    _mail(queues, where, tokens, num_output, stops, ended, failed, now)
    return [queues.running.get(slot) or queues.leaving[slot] for slot in where[ended].tolist()]


def _stops(queues: Queues, where: I64, tokens: I32) -> Bool:
    """Which tokens end their rows."""
    slots = queues.slots
    stops = np.zeros(len(where), np.bool_)
    hits = slots.stop_ids.take(where, 0) == tokens[:, None]
    if np.count_nonzero(hits):
        stops[hits.nonzero()[0]] = True
    if slots.more_stops:
        for at, slot in enumerate(where.tolist()):
            more = slots.more_stops.get(slot)
            if more is not None and int(tokens[at]) in more:
                stops[at] = True
    return stops


def _accept(queues: Queues, step: int, where: I64, tokens: I32, stops: Bool, ended: Bool, now: float) -> dict[int, End]:
    """Shows constrained rows their token. Marks those that end with it; returns the ends of those that went wrong."""
    failed: dict[int, End] = {}
    gated = np.flatnonzero(np.isin(where, list(queues.gates)) & ~stops)
    for at, slot, token in zip(gated.tolist(), where[gated].tolist(), tokens[gated].tolist(), strict=True):
        gate, row = queues.gates[slot], queues.running.get(slot) or queues.leaving[slot]
        try:
            accepted = gate.accept(token)
            if accepted and gate.is_open:
                continue
            if accepted and not ended[at] and row.job.jumps:
                tokens[at] = jump(queues, step, row, token)
            if accepted and gate.terminated:
                stops[at] = ended[at] = True
        except Exception:
            accepted = False
        if not accepted:
            error = _misfit(row.job, token)
            failed[at] = make_end(row.job, queues.slots.output(slot), now, "error", error=error)
            ended[at] = True
    return failed


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


def _gather_scores(outcome: Outcome, queues: Queues, rows: I64, where: I64) -> None:
    arrays = outcome.output_logprobs
    assert arrays is not None, "called for steps with scores"
    slot_of = dict(zip(rows.tolist(), where.tolist(), strict=True))
    for at, row in enumerate(arrays.row.tolist()):
        slot = slot_of.get(row)
        if slot is not None:
            add_output((queues.running.get(slot) or queues.leaving[slot]).job, arrays, at)


def _mail(
    queues: Queues,
    where: I64,
    tokens: I32,
    num_output: I32,
    stops: Bool,
    ended: Bool,
    failed: dict[int, End],
    now: float,
) -> None:
    """Puts in the mail the rows that have gathered enough, and those that end."""
    slots = queues.slots
    pending = num_output - slots.emitted[where]
    due = ((pending >= slots.hold[where]) | ended).nonzero()[0]
    if not len(due):
        return
    senders, counts = where[due], pending[due]
    if not np.count_nonzero(counts > ONE):
        out = tokens[due]
    else:
        owner = np.repeat(senders, counts)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        out = slots.history[owner, np.repeat(slots.known[senders] - counts, counts) + offset]
    first = queues.mail.add_rows(slots.request_id[senders], counts, out)
    slots.emitted[senders] = num_output[due]
    special = ended[due]
    if queues.reporting:
        special = special | np.isin(senders, list(queues.reporting))
    for at in special.nonzero()[0].tolist():
        slot, column = int(senders[at]), int(due[at])
        job = (queues.running.get(slot) or queues.leaving[slot]).job
        end = None
        if ended[column]:
            token = int(tokens[column])
            matched = token if stops[column] and token in job.stops else None
            reason: EndReason = "stop" if stops[column] else "length"
            end = failed.get(column) or make_end(job, slots.output(slot), now, reason, matched=matched)
            if end.reason == "length" and slot in queues.gates and queues.gates[slot].ruler is not None:
                queues.counters.cut_grammars += 1
                end.message = f"cut after {end.completion_tokens} tokens, before its grammar was complete"
            count_end(queues, end)
        queues.mail.say(first + at, take_extras(job, end))


# -- prefill rows and what else rows yield ---------------------------------------------------------


def _settle_chunks(flight: Flight, outcome: Outcome, queues: Queues, yields: Bool, now: float) -> None:
    """Prompt scores of the step's chunks, and the time of first tokens."""
    scored = outcome.prompt_logprobs
    for chunk in flight.chunks:
        job = chunk.job
        if not queues.slots.live[chunk.slot]:
            continue
        if job.ask.trace:
            trace_chunk(job, chunk.start, chunk.num_tokens, flight.step.index, now)
        if scored is not None and job.scores_prompt:
            add_prompt(job, scored, np.flatnonzero(scored.row == chunk.row).tolist(), chunk.start)
        if chunk.is_last and job.scores_prompt and job.scored_to == 0:
            add_unpredicted(job)
        if yields[chunk.row] and not job.first_token_s:
            job.first_token_s = now


def _gather_hidden(flight: Flight, outcome: Outcome, queues: Queues) -> None:
    """Hidden states of rows that asked; positions computed a second time after a retraction are left out."""
    step = flight.step
    for row, states in outcome.hidden_states.items():
        slot = int(step.slots[row])
        if not queues.slots.live[slot]:
            continue
        phase = queues.running.get(slot) or queues.prefilling.get(slot) or queues.leaving[slot]
        job = phase.job
        if job.ask.hidden_states == "all":
            first = int(step.context[row]) + int(step.num_query[row]) - len(states)
            fresh = states[max(0, job.hidden_to - first) :]
            job.hidden.extend(fresh.tolist())
            job.hidden_to += len(fresh)
        else:
            job.hidden = states[-1:].tolist()


def _errors(flight: Flight, outcome: Outcome) -> dict[int, BoughError]:
    """Rows whose result can't be used, and what their requests are told."""
    errors = {row: _unusable(why) for row, why in (outcome.failed | flight.rejected).items()}
    for row in outcome.barred:
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


def _fail_row(slot: int, error: BoughError, queues: Queues, cache: PrefixCache, now: float) -> None:
    if queues.slots.live[slot]:
        row = queues.running.get(slot) or queues.prefilling.get(slot) or queues.leaving[slot]
        end = make_end(row.job, queues.slots.output(slot), now, "error", error=error)
        end_request(queues, cache, row, end)


def _finish_without_output(chunk: ChunkRow, outcome: Outcome, queues: Queues, now: float) -> list[Running | Leaving]:
    """Ends a request that wants no tokens: a pooled result, or a prompt that was only to be scored. Returns its row; none
    if there is no such result."""
    job, slot = chunk.job, chunk.slot
    if not queues.slots.live[slot] or (job.limit > len(job.output) and not job.ask.pool):
        return []
    row: Running | Leaving = queues.running.get(slot) or queues.leaving[slot]
    job.first_token_s = job.first_token_s or now
    embedding = b""
    if job.ask.pool:
        pooled = outcome.embeddings.get(chunk.row)
        if pooled is None:
            return []
        embedding = pooled.astype("<f4").tobytes()
    end = make_end(job, queues.slots.output(slot), now, "stop" if job.ask.pool else "length")
    count_end(queues, end)
    output: RowOutput = take_extras(job, end, embedding)
    queues.mail.add(job.id, row=output)
    queues.slots.live[slot] = False
    return [row]
