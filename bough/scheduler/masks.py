"""Masks for a step's constrained rows, made once every step before it has settled."""

from __future__ import annotations

import numpy as np

from bough.core.step import FIRST_DRAFT, Mask
from bough.scheduler.commit import Flight
from bough.scheduler.constrain import Gate
from bough.scheduler.queues import Queues


def fill_masks(flight: Flight, queues: Queues) -> Mask:
    """The masks of constrained rows: one for a row's next token, and one more for what follows each of its drafts. Notes
    tokens that are forced beyond the next one, so that the next step takes them at once."""
    step, slots = flight.step, queues.slots
    constrained = step.constrained
    drafts = _drafts_of(flight, queues)
    counts = [1 + len(drafts.get(row, ())) for row in constrained.tolist()]
    masks = np.empty((sum(counts), -(-queues.limits.vocab_size // 32)), np.int32)
    slot_ids = step.slots[constrained]
    rows, at = [], 0
    for row, slot, live, count in zip(
        constrained.tolist(), slot_ids.tolist(), slots.live[slot_ids].tolist(), counts, strict=True
    ):
        if (
            live
            and not queues.is_void(slot, step.index)
            and (not flight.forced or _accept_forced(flight, queues, row, slot))
        ):
            rows.append((row, slot, queues.gates[slot], masks[at : at + count]))
        else:
            masks[at : at + count] = -1
        at += count
    flight.forced_accepted = True
    if len(rows) > 1 and queues.grammars is not None:
        queues.grammars.look([ruler for _, _, gate, _ in rows if (ruler := gate.ruler) is not None])
    for row, slot, gate, mask in rows:
        try:
            gate.fill_mask(mask[0])
            if len(mask) > 1:
                _fill_behind(gate, drafts[row], mask[1:])
            elif not gate.is_open:
                _note_forced(queues, slot, gate)
        except Exception as error:
            mask[:] = -1
            flight.rejected[row] = f"the grammar failed: {error}"
    return masks


def _drafts_of(flight: Flight, queues: Queues) -> dict[int, list[tuple[int, int]]]:
    """The drafts of constrained rows that have any, each with the one that it follows."""
    step = flight.step
    if not len(step.drafts):
        return {}
    ends = np.cumsum(step.num_query)
    found = {}
    for row in step.constrained[step.constrained < step.num_decodes].tolist():
        count = int(step.drafts[row])
        if count:
            tokens = step.tokens[ends[row] - count : ends[row]].tolist()
            slot = int(step.slots[row])
            if not queues.slots.live[slot]:  # the step that left it drafts has failed: its samples are dropped
                found[row] = [(0, place) for place in range(count)]
                continue
            known = queues.proposed.get(slot, [])
            found[row] = [
                known[FIRST_DRAFT - token] if token < 0 else (token, place) for place, token in enumerate(tokens)
            ]
    return found


def _fill_behind(gate: Gate, drafts: list[tuple[int, int]], masks: Mask) -> None:
    """Masks for the tokens after each of a row's drafts. Samples after a draft that the grammar forbids are dropped:
    the mask before it does not allow it."""
    masks[:] = -1
    children: dict[int, list[int]] = {}
    for number, (_, parent) in enumerate(drafts, 1):
        children.setdefault(parent, []).append(number)

    def walk(parent: int) -> None:
        for number in children.get(parent, ()):
            if gate.accept(drafts[number - 1][0]):
                gate.fill_mask(masks[number - 1])
                walk(number)
                gate.rollback(1)

    walk(0)


def _accept_forced(flight: Flight, queues: Queues, row: int, slot: int) -> bool:
    """Passes forced tokens of the step to the row's gate. False: it refuses them."""
    for token in flight.forced.get(row, ()):
        if not queues.gates[slot].accept(token):
            flight.rejected[row] = f"the grammar failed: it forced token {token} and does not accept it"
            return False
    return True


def _note_forced(queues: Queues, slot: int, gate: Gate) -> None:
    """Puts tokens that follow the one being sampled into the row's next step."""
    if slot in queues.running and queues.running[slot].job.jumps:
        forced = gate.forced()
        if len(forced) > 1:
            room = int(queues.slots.out_limit[slot]) - int(queues.slots.out_high[slot])
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
