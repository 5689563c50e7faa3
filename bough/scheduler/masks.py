"""Masks for a step's constrained rows, made once every step before it has settled."""

from __future__ import annotations

import numpy as np

from bough.core.step import I32, Mask
from bough.scheduler.commit import Flight
from bough.scheduler.constrain import Gate
from bough.scheduler.queues import Queues


def fill_masks(flight: Flight, queues: Queues) -> Mask:
    """One mask a constrained row. Notes tokens that are forced beyond it, so that the next step takes them at once."""
    step, slots = flight.step, queues.slots
    masks = np.full((len(step.constrained), -(-queues.limits.vocab_size // 32)), -1, np.int32)
    rows = []
    for at, row in enumerate(step.constrained.tolist()):
        slot = int(step.slots[row])
        if slots.live[slot] and queues.void.get(slot) != step.index and _take_tail(flight, queues, row, slot):
            rows.append((at, row, slot))
    flight.tails_accepted = True
    if len(rows) > 1 and queues.grammars is not None:
        queues.grammars.look([ruler for _, _, slot in rows if (ruler := queues.gates[slot].ruler) is not None])
    for at, row, slot in rows:
        try:
            _fill(queues, slot, masks[at])
        except Exception as error:
            flight.rejected[row] = f"the grammar failed: {error}"
    return masks


def _take_tail(flight: Flight, queues: Queues, row: int, slot: int) -> bool:
    """Shows the row's gate the forced tokens that the step brought in. False: it does not take them."""
    for token in flight.tails.get(row, ()):
        if not queues.gates[slot].accept(token):
            flight.rejected[row] = f"the grammar failed: it forced token {token} and does not accept it"
            return False
    return True


def _fill(queues: Queues, slot: int, mask: I32) -> None:
    gate = queues.gates[slot]
    gate.fill_mask(mask)
    if slot in queues.running and queues.running[slot].job.jumps:
        room = int(queues.slots.out_limit[slot]) - int(queues.slots.out_launched[slot])
        forced = takeable(queues, slot, gate.forced(), room, num_sampled=1)
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
    if len(forced) > num_sampled and _ends_with(queues.gates[slot], forced):
        forced = forced[:-1]
    return forced


def _ends_with(gate: Gate, tokens: list[int]) -> bool:
    """Would the grammar be complete after these tokens?"""
    accepted = 0
    for token in tokens:
        if not gate.accept(token):
            raise ValueError(f"it forces token {token} and does not accept it")
        accepted += 1
    ends = gate.terminated
    gate.rollback(accepted)
    return ends
