"""How one step's prefill budget is shared: prompts under way, then waiting requests that memory allows. Pure."""

from __future__ import annotations

from itertools import islice

import numpy as np
from msgspec import Struct

from bough.cache.prefix import CacheView
from bough.cache.radix import Match
from bough.core.step import I64
from bough.scheduler.estimate import expected_output, prefill_need, running_need
from bough.scheduler.limits import Limits
from bough.scheduler.policy import match, ordered
from bough.scheduler.preempt import give_way
from bough.scheduler.queues import Prefilling, Queues, Waiting

LOOK_AHEAD = 256
"""Waiting requests looked at in one step."""
_PEEK = 32
PATIENCE_TO_FOLLOW = 32
"""Overtaken this often, a request no longer waits for another one to compute its prefix."""


class Share(Struct):
    """A row's part of the budget: tokens `start..start + num_tokens` of its key."""

    row: Prefilling | Waiting
    start: int
    held: int
    """Pages that cover it up to `start` already."""
    num_tokens: int
    is_long: bool

    @property
    def left(self) -> int:
        return len(self.row.key) - self.start - self.num_tokens

    def num_new_pages(self, page_size: int) -> int:
        return max(0, -(-(self.start + self.num_tokens) // page_size) - self.held)


class PrefillPlan(Struct):
    """Shares in the order of their rows, and the rows that give way to a more urgent request."""

    shares: list[Share] = []
    preempt: list[int] = []


class _Room(Struct):
    """What is left of the step."""

    tokens: int
    long_tokens: int
    pages: int
    reserve: int = 0
    """Pages that rows will want later."""


def plan_prefill(
    queues: Queues, cache: CacheView, limits: Limits, *, tokens: int, pages: int, decode_pages: int
) -> PrefillPlan:
    """Shares `tokens` and `pages` among prompts under way and waiting requests.

    Prompts that are longer than the small requests' part of the budget leave that part to shorter ones; what those don't
    want goes back to them. A waiting request is admitted if what all rows are expected to need still fits; the first
    that does not fit ends the search, so that it is not starved by smaller ones.
    """
    plan = PrefillPlan()
    short_cut = int(limits.small_share * tokens)
    room = _Room(tokens=tokens, long_tokens=tokens - _kept_for_short(queues, limits, short_cut), pages=pages)
    for row in queues.prefilling.values():
        held = int(queues.slots.num_pages[row.slot])
        share = Share(row, row.computed, held, 0, len(row.key) - row.computed > short_cut)
        _give(share, room, limits, first=not plan.shares)
        if share.num_tokens:
            plan.shares.append(share)
    if room.tokens > 0 and len(queues.waiting):
        room.reserve = _reserved(queues, limits, plan.shares) - decode_pages
        _admit(queues, cache, limits, room, short_cut, plan)
    for share in plan.shares:
        if room.tokens > 0 and share.left:
            room.pages += share.num_new_pages(limits.page_size)
            room.tokens += share.num_tokens
            room.long_tokens = room.tokens
            share.num_tokens = 0
            _give(share, room, limits, first=True)
    return plan


def _kept_for_short(queues: Queues, limits: Limits, short_cut: int) -> int:
    """The part of the budget that long prompts leave to short ones, if there are any."""
    wanted = sum(left for row in queues.prefilling.values() if (left := len(row.key) - row.computed) <= short_cut)
    oldest = queues.waiting.oldest()
    if oldest is not None and oldest.skipped:
        wanted += min(limits.min_chunk_tokens, len(oldest.key))
    if wanted < short_cut:
        wanted += sum(len(w.key) for w in islice(queues.waiting, _PEEK) if len(w.key) <= short_cut)
    return min(short_cut, wanted)


def _give(share: Share, room: _Room, limits: Limits, *, first: bool) -> None:
    """Gives a row what it can use of the room. A chunk that is not the last ends at a page border if it can."""
    size = limits.page_size
    left = share.left
    count = min(left, room.tokens, (share.held + room.pages) * size - share.start)
    if share.is_long:
        count = min(count, room.long_tokens)
    if count < left:
        if limits.whole_prompts and not first and left <= limits.max_step_tokens:
            return
        over = (share.start + count) % size
        count -= over if over < count else 0
    if count > 0:
        share.num_tokens = count
        room.tokens -= count
        room.long_tokens -= count if share.is_long else 0
        room.pages -= share.num_new_pages(size)


# -- admission ------------------------------------------------------------------------------------


def _admit(queues: Queues, cache: CacheView, limits: Limits, room: _Room, short_cut: int, plan: PrefillPlan) -> None:
    slots_left = min(limits.max_running - queues.num_live, queues.slots.num_free)
    leaders = [(row.job.ask.namespace, row.key) for row in queues.prefilling.values()]
    ratio = queues.ratio.estimate(len(queues.running) + len(queues.prefilling) + 1, limits.conservativeness)
    counted: set[int] = set()
    for waiting in islice(ordered(queues, cache, limits), LOOK_AHEAD):
        if room.tokens <= 0:
            return
        found = match(waiting, cache)
        if cache.enabled and _follows(waiting, found, leaders, limits):
            continue
        fresh_locks = [(id(node), used) for node, used in found.path if node.locks == 0 and id(node) not in counted]
        locked = sum(used for _, used in fresh_locks)
        cached = found.num_tokens // limits.page_size
        whole = limits.pages_for(len(waiting.key) + expected_output(waiting.job, limits, ratio)) - cached
        alone = queues.num_live == 0 and not plan.shares
        short_pages = 0 if alone else whole + locked + room.reserve - room.pages
        if slots_left <= 0 or short_pages > 0:
            if limits.priority:
                plan.preempt = give_way(queues, limits, waiting, short_pages, 1 - slots_left)
            return
        is_long = len(waiting.key) - found.num_tokens > short_cut and not waiting.skipped
        share = Share(waiting, found.num_tokens, cached, 0, is_long)
        room.pages -= locked
        _give(share, room, limits, first=not plan.shares)
        if share.num_tokens == 0:
            room.pages += locked
            continue
        counted.update(node for node, _ in fresh_locks)
        room.reserve += whole - share.num_new_pages(limits.page_size)
        slots_left -= 1
        plan.shares.append(share)
        leaders.append((waiting.job.ask.namespace, waiting.key))


def _reserved(queues: Queues, limits: Limits, shares: list[Share]) -> int:
    """Pages that the rows there are will want beyond what they have and are given in this step."""
    rows = queues.running_slots()
    ratio = queues.ratio.estimate(len(rows) + len(queues.prefilling), limits.conservativeness)
    pages = int(running_need(queues, limits, rows, ratio).sum())
    given = {id(share.row): share.num_new_pages(limits.page_size) for share in shares}
    for row in queues.prefilling.values():
        pages += max(0, prefill_need(queues, limits, row, ratio) - given.get(id(row), 0))
    return pages


def _follows(waiting: Waiting, found: Match, leaders: list[tuple[str, I64]], limits: Limits) -> bool:
    """Is a row of this step about to compute a prefix of this request, so that it had better wait for it?"""
    threshold = max(limits.page_size, limits.share_tokens)
    probe = found.num_tokens + threshold
    key, namespace = waiting.key, waiting.job.ask.namespace
    if probe > waiting.job.match_limit(len(key)) or waiting.skipped >= PATIENCE_TO_FOLLOW:
        return False
    last = key[probe - 1]
    for their_namespace, theirs in leaders:
        if (
            len(theirs) >= probe
            and theirs[probe - 1] == last
            and their_namespace == namespace
            and np.array_equal(theirs[:probe], key[:probe])
        ):
            return True
    return False
