"""Masks for a step's constrained rows, made once every step before it has settled."""

from __future__ import annotations

import numpy as np

from bough.core.step import Mask
from bough.scheduler.commit import Flight
from bough.scheduler.constrain import Gate
from bough.scheduler.queues import Queues


def fill_masks(flight: Flight, queues: Queues) -> Mask:
    """One mask a constrained row. Notes tokens that are forced beyond it, so that the next step takes them at once."""
    step, slots = flight.step, queues.slots
    masks = np.empty((len(step.constrained), -(-queues.limits.vocab_size // 32)), np.int32)
    where = step.slots[step.constrained]
    rows = []
    for at, (row, slot, live) in enumerate(
        zip(step.constrained.tolist(), where.tolist(), slots.live[where].tolist(), strict=True)
    ):
        is_void = bool(queues.void) and queues.void.get(slot) == step.index
        if live and not is_void and (not flight.tails or _take_tail(flight, queues, row, slot)):
            rows.append((row, slot, queues.gates[slot], masks[at]))
        else:
            masks[at] = -1
    flight.tails_accepted = True
    if len(rows) > 1 and queues.grammars is not None:
        queues.grammars.look([ruler for _, _, gate, _ in rows if (ruler := gate.ruler) is not None])
    for row, slot, gate, mask in rows:
        try:
            gate.fill_mask(mask)
            if not gate.is_open:
                _note_forced(queues, slot, gate)
        except Exception as error:
            mask[:] = -1
            flight.rejected[row] = f"the grammar failed: {error}"
    return masks


def _take_tail(flight: Flight, queues: Queues, row: int, slot: int) -> bool:
    """Shows the row's gate the forced tokens that the step brought in. False: it does not take them."""
    for token in flight.tails.get(row, ()):
        if not queues.gates[slot].accept(token):
            flight.rejected[row] = f"the grammar failed: it forced token {token} and does not accept it"
            return False
    return True


def _note_forced(queues: Queues, slot: int, gate: Gate) -> None:
    """Tokens that follow the one that is being sampled go into the row's next step."""
    if slot in queues.running and queues.running[slot].job.jumps:
        forced = gate.forced()
        if len(forced) > 1:
            room = int(queues.slots.out_limit[slot]) - int(queues.slots.out_launched[slot])
            forced = takeable(queues, slot, forced, room, num_sampled=1)
        if len(forced) > 1:
            queues.forced[slot] = forced


def takeable(queues: Queues, slot: int, forced: list[int], room: int, *, num_sampled: int) -> list[int]:
    """The forced tokens that can be taken without sampling: none that ends the row, and at most `room` of them.

    The first `num_sampled` are being sampled anyway.
    """
    stops = queues.running[slot].job.stops
    forced = forced[:room]
    for at, token in enumerate(forced):
        if token in stops:
            forced = forced[:at]
            break
    if len(forced) > num_sampled and queues.gates[slot].ends_with(forced):
        forced = forced[:-1]
    return forced
