"""Admits messages about requests to the queues. Requests that can't be served end here, with a reason."""

from __future__ import annotations

import heapq

import numpy as np
from msgspec import structs

from bough.cache.prefix import PrefixCache
from bough.core.errors import (
    Aborted,
    BoughError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unavailable,
    no_such_token,
    overflow,
)
from bough.core.grammar import CompileFailed
from bough.core.messages import (
    Abort,
    Began,
    Generate,
    RowOutput,
    StopAt,
    adapter_namespace,
    home_worker,
    media_namespace,
    unpack_ids,
)
from bough.core.sampling import GrammarSpec
from bough.scheduler.constrain import Gate
from bough.scheduler.leave import end_request, make_end, output_of
from bough.scheduler.limits import Limits
from bough.scheduler.media import job_media, media_key
from bough.scheduler.queues import Compiling, Job, Queues, Waiting


def accept(queues: Queues, ask: Generate, *, now: float) -> None:
    """A new request waits, or ends with an error that says why. A request id that is known already is ignored."""
    if ask.id in queues.where:
        return
    queues.counters.accepted += 1
    queues.mail.put(Began(id=ask.id, rid=ask.rid, text=ask.text))
    job = _job(queues, ask, now)
    try:
        _check(queues, job, now)
        if ask.adapter:
            job.ask = structs.replace(ask, namespace=adapter_namespace(ask.namespace, ask.adapter))
        if ask.media:
            _open_media(queues, job)
    except BoughError as error:
        refuse(queues, job, error, now)
        return
    queues.add_deadline(job)
    grammar = ask.sampling.grammar
    if grammar is not None and queues.grammars is not None:
        queues.compiling[job.id] = queues.where[job.id] = Compiling(job)
        queues.grammars.submit(job.id, grammar)
    else:
        if ask.thinking_budget >= 0 and ask.reasoning_end:
            job.gate = Gate(None, marker=ask.reasoning_end, before=_tail(job), budget=ask.thinking_budget)
        _enqueue(queues, job)


def _open_media(queues: Queues, job: Job) -> None:
    """Attaches the request's media to its job. Raises `BoughError`."""
    account = queues.media
    limits, opened = (None, None) if account is None else (account.limits, account.open_features)
    job.media = job_media(job.ask, job.prompt, limits, opened, page_size=queues.limits.page_size)
    job.key = media_key(job.key, job.media)
    if job.media.fixed_key:  # every token depends on all of the media
        job.ask = structs.replace(job.ask, namespace=media_namespace(job.ask.namespace, job.media.fixed_key))


def refuse(queues: Queues, job: Job, error: BoughError, now: float) -> None:
    """Ends a request that never entered a queue."""
    queues.counters.failed += 1
    end = make_end(queues, job, job.output, now, "error", error=error)
    queues.mail.add(job.id, row=RowOutput(end=end))


def _enqueue(queues: Queues, job: Job) -> None:
    waiting = Waiting(job, job.key)
    queues.where[job.id] = waiting
    queues.waiting.add(waiting)


def _job(queues: Queues, ask: Generate, now: float) -> Job:
    prompt = unpack_ids(ask.prompt)
    spec = ask.logprobs
    queues.next_seq += 1
    job = Job(
        ask=ask,
        id=ask.id,
        prompt=prompt,
        key=prompt.astype(np.int64),
        seq=queues.next_seq,
        limit=0 if ask.pool else output_limit(queues.limits, len(prompt), ask.sampling.max_new_tokens),
        stops=tuple(dict.fromkeys(ask.eos_ids + ask.sampling.stop_token_ids)),
        accepted_s=now,
        scored_to=max(spec.start, 0) if spec is not None and spec.start >= 0 else 0,
    )
    if queues.limits.num_snapshots is not None:
        job.jumps = False  # a respelled token can't be taken out of a state
    return job


def _check_items(job: Job) -> None:
    """Raises `InvalidRequest` for invalid items. The server's own entrypoints make them, so this is a bug there."""
    ask = job.ask
    if (
        min(ask.items) < 1
        or job.items_at < 1
        or job.limit
        or ask.logprobs is None
        or ask.logprobs.start != job.items_at
    ):
        raise InvalidRequest(
            what="the prompt's items do not fit",
            why="they have tokens, follow some that all of them see, and are scored from there on",
            fix="send them as one prompt each",
        )


def output_limit(limits: Limits, num_prompt: int, max_new_tokens: int) -> int:
    """Output tokens that context and memory leave room for. The last one's KV is never needed."""
    room = min(limits.context_length - num_prompt, limits.capacity_tokens - num_prompt + 1)
    return max(0, min(max_new_tokens, room))


def _check(queues: Queues, job: Job, now: float) -> None:
    limits, ask = queues.limits, job.ask
    if queues.draining:
        raise Unavailable(what="the server is shutting down", fix="send the request to another replica")
    if 0 < ask.deadline_s <= now:
        raise DeadlineExceeded(what="the request's deadline had passed when it arrived", fix="allow more time")
    if queues.screen is not None:
        queues.screen(ask)
    _check_prompt(limits, job)
    if limits.media is not None and limits.media.required and not ask.media:
        raise InvalidRequest(
            what="the request has no sound",
            why="the served model writes down what it hears, and knows nothing else",
            fix="send a sound to /v1/audio/transcriptions",
            param="prompt",
        )
    ask.sampling.check(limits.vocab_size)
    if ask.logprobs is not None:
        ask.logprobs.check(limits.vocab_size)
    if ask.items:
        _check_items(job)
    if not 0 <= ask.adapter <= limits.num_adapters:
        raise InvalidRequest(
            what=f"the request names adapter {ask.adapter}",
            why=f"the served model has {limits.num_adapters}",
            fix="leave it out",
        )
    if ask.sampling.grammar is not None and queues.grammars is None:
        raise InvalidRequest(
            what="constrained output is switched off",
            why="the server was started with --grammar-backend none",
            fix="start it with --grammar-backend xgrammar",
        )
    num_queued = len(queues.waiting) + len(queues.compiling)
    if num_queued >= limits.max_queued_requests:
        raise Overloaded(
            what=f"{num_queued} requests are waiting already",
            why=f"at most {limits.max_queued_requests} may (--max-queued-requests)",
            fix="come back later",
        )
    if queues.waiting.num_tokens and queues.waiting.num_tokens + len(job.prompt) > limits.max_queued_tokens:
        raise Overloaded(
            what=f"{queues.waiting.num_tokens} prompt tokens are waiting already",
            why=f"at most {limits.max_queued_tokens} may (--max-queued-tokens)",
            fix="come back later",
        )


def _check_prompt(limits: Limits, job: Job) -> None:
    count = len(job.prompt)
    if count == 0:
        raise InvalidRequest(what="the prompt has no tokens", fix="send at least one token", param="prompt")
    if int(job.prompt.view(np.uint32).max()) >= limits.vocab_size:  # negative numbers become very large ones
        low, high = int(job.prompt.min()), int(job.prompt.max())
        bad = low if low < 0 else high
        raise no_such_token(f"the prompt has token id {bad}", limits.vocab_size, param="prompt")
    wanted = 0 if job.ask.pool else min(job.ask.sampling.max_new_tokens, 1)
    if count + wanted > limits.context_length:
        raise overflow(
            limits.context_length,
            f"the prompt has {count} tokens, at most {limits.context_length - wanted} fit",
            fix="shorten the prompt, or start the server with a larger --context-length",
            param="prompt",
        )
    if count > limits.capacity_tokens:
        raise PromptTooLong(
            what=f"the prompt has {count} tokens, memory for {limits.capacity_tokens} exists",
            why="the KV cache is smaller than the model's context",
            fix="shorten the prompt, or give the KV cache more memory (--mem-fraction-static, --max-total-tokens)",
            param="prompt",
        )


# -- later events of a request ----------------------------------------------------------------------


def abort(queues: Queues, cache: PrefixCache, message: Abort, *, now: float) -> None:
    """Ends a request wherever it is. Unknown or ended ones are ignored."""
    _end_with(queues, cache, message.id, Aborted(what=message.reason), now)


def expire(queues: Queues, cache: PrefixCache, *, now: float) -> None:
    """Drops requests whose deadline has passed."""
    while queues.deadlines and queues.deadlines[0][0] <= now:
        _, request_id = heapq.heappop(queues.deadlines)
        error = DeadlineExceeded(what="the request's deadline has passed", fix="allow more time or ask for less")
        _end_with(queues, cache, request_id, error, now)


def abort_all(
    queues: Queues,
    cache: PrefixCache,
    error: BoughError,
    *,
    now: float,
    rid: str = "",
    tenant: str | None = None,
    worker: int | None = None,
) -> int:
    """Ends requests with `error`: all of them, or those with exactly this name, tenant and API worker, if given.
    Returns their number."""
    ids = [
        request_id
        for request_id, phase in queues.where.items()
        if (not rid or phase.job.ask.rid == rid)
        and tenant in (None, phase.job.ask.tenant)
        and worker in (None, home_worker(request_id))
    ]
    for request_id in ids:
        _end_with(queues, cache, request_id, error, now)
    return len(ids)


def _end_with(queues: Queues, cache: PrefixCache, request_id: int, error: BoughError, now: float) -> None:
    phase = queues.where.get(request_id)
    if phase is not None:
        end = make_end(queues, phase.job, output_of(queues, phase), now, "abort", error=error)
        end_request(queues, cache, phase, end)


def stop_at(queues: Queues, cache: PrefixCache, message: StopAt, *, now: float) -> None:
    """Ends a request whose end the detokenizer found in the text. Ignores requests that have already ended."""
    phase = queues.where.get(message.id)
    if phase is not None:
        output = output_of(queues, phase)[: message.num_tokens]
        end = make_end(queues, phase.job, output, now, "stop")
        end_request(queues, cache, phase, end, send_held=False)


def collect_grammars(queues: Queues, cache: PrefixCache, *, now: float) -> None:
    """Requests whose grammar is ready join the queue; those whose grammar is wrong end."""
    if not queues.compiling or queues.grammars is None:
        return
    for answer in queues.grammars.poll():
        phase = queues.compiling.pop(answer.id, None)
        if phase is None:
            continue
        job, ask = phase.job, phase.job.ask
        job.grammar_s = now - job.accepted_s
        spec = ask.sampling.grammar
        assert spec is not None, "only requests with a grammar are compiled"
        if isinstance(answer, CompileFailed):
            del queues.where[job.id]
            end = make_end(queues, job, job.output, now, "error", error=_unusable(answer, spec))
            end.status = answer.status
            queues.mail.add(job.id, row=RowOutput(end=end))
            queues.counters.failed += 1
            continue
        job.gate = Gate(
            answer.matcher,
            marker=ask.reasoning_end,
            before=_tail(job),
            after_reasoning=spec.after_reasoning,
            budget=ask.thinking_budget,
            ends=ask.eos_ids,
        )
        _enqueue(queues, job)


def _unusable(answer: CompileFailed, spec: GrammarSpec) -> InvalidRequest:
    """The error that the client gets for its grammar."""
    if answer.status != 400:
        return InvalidRequest(what=answer.message, fix="try again soon")
    param = spec.param or ("json_schema" if spec.kind == "json" else spec.kind)
    return InvalidRequest(what=answer.message, fix=f"change {param}, or leave it out", param=param)


def _tail(job: Job) -> list[int]:
    """The prompt's last tokens, as many as the end of the reasoning may have begun with."""
    most = len(job.ask.reasoning_end)
    return [int(token) for token in job.prompt[-most:]] if most else []
