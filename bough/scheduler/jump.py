"""Jumping ahead: where a grammar leaves no choice, tokens are appended without sampling and computed in one step."""

from __future__ import annotations

from bough.scheduler.constrain import Gate
from bough.scheduler.masks import takeable
from bough.scheduler.queues import Leaving, Queues, Running


def jump(queues: Queues, step_index: int, phase: Running | Leaving, token: int, *, cut: bool = False) -> int:
    """Handles a row's newest token, which has just settled. Returns it, or the token that replaces it.

    Tokens that are forced after it go into the row's next step, if that has not begun (`queues.forced`). To *respell* a
    token is to put another one in its place, so that the forced text after it is spelled as the tokenizer would. Its KV
    and everything after it are then dropped: the row is void in a step in flight, which had begun with the old token
    (`queues.void`). `cut`: the row is void in any case, because the device has continued from tokens that were dropped.
    """
    slots, slot = queues.slots, phase.slot
    gate = queues.gates[slot]
    if not _may_jump(queues, step_index, slot):
        return token
    ahead = int(slots.last_step[slot]) - step_index
    better = _respelled(phase.job.stops, gate, token)
    anew = cut or better is not None
    said = token if better is None else better
    if anew:
        slots.history[slot, slots.known[slot] - 1] = said
        slots.settle_bounds(slot)
        if ahead:
            queues.void[slot] = step_index + 1
    elif ahead:
        return token
    if isinstance(phase, Leaving):
        return said
    room = int(slots.out_limit[slot]) - int(slots.out_high[slot]) - 1
    forced = takeable(queues, slot, gate.forced(), room, num_sampled=0)
    if forced or anew:
        queues.forced[slot] = [said, *forced]
    return said


def respells(queues: Queues, step_index: int, phase: Running | Leaving) -> bool:
    """Whether the last token that the row's gate accepted should be respelled, so that tokens sampled after it are
    dropped."""
    gate = queues.gates[phase.slot]
    if not phase.job.jumps or gate.is_open or not _may_jump(queues, step_index, phase.slot):
        return False
    better = gate.respell()
    return better is not None and better not in phase.job.stops


def _may_jump(queues: Queues, step_index: int, slot: int) -> bool:
    """Whether the last token can still be replaced: at most one step with the row has begun since, and no forced tokens
    are waiting."""
    return int(queues.slots.last_step[slot]) - step_index <= 1 and slot not in queues.forced


def _respelled(stops: tuple[int, ...], gate: Gate, token: int) -> int | None:
    """Replaces the last token, if the grammar asks for it and accepts the replacement."""
    better = gate.respell()
    if better is None or better in stops:
        return None
    gate.rollback(1)
    if gate.accept(better):
        return better
    if not gate.accept(token):
        raise ValueError(f"the grammar took token {token} and does not take it again")
    return None
