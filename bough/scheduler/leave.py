"""How rows release their memory: they end, or are retracted and return to the queue. Pages are kept until the last step
that reads them has settled."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from bough.cache.nodes import Node
from bough.cache.prefix import KeptTail, PrefixCache
from bough.core.errors import BoughError
from bough.core.messages import End, EndReason, RowOutput, TraceSpan, owned_name, plain_namespace
from bough.core.reasoning import reasoning_of
from bough.core.step import I32, I64
from bough.scheduler.queues import Compiling, Job, Leaving, Phase, Prefilling, Queues, Running, SlotPhase, Waiting
from bough.scheduler.states import drop_state, give_up_state, keep_state, take_state

_NO_IDS = np.empty(0, np.int32)


def output_of(queues: Queues, phase: Phase) -> I32:
    """The request's settled output ids."""
    if isinstance(phase, Compiling | Waiting):
        return phase.job.output
    return queues.slots.output(phase.slot)


def make_end(
    queues: Queues,
    job: Job,
    output: I32,
    now: float,
    reason: EndReason,
    *,
    matched: int | None = None,
    error: BoughError | None = None,
) -> End:
    """How the request ended, and its token counts and times so far."""
    admitted = job.admitted_s or now
    first = job.first_token_s or now
    reasoning, mark = reasoning_of(output, job.ask.reasoning_end, opened=job.ask.reasoning_open)
    decoded, drafts, accepted = drafts_of(queues, job)
    return End(
        reason=reason,
        matched=matched,
        message=error.sentence() if error else "",
        status=error.status if error else 0,
        code=(error.code or error.type) if error else "",
        param=(error.param or "") if error else "",
        prompt_tokens=len(job.prompt),
        completion_tokens=len(output),
        cached_tokens=job.cached_tokens,
        media_tokens=job.media.tokens() if job.media is not None else {},
        reasoning_tokens=reasoning,
        reasoning_mark=mark,
        retractions=job.retractions,
        queued_s=max(0.0, admitted - job.accepted_s),
        prefill_s=max(0.0, first - admitted) if job.admitted_s else 0.0,
        decode_s=max(0.0, now - first) if job.first_token_s else 0.0,
        grammar_s=job.grammar_s,
        decode_steps=decoded,
        draft_tokens=drafts,
        accepted_tokens=accepted,
        right_drafts=right_in(queues, job, decoded),
        spans=_timeline(job, len(output), now) if job.ask.trace else [],
    )


def drafts_of(queues: Queues, job: Job) -> tuple[int, int, int]:
    """For a request with drafts: the number of its decode steps, drafts and accepted drafts."""
    phase, slots = queues.where.get(job.id), queues.slots
    if isinstance(phase, Running | Leaving):
        slot = phase.slot
        here = slots.num_decoded[slot], slots.num_drafts[slot], slots.num_accepted[slot]
        return tuple(before + int(more) for before, more in zip(job.drafted, here, strict=True))  # type: ignore[return-value]
    return job.drafted


def right_in(queues: Queues, job: Job, num_steps: int) -> list[int]:
    """Of the `num_steps` that a request decoded in: how many had as many right drafts as the index says, up to the most."""
    phase = queues.where.get(job.id)
    counts = list(job.right_in)
    if queues.drafter is not None and isinstance(phase, Running | Leaving):
        here = np.trim_zeros(queues.slots.num_right_in[phase.slot], "b").tolist()
        counts = [before + more for before, more in zip_longest(counts, here, fillvalue=0)]
    if num_steps:  # those without drafts had none that was right
        counts[:1] = [num_steps - sum(counts[1:])]
    return counts


def trace_chunk(job: Job, start: int, num_tokens: int, step: int, now: float) -> None:
    """Records that a chunk of a traced prompt has been computed: its time span begins where the previous one ended."""
    before = job.chunks[-1].start_s + job.chunks[-1].seconds if job.chunks else job.admitted_s
    job.chunks.append(TraceSpan("prefill", before, now - before, {"start": start, "tokens": num_tokens, "step": step}))


def _timeline(job: Job, num_output: int, now: float) -> list[TraceSpan]:
    admitted = job.admitted_s or now
    spans = [TraceSpan("queue", job.accepted_s, admitted - job.accepted_s, {"cached_tokens": job.cached_tokens})]
    if job.grammar_s:
        spans.insert(0, TraceSpan("grammar", job.accepted_s, job.grammar_s))
    spans += job.chunks
    if job.first_token_s:
        detail: dict[str, int | float | str] = {"tokens": num_output, "retractions": job.retractions}
        spans.append(TraceSpan("decode", job.first_token_s, now - job.first_token_s, detail))
    return spans


def take_extras(job: Job, end: End | None = None, embedding: bytes = b"") -> RowOutput:
    """Takes what was collected for the request beyond token ids."""
    row = RowOutput(
        end=end,
        logprobs=job.output_scores,
        prompt_logprobs=job.prompt_scores,
        hidden_states=job.hidden or None,
        embedding=embedding,
    )
    job.output_scores = job.prompt_scores = None
    job.hidden = []
    return row


def end_request(queues: Queues, cache: PrefixCache, phase: Phase, end: End, *, send_held: bool = True) -> None:
    """Ends a request in any phase, outside of `settle`, and sends its end together with tokens that were held back."""
    job = phase.job
    held = _NO_IDS
    if send_held:
        emitted = job.emitted if isinstance(phase, Compiling | Waiting) else int(queues.slots.emitted[phase.slot])
        held = output_of(queues, phase)[emitted:].copy()
    queues.mail.add(job.id, held, take_extras(job, end))
    count_end(queues, end)
    match phase:
        case Compiling():
            del queues.compiling[job.id]
            del queues.where[job.id]
            if queues.grammars is not None:
                queues.grammars.cancel(job.id)
        case Waiting():
            queues.waiting.remove(phase)
            del queues.where[job.id]
        case _:
            let_go(queues, cache, phase, requeue=False)


def count_end(queues: Queues, end: End) -> None:
    counters = queues.counters
    if end.reason == "error":
        counters.failed += 1
    elif end.reason == "abort":
        counters.aborted += 1
    else:
        counters.finished += 1


def let_go(queues: Queues, cache: PrefixCache, phase: SlotPhase, *, requeue: bool, keep_kv: bool = True) -> None:
    """Takes a row out of the plan. Its memory goes back at once, or when its last step in flight has settled.

    With `requeue` the request waits again, with the output it has by then; otherwise it has ended. Without `keep_kv`
    its memory is not to be trusted: what its steps in flight yield is dropped, and nothing of it enters the tree.
    """
    slot = phase.slot
    match phase:
        case Prefilling():
            del queues.prefilling[slot]
        case Running():
            queues.stop_running(slot)
        case Leaving():
            del queues.leaving[slot]
            requeue = requeue and phase.requeue
            keep_kv = keep_kv and phase.keep_kv
    queues.forced.pop(slot, None)
    if queues.media is not None and phase.job.media is not None:
        queues.media.let_go(phase.job.id, phase.job.media)
    leaving = Leaving(phase.job, slot, phase.node, requeue, keep_kv)
    if requeue:
        queues.where[phase.job.id] = leaving
    else:
        queues.where.pop(phase.job.id, None)
    if not requeue or not keep_kv:
        queues.slots.live[slot] = False
    if queues.in_flight(slot):
        queues.leaving[slot] = leaving
    else:
        release(queues, cache, leaving)


def retract(
    queues: Queues, cache: PrefixCache, phase: Prefilling | Running, *, dry: bool, keep_kv: bool = True
) -> None:
    """Takes a row's memory away; it goes to the head of the queue."""
    phase.job.retractions += 1
    queues.counters.retractions += 1
    if dry:
        phase.job.dry_retractions += 1
        queues.ratio.retracted()
    let_go(queues, cache, phase, requeue=True, keep_kv=keep_kv)


def release(queues: Queues, cache: PrefixCache, phase: Leaving) -> None:
    """Frees a row that no step in flight reads any more: its full pages enter the tree, other pages and its slot become
    free."""
    slots = queues.slots
    slot, job, node = phase.slot, phase.job, phase.node
    if phase.keep_kv and cache.enabled and not node.detached:
        size = cache.page_size
        end = job.tree_end(int(min(slots.kv_settled[slot], slots.known[slot])))
        end -= end % size
        if end > node.depth:
            save = take_state(queues, slot)
            if save is not None and node.depth < save.num_tokens <= end:
                node = _enter_tree(queues, cache, phase, node, save.num_tokens)
                keep_state(cache, node, save, queues.settled)
            elif save is not None:
                give_up_state(cache, save)
            node = _enter_tree(queues, cache, phase, node, end)
    drop_state(queues, cache, slot)
    private = slots.private_pages(slot)
    if job.ask.keep and phase.keep_kv and not phase.requeue and slots.kv_settled[slot] >= len(job.prompt):
        private = _keep(queues, cache, phase, node, private)
    cache.release(node, private, slots.gone[:, slot])
    content = slots.content.pop(slot, None)
    if content is not None:
        cache.fixed.let_go(content, slot, keep=cache.enabled)
    if queues.drafter is not None:
        queues.drafter.forget(queues, slot, job, has_ended=not phase.requeue)
    if phase.requeue:
        job.drafted = drafts_of(queues, job)
        job.right_in = tuple(right_in(queues, job, job.drafted[0]))
        job.output = slots.output(slot).copy()
        job.emitted = int(slots.emitted[slot])
    queues.gates.pop(slot, None)
    queues.void.pop(slot, None)
    queues.proposed.pop(slot, None)
    queues.reporting.discard(slot)
    slots.give_back(slot)
    if phase.requeue:
        waiting = Waiting(job, np.concatenate([job.key, job.output.astype(np.int64)]))
        queues.where[job.id] = waiting
        queues.waiting.put_back(waiting)


def _enter_tree(queues: Queues, cache: PrefixCache, phase: Leaving, node: Node, end: int) -> Node:
    """Moves the row's pages up to `end` into the tree. Returns the node that they end in."""
    slots, slot, size = queues.slots, phase.slot, cache.page_size
    if end <= node.depth:
        return node
    tail = key_span(queues, phase.job, slot, node.depth, end)
    pages = slots.table[:, slot, node.depth // size : end // size]
    slots.tree_columns[slot] = end // size
    gone = slots.gone[:, slot]
    return cache.insert(node, tail, pages, step=-1, gone=gone, priority=phase.job.ask.priority).node


def _keep(queues: Queues, cache: PrefixCache, phase: Leaving, node: Node, private: I32) -> I32:
    """Keeps an ended request's prompt for a join. Returns the remaining pages, which are to be freed."""
    job, slots = phase.job, queues.slots
    if not cache.enabled or node.detached or job.media is not None:
        return private
    pages = _NO_IDS
    if len(job.key) % cache.page_size:
        pages = slots.table[:, phase.slot, slots.tree_columns[phase.slot]].copy()
    name = (plain_namespace(job.ask.namespace), owned_name(job.ask.tenant, job.ask.rid))
    cache.keep(name, KeptTail(job.ask.namespace, job.key, pages))
    return private[np.isin(private, pages, invert=True)] if len(pages) else private


def release_settled(queues: Queues, cache: PrefixCache) -> None:
    """Releases the rows whose last step has settled."""
    if queues.leaving:
        last_step, settled = queues.slots.last_step, queues.settled
        for phase in [phase for slot, phase in queues.leaving.items() if last_step[slot] <= settled]:
            del queues.leaving[phase.slot]
            release(queues, cache, phase)


def key_span(queues: Queues, job: Job, slot: int, start: int, stop: int) -> I64:
    """Tokens `start..stop` of a row as the tree sees them."""
    cut = len(job.key)
    if stop <= cut:
        return job.key[start:stop]
    rest: I64 = queues.slots.history[slot, max(start, cut) : stop].astype(np.int64)
    return rest if start >= cut else np.concatenate([job.key[start:], rest])
