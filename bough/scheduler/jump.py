"""Jumping ahead: where a grammar leaves no choice, tokens are appended without sampling and computed in one step."""

from __future__ import annotations

from bough.scheduler.constrain import Gate
from bough.scheduler.masks import takeable
from bough.scheduler.queues import Leaving, Queues, Running


def jump(queues: Queues, step: int, row: Running | Leaving, token: int) -> int:
    """A row's sampled token has just settled. Returns it, or the one that stands in its place from now on.

    What is certain to follow goes into the row's next step, if that has not begun. A token that is respelled takes its KV
    and everything after it back: a step in flight that had begun with the old one yields nothing for the row.
    """
    slots, slot = queues.slots, row.slot
    gate = queues.gates[slot]
    ahead = int(slots.last_step[slot]) - step
    if ahead > 1 or slot in queues.forced:
        return token
    better = _respelled(row.job.stops, gate, token)
    if better is not None:
        slots.history[slot, slots.known[slot] - 1] = better
        if ahead:
            queues.void[slot] = step + 1
            slots.kv_len[slot] -= 1
            slots.out_launched[slot] -= 1
    elif ahead:
        return token
    said = token if better is None else better
    if isinstance(row, Leaving):
        return said
    room = int(slots.out_limit[slot]) - int(slots.out_launched[slot]) - 1
    forced = takeable(queues, slot, gate.forced(), room, num_sampled=0)
    if forced or better is not None:
        queues.forced[slot] = [said, *forced]
    return said


def _respelled(stops: tuple[int, ...], gate: Gate, token: int) -> int | None:
    """Puts another token in the place of the last one, if the grammar asks for it and takes it."""
    better = gate.respell()
    if better is None or better in stops:
        return None
    gate.rollback(1)
    if gate.accept(better):
        return better
    if not gate.accept(token):
        raise ValueError(f"the grammar took token {token} and does not take it again")
    return None
