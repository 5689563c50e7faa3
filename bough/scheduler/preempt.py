"""Whose memory is taken when there is not enough. Pure: names slots, changes nothing."""

from __future__ import annotations

import numpy as np

from bough.cache.nodes import Node
from bough.scheduler.estimate import row_need
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Prefilling, Queues, Running, Waiting


def freed_by(queues: Queues, phase: Prefilling | Running) -> int:
    """Pages that become available when this row is released: its own, and those of the tree that only it locks."""
    slots, layout = queues.slots, queues.slots.layout
    pages = slots.num_private(phase.slot)
    gone = slots.gone[:, phase.slot].tolist()
    node: Node | None = phase.node
    while node is not None and (node.locks == 1 or gone):
        if node.locks == 1:
            pages += layout.growing_pages * node.num_columns
        first = (node.depth - len(node.key)) // layout.page_size
        for window, low, held in zip(layout.windows, gone, node.held, strict=bool(node.held)):
            pages += window.num_pages * int(np.count_nonzero(held.locks[max(0, low - first) :] == 1))
        node = node.parent
    return pages + _media_freed_by(queues, phase.slot)


def _media_freed_by(queues: Queues, slot: int) -> int:
    """Pages of media that only this row reads."""
    content = queues.slots.content.get(slot)
    return content.pages.size if content is not None and len(content.users) == 1 else 0


def coming(queues: Queues) -> int:
    """Pages that become available when the steps in flight have settled: those of leaving rows, and columns that
    windows will have passed."""
    slots, layout = queues.slots, queues.slots.layout
    pages = sum(slots.num_private(slot) + _media_freed_by(queues, slot) for slot in queues.leaving)
    if not layout.windows:
        return pages
    reached = [(phase.slot, phase.computed) for phase in queues.prefilling.values()]
    reached += [(slot, int(slots.known[slot]) - 1) for slot in queues.running]
    for slot, num_tokens in reached:
        if queues.in_flight(slot):
            passed = np.maximum(layout.gone(num_tokens) - slots.gone[:, slot], 0)
            pages += sum(w.num_pages * n for w, n in zip(layout.windows, passed.tolist(), strict=True))
    return pages


def youngest_first(queues: Queues, limits: Limits) -> list[Prefilling | Running]:
    """Rows that prefill or run, in the order in which they are retracted: less urgent first, then younger, by the order
    of arrival (`Job.seq`)."""
    phases: list[Prefilling | Running] = [*queues.prefilling.values(), *queues.running.values()]
    if limits.priority:
        return sorted(phases, key=lambda r: (r.job.ask.priority, -r.job.seq))
    return sorted(phases, key=lambda r: -r.job.seq)


def victims(queues: Queues, limits: Limits, *, short_pages: int) -> list[int]:
    """Slots to retract so that `short_pages` pages become available, youngest first. Never the last row, nor one whose
    memory is reserved."""
    phases = youngest_first(queues, limits)
    chosen: list[int] = []
    for phase in phases:
        if short_pages <= 0 or len(chosen) == len(phases) - 1:
            break
        if not queues.slots.pinned[phase.slot]:
            chosen.append(phase.slot)
            short_pages -= max(freed_by(queues, phase), 1)
    return chosen


def give_way(queues: Queues, limits: Limits, waiting: Waiting, short_pages: int, short_slots: int) -> list[int]:
    """Rows that `waiting` may preempt because its priority is sufficiently higher; empty if their memory would not be
    enough."""
    short_slots -= len(queues.leaving)
    short_pages -= coming(queues)
    ceiling = waiting.job.ask.priority - limits.preempt_gap
    chosen: list[int] = []
    ratio = queues.ratio.estimate(len(queues.running) + len(queues.prefilling), limits.conservativeness)
    for phase in youngest_first(queues, limits):
        if short_slots <= 0 and short_pages <= 0:
            break
        if phase.job.ask.priority > ceiling:
            return []
        chosen.append(phase.slot)
        short_slots -= 1
        short_pages -= freed_by(queues, phase) + row_need(queues, limits, phase, ratio)
    return chosen if short_slots <= 0 and short_pages <= 0 else []
