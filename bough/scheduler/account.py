"""Checks the page accounting: every page has one owner, and every row's page table agrees with the tree."""

from __future__ import annotations

import numpy as np

from bough.cache.nodes import Node
from bough.cache.prefix import AccountError, PrefixCache
from bough.core.step import I32
from bough.scheduler.queues import Queues, SlotPhase


def check_account(queues: Queues, cache: PrefixCache) -> None:
    """Raises `AccountError` for the first inconsistency. For tests: it looks at every page."""
    slots = queues.slots
    phases: list[SlotPhase] = [*queues.prefilling.values(), *queues.running.values(), *queues.leaving.values()]
    if len(phases) + slots.num_free != slots.num_slots or len({phase.slot for phase in phases}) != len(phases):
        raise AccountError(f"{len(phases)} rows and {slots.num_free} free slots of {slots.num_slots}")
    private = [slots.private_pages(phase.slot) for phase in phases]
    cache.check(np.concatenate(private) if private else np.empty(0, np.int32))
    _check_media(queues, cache, phases)
    _check_states(queues, cache, phases)
    locks: dict[Node, int] = {}
    seen: dict[Node, I32] = {}
    for phase in phases:
        path: list[Node] = []
        node: Node | None = phase.node
        while node is not None:
            locks[node] = locks.get(node, 0) + 1
            path.insert(0, node)
            node = node.parent
        _check_table(queues, phase, path, seen)
        _check_bounds(queues, phase, cache.page_size)
    for each in cache.tree.nodes():
        if each.locks != locks.get(each, 0):
            raise AccountError(f"{each!r} is locked by {locks.get(each, 0)} rows")
        for at, held in enumerate(each.held):
            if (each in seen and (held.locks != seen[each][at]).any()) or (each not in seen and held.locks.any()):
                raise AccountError(
                    f"{each!r} has locks {held.locks.tolist()} of a window, which rows do not account for"
                )


def _check_media(queues: Queues, cache: PrefixCache, phases: list[SlotPhase]) -> None:
    """Compares what cross attention of rows reads with what the cache knows of its readers."""
    content = queues.slots.content
    readers = {slot: id(each) for slot, each in content.items()}
    known = {slot: id(each) for each in cache.fixed.contents() for slot in each.users}
    if readers != known or not content.keys() <= {phase.slot for phase in phases}:
        raise AccountError(f"slots {sorted(readers)} read media, the cache has readers {sorted(known)}")
    for phase in phases:
        media, held = phase.job.media, content.get(phase.slot)
        wanted = b"" if media is None else media.fixed_key
        if wanted != (b"" if held is None else held.key):
            raise AccountError(f"slot {phase.slot} reads other media than its request has")


def _check_states(queues: Queues, cache: PrefixCache, phases: list[SlotPhase]) -> None:
    """Compares the places for states that rows have with those that the cache has lent."""
    held = queues.slots.snapshot
    slots = {int(slot) for slot in np.flatnonzero(held)}
    lent = 0 if cache.snapshots is None else cache.snapshots.num_lent
    if len(slots) != lent or len({int(held[slot]) for slot in slots}) != lent:
        raise AccountError(f"slots have the places {held[sorted(slots)].tolist()} for states, {lent} are lent")
    if not slots <= {phase.slot for phase in phases}:
        raise AccountError(f"slots {sorted(slots)} have places for states, and some of them no row")


def _check_table(queues: Queues, phase: SlotPhase, path: list[Node], seen: dict[Node, I32]) -> None:
    """Compares a row's table with its path, and adds the columns of windows that it sees to `seen`."""
    slots = queues.slots
    pages = np.concatenate([node.pages for node in path], axis=1)
    held = slots.table[:, phase.slot, : int(slots.tree_columns[phase.slot])]
    counts = np.ones(held.shape, np.bool_)
    gone = slots.gone[:, phase.slot].tolist()
    for window, first in zip(slots.layout.windows, gone, strict=True):
        counts[window.pages, :first] = False
    if held.shape != pages.shape or (pages != held)[counts].any():
        raise AccountError(f"slot {phase.slot} reads pages {held.tolist()}, its path has {pages.tolist()}")
    column = 0
    for node in path:
        if node not in seen:
            seen[node] = np.zeros((len(gone), node.num_columns), np.int32)
        for at, first in enumerate(gone):
            seen[node][at, max(0, first - column) :] += 1
        column += node.num_columns


def _check_bounds(queues: Queues, phase: SlotPhase, page_size: int) -> None:
    slots, slot = queues.slots, phase.slot
    if slots.kv_high[slot] > slots.num_columns[slot] * page_size:
        raise AccountError(f"slot {slot} has {slots.kv_high[slot]} tokens in {slots.num_columns[slot]} columns")
    for window, gone in zip(slots.layout.windows, slots.gone[:, slot].tolist(), strict=True):
        if gone * page_size > window.lifetime.first_needed(int(slots.kv_settled[slot])):
            raise AccountError(
                f"slot {slot} has {slots.kv_settled[slot]} tokens and gave up {gone} columns of a window"
            )
    if not slots.out_settled[slot] <= slots.out_low[slot] <= slots.out_high[slot]:
        raise AccountError(
            f"slot {slot} has {slots.out_settled[slot]} output tokens, and expects "
            f"{slots.out_low[slot]} to {slots.out_high[slot]}"
        )
