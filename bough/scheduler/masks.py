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
    for at, row in enumerate(step.constrained.tolist()):
        slot = int(step.slots[row])
        if not slots.live[slot]:
            continue
        try:
            _fill(flight, queues, row, slot, masks[at])
        except Exception as error:
            flight.rejected[row] = f"the grammar failed: {error}"
    flight.tails_accepted = True
    return masks


def _fill(flight: Flight, queues: Queues, row: int, slot: int, mask: I32) -> None:
    gate = queues.gates[slot]
    for token in flight.tails.get(row, ()):
        if not gate.accept(token):
            raise ValueError(f"it forced token {token} and does not accept it")
    gate.fill_mask(mask)
    if slot in queues.running and queues.running[slot].job.jumps:
        _note_forced(queues, slot, gate.forced())


def _note_forced(queues: Queues, slot: int, forced: list[int]) -> None:
    """Keeps the forced tokens that can be taken without sampling: none that ends the row, and room for a sample after."""
    slots, stops = queues.slots, queues.running[slot].job.stops
    forced = forced[: int(slots.out_limit[slot]) - int(slots.out_launched[slot])]
    for at, token in enumerate(forced):
        if token in stops:
            forced = forced[:at]
            break
    if len(forced) > 1 and _ends_with(queues.gates[slot], forced):
        forced = forced[:-1]
    if len(forced) > 1:
        queues.forced[slot] = forced


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
