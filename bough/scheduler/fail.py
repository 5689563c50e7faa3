"""Handles a failed step: its requests end, or are computed again if the device ran out of memory. Other requests
continue."""

from __future__ import annotations

from bough.cache.prefix import PrefixCache
from bough.core.errors import RequestFailed
from bough.scheduler.commit import Flight
from bough.scheduler.leave import end_request, let_go, make_end, release_settled, retract
from bough.scheduler.media import lost_rows
from bough.scheduler.queues import Leaving, Queues, SlotPhase
from bough.scheduler.slots import UNKNOWN_LENGTH, UNKNOWN_TURN
from bough.scheduler.states import give_up_state

_OOM_STEPS = 2
"""Steps. A request whose prefill (or whose decode, with no prefill to blame) ran the device out of memory this often fails:
the second time was in a step of half the size."""
_LEAST_PREFILL = 32
"""Prompt tokens: the cap on steps that is set after the device ran out of memory does not fall below this, which every
device can do."""

_OOM_WORDS = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device ran out of memory: by the name of the exception's class, which device
    libraries agree on, or by the text of a runtime error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OOM_WORDS)


def fail_step(flight: Flight, error: Exception, queues: Queues, cache: PrefixCache, *, now: float) -> None:
    """Settles a step that raised. Nothing it was to compute is used.

    Out of memory: its rows lose their memory and start again, with smaller prefills; prompts that meet it again fail.
    Rows of later steps that read pages of this one start again.
    """
    step = flight.step
    queues.counters.failed_steps += 1
    queues.settled = step.index
    lost = queues.media.store.drop_step(step.index) if queues.media is not None else set()
    cache.drop_step(step.index, lost)
    for save in flight.saves:  # the step was not launched
        give_up_state(cache, save)
    if step.media is not None:
        # It is unknown whether the device has received them.
        queues.slots.turn[step.media.turn_slots] = UNKNOWN_TURN
        queues.slots.media_len[step.media.fixed_slots] = UNKNOWN_LENGTH
    out_of_memory = is_out_of_memory(error)
    queues.counters.oom_steps += out_of_memory
    prefills = {chunk.slot for chunk in flight.chunks}
    if out_of_memory and prefills:
        queues.shrink_prefills(max(flight.prefill_tokens // 2, _LEAST_PREFILL))
    for at, slot in enumerate(step.slots.tolist()):
        phase = _phase_of(queues, slot)
        if phase is None:
            continue
        cache.drop_beyond(phase.node, int(queues.slots.kv_settled[slot]))
        if not queues.slots.live[slot]:
            continue
        if flight.forced_accepted and at in flight.forced and not queues.is_void(slot, step.index):
            queues.gates[slot].rollback(len(flight.forced[at]))
        if out_of_memory and (slot in prefills or not prefills):
            phase.job.oom_steps += 1
        if out_of_memory and phase.job.oom_steps < _OOM_STEPS:
            _start_again(queues, cache, phase)
        else:
            _fail(queues, cache, phase, error, now)
    others: list[SlotPhase] = [*queues.prefilling.values(), *queues.running.values(), *queues.leaving.values()]
    if lost:
        for other in others:
            _drop_readers(queues, cache, other, lost)
    for other in others:
        content = queues.slots.content.get(other.slot)
        lost_media = content is not None and content.is_lost
        if lost_media:
            cache.drop_beyond(other.node, int(queues.slots.kv_settled[other.slot]))
        lost_state = queues.slots.state_step[other.slot] >= step.index
        if (other.node.detached or lost_state or lost_media) and queues.slots.live[other.slot]:
            _start_again(queues, cache, other, keep_kv=False)
    cache.settle(step.index)
    release_settled(queues, cache)


def _drop_readers(queues: Queues, cache: PrefixCache, phase: SlotPhase, lost: set[bytes]) -> None:
    """A row of a later step that read embeddings which were never computed starts again."""
    slot, media = phase.slot, phase.job.media
    computed = int(queues.slots.kv_settled[slot])
    if media is not None and queues.slots.live[slot] and queues.in_flight(slot) and lost_rows(media, lost, computed):
        cache.drop_beyond(phase.node, computed)
        _start_again(queues, cache, phase, keep_kv=False)


def _phase_of(queues: Queues, slot: int) -> SlotPhase | None:
    return queues.prefilling.get(slot) or queues.running.get(slot) or queues.leaving.get(slot)


def _start_again(queues: Queues, cache: PrefixCache, phase: SlotPhase, *, keep_kv: bool = True) -> None:
    """Drops what the row's steps in flight yield, because it depends on the failed step."""
    queues.slots.live[phase.slot] = False
    if isinstance(phase, Leaving):
        let_go(queues, cache, phase, requeue=phase.requeue, keep_kv=keep_kv)
    else:
        retract(queues, cache, phase, dry=False, keep_kv=keep_kv)


def _fail(queues: Queues, cache: PrefixCache, phase: SlotPhase, error: Exception, now: float) -> None:
    if is_out_of_memory(error):
        failed = RequestFailed(
            what="the device ran out of memory while it computed this request",
            why="it did so twice, the second time in a smaller step",
            fix="send a shorter prompt, or start the server with a smaller --mem-fraction-static",
        )
    else:
        failed = RequestFailed(
            what="the step that computed this request failed",
            why="an internal error, which was logged",
            fix="send the request again",
        )
    end_request(
        queues, cache, phase, make_end(queues, phase.job, queues.slots.output(phase.slot), now, "error", error=failed)
    )
