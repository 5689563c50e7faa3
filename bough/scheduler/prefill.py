"""How one step's prefill budget is shared: prompts under way, then waiting requests that memory allows. Pure."""

from __future__ import annotations

from itertools import islice

import numpy as np
from msgspec import Struct

from bough.cache.nodes import Match
from bough.cache.prefix import CacheView
from bough.core.step import I32, I64
from bough.scheduler.estimate import columns_in, expected_output, new_need, prefill_need, running_need
from bough.scheduler.limits import Limits
from bough.scheduler.media import EncodePlan, JobMedia
from bough.scheduler.policy import is_starved, match, ordered, outside_media
from bough.scheduler.preempt import give_way
from bough.scheduler.queues import Prefilling, Queues, Waiting

# Values below were compared with others by `benchmarks/scheduler_constants.py`; the results are in
# docs/decisions/scheduler_constants.md.

LOOK_AHEAD = 256
"""Waiting requests that one step looks at, in the policy's order. Bounds the host's time per step: one that is passed over
costs about 35 us."""
_PEEK = 32
"""Waiting requests that are tried for the rest of a step after one was overtaken, and among which short ones are counted. A
batch of 512 ends 0.6 % earlier than with 0; 256 gain 0.1 % more."""
_SLOW_MS = 1000.0
"""Milliseconds of computing from which on a prompt is slow: it is limited to its part of each step. With 300, prompts of
20,000 tokens wait 1.8 s instead of 1.5 s, and shorter ones gain nothing."""
_SPARE = 8
"""A large step may leave one in this many of its tokens unused, if that saves cutting a prompt. 3 % less time for 512 mixed
requests on one H200, together with larger steps."""
PATIENCE_TO_FOLLOW = 32
"""Steps that a request is overtaken (`Waiting.skipped`) before it no longer waits for another one to compute their common
prefix. Four prompts that begin with 20,000 tokens of a slow one wait 0.9 s; 1.1 s if they never wait for it, 1.5 s if they
always do."""


class Share(Struct):
    """A request's share of the budget: tokens `start..start + num_tokens` of its key."""

    phase: Prefilling | Waiting
    """The request: under way, or admitted with this share."""
    start: int
    held: int
    """Columns that hold its tokens up to `start`."""
    num_tokens: int
    is_long: bool
    """It has more tokens left than `_Sharing.longest_short`: it leaves a part of the budget to short prompts."""
    is_slow: bool
    """What was to be computed of it when it got its slot takes more than `_SLOW_MS`: it is bound to its part of each
    step."""
    tail_pages: I32 | None = None
    """Per line: the page that holds what lies between the last page border and `start`, to be copied; None: nothing
    does."""
    ahead: int = 0
    """Tokens behind its own that it has pages for, too, because a proposer writes there."""
    in_tree: int = 0
    """As `Match.in_tree`, of a request that is admitted; 0 of one under way."""

    @property
    def left(self) -> int:
        """Tokens of the prompt that are still to be computed after this share."""
        return len(self.phase.key) - self.start - self.num_tokens

    def num_new_columns(self, page_size: int) -> int:
        return max(0, -(-(self.start + self.num_tokens + self.ahead) // page_size) - self.held)


class PrefillRoom(Struct):
    """Tokens and pages that a step has left for prompts."""

    tokens: int
    """The budget: prompt tokens that the step may have (`plan.prefill_budget`)."""
    slow_tokens: int
    """Of them, those that slow prompts may have."""
    pages: int
    decode_pages: int
    """Pages that running rows take in this step, or that are kept for those which sit it out. `pages` is without them, so
    they are not reserved for these rows again."""
    decode_tokens: int
    """Tokens that running rows bring into the step, forced ones and drafts among them."""


class PrefillPlan(Struct):
    """Shares in the order of their rows, and the rows that are preempted for a more urgent request."""

    shares: list[Share] = []
    preempt: list[int] = []
    num_pages_left: int = 0
    """Of those that the step had for prompts."""


def plan_prefill(queues: Queues, cache: CacheView, limits: Limits, room: PrefillRoom) -> PrefillPlan:
    """Shares the room among prompts under way and waiting requests. Slow ones take turns. A slow one that waits gets its
    first chunk even while slow prompts pause, so that it takes its turn with the others from then on; what it takes adds to
    `owed_ms`, and the pause gets longer.

    Prompts that are longer than the small requests' part of the budget leave that part to shorter ones; what those don't
    want goes back to them. A waiting request is admitted if what all rows are expected to need still fits; the first
    that does not fit ends the search, so that it is not starved by smaller ones. With priorities, prompts under way
    come after waiting requests that are more urgent: those are admitted first (`above`).
    """
    sharing = _Sharing(queues, cache, limits, room)
    under_way = list(queues.prefilling.values())
    urgent = queues.waiting.oldest() if limits.priority else None
    if urgent is not None:
        level = urgent.job.ask.priority
        sharing.go_on([phase for phase in under_way if phase.job.ask.priority >= level])
        under_way = [phase for phase in under_way if phase.job.ask.priority < level]
        if under_way:
            sharing.admit(above=max(phase.job.ask.priority for phase in under_way))
    if under_way:
        sharing.go_on(under_way)
    if not sharing.plan.preempt:
        sharing.admit()
    sharing.spend_rest()
    sharing.plan.num_pages_left = sharing.pages
    return sharing.plan


class _Search(Struct):
    """State of one walk over the waiting requests."""

    slots_left: int
    """Free slots that no request admitted or overtaken so far takes."""
    ratio: float
    """Expected output, as a part of what requests allow at most."""
    reserved: int
    """Pages that rows with a slot will want later (`_reserved`)."""
    kept: int = 0
    """Pages that stay free for the overtaken."""
    looks_left: int | None = None
    """Requests that are still looked at once one was overtaken; None: none was."""


class _Candidate(Struct):
    """A waiting request, and what admitting it would take."""

    waiting: Waiting
    found: Match
    cached: int
    """Columns of its prompt that are cached."""
    locks: dict[int, int]
    """Node -> columns of it that the request would lock."""
    windows: list[tuple[int, int, int]]
    """Columns of windows that it would lock."""
    num_locked: int
    """Pages of both, which could be evicted before."""
    needed: int
    """Pages for the rest of its prompt and for its expected output, `media_pages` included."""
    media_pages: int = 0
    """Of `needed`, pages for media that cross attention reads, which are taken at once."""

    @property
    def left(self) -> int:
        """Tokens of its prompt that are not cached."""
        return len(self.waiting.key) - self.found.num_tokens

    def lengthen(self, cache: CacheView) -> None:
        """Adds the tokens beyond the last full page that can be copied from a cached one, unless they end inside a medium
        that is computed whole."""
        job, key = self.waiting.job, self.waiting.key
        found = cache.lengthen(self.found, job.ask.namespace, key, job.match_limit(len(key)))
        self.found = outside_media(self.waiting, found, cache)


class _Sharing:
    """Distributes one step's prefill budget: what is left of it, and the shares so far."""

    def __init__(self, queues: Queues, cache: CacheView, limits: Limits, room: PrefillRoom) -> None:
        self.queues = queues
        self.cache = cache
        self.limits = limits
        self.plan = PrefillPlan()
        self.budget = room.tokens
        """Prompt tokens of the whole step."""
        self.longest_short = int(limits.small_share * room.tokens)
        """Tokens up to which the rest of a prompt is short, and which long prompts leave to short ones at most."""
        self.tokens = room.tokens
        """What is left of the budget..."""
        self.long_tokens = room.tokens - self._kept_for_short()
        """...of it, for long prompts..."""
        self.slow_tokens = room.slow_tokens
        """...and for slow ones, whether long or not."""
        self.pages = room.pages
        """Available pages that no share has taken."""
        self.decode_pages = room.decode_pages
        self.decode_tokens = room.decode_tokens
        self.promised = 0
        """Pages that requests admitted in this step are expected to need beyond those of their first chunk."""
        self.locked: dict[int, int] = {}
        """Node -> columns of it that requests admitted in this step lock."""
        self.seen: set[tuple[int, int, int]] = set()
        """Columns of windows that they lock (`CacheView.unlocked_columns`)."""
        self.height = limits.layout.column_pages
        """Pages of a column."""
        self.contents: set[bytes] = set()
        """Media that cross attention of requests admitted in this step reads."""
        self.admitted: set[int] = set()
        """Ids of requests admitted in this step."""
        self.media = EncodePlan(queues.media) if queues.media is not None else None
        """Items of media that the step computes; None: the model takes text only."""
        self.leaders = [(phase.job.ask.namespace, phase.key) for phase in queues.prefilling.values()]
        """Namespaces and prompts of the step, whose prefixes waiting requests may wait for (`_follows`)."""

    def _kept_for_short(self) -> int:
        """The part of the budget that long prompts leave to short ones, if there are any."""
        queues, cut = self.queues, self.longest_short
        wanted = 0
        for phase in queues.prefilling.values():
            left = len(phase.key) - phase.computed
            wanted += left if left <= cut else 0
        if wanted < cut:
            for waiting in islice(queues.waiting, _PEEK):
                wanted += len(waiting.key) if len(waiting.key) <= cut else 0
        kept = min(cut, wanted)
        oldest = queues.waiting.oldest()
        if oldest is not None and is_starved(oldest):
            kept = max(kept, min(self.limits.min_chunk_tokens, -(-self.tokens // 2)))
        return kept

    def go_on(self, prompts: list[Prefilling]) -> None:
        """Gives prompts under way their next chunks."""
        for phase in sorted(prompts, key=self._turn):
            held = int(self.queues.slots.num_columns[phase.slot])
            is_long = len(phase.key) - phase.computed > self.longest_short
            is_slow = self._is_slow(len(phase.key) - phase.found)
            share = Share(phase, phase.computed, held, 0, is_long, is_slow)
            if self._give(share, first=not self.plan.shares):
                self.plan.shares.append(share)

    def _turn(self, phase: Prefilling) -> tuple[int, int, int]:
        """By priority; slow prompts after others of the same priority, round robin."""
        level = -phase.job.ask.priority if self.limits.priority else 0
        is_slow = self._is_slow(len(phase.key) - phase.found)
        return level, is_slow, int(self.queues.slots.last_step[phase.slot]) if is_slow else 0

    def _is_slow(self, num_tokens: int) -> bool:
        return num_tokens * self.queues.cost.prefill_token_ms > _SLOW_MS

    def _give(self, share: Share, *, first: bool) -> bool:
        """Gives a request what it can use of the budget, and takes it from what is left. A chunk that is not the last ends
        at a page border if it can. False: there are no tokens or pages that it could use. `first`: no other
        request has a share yet, or this one has had its share before, so that waiting for a step with more tokens would not
        help it (`Limits.whole_prompts`, `Limits.uncut`).
        """
        size = self.limits.page_size
        left = share.left
        count = min(left, (share.held + self._columns_for(share)) * size - share.start)
        if not (first and self.limits.uncut):
            count = min(count, self._tokens_for(share))
        most = self._whole_items_for(share, count)
        if count < left:
            if self.limits.whole_prompts and not first and left <= self.limits.max_step_tokens:
                return False
            over = (share.start + count) % size
            count -= over if over < count else 0
        if count > 0 and self.media is not None and share.phase.job.media is not None:
            count = self._with_media(self.media, share.phase, share.phase.job.media, share.start, count, most)
        if count <= 0:
            return False
        share.num_tokens = count
        self.tokens -= count
        self.long_tokens -= count if share.is_long else 0
        self.slow_tokens -= count if share.is_slow else 0
        self.pages -= share.num_new_columns(size) * self.height
        return True

    def _with_media(
        self, encode: EncodePlan, phase: Prefilling | Waiting, media: JobMedia, start: int, count: int, most: int
    ) -> int:
        """How many of `count` tokens the step can have, for the sake of the media that it would have to compute."""
        if not media.fixed_key:
            return encode.fit(media, start, count, most)
        is_there = isinstance(phase, Prefilling) or self.cache.find_fixed(media.fixed_key) is not None
        return count if is_there or encode.fit_fixed(media) else 0

    def _columns_for(self, share: Share) -> int:
        """What is left of the memory for a row.

        A prompt takes more columns of windows than it keeps, until its step has settled: they are not to be those that
        others have been promised, except for one, with which it gets on.
        """
        columns = columns_in(self.pages, self.limits)
        if not self.limits.layout.windows:
            return columns
        others = self.promised + self._reserved(share.phase)
        return min(columns, max(1, columns_in(self.pages - others, self.limits)))

    def _whole_items_for(self, share: Share, count: int) -> int:
        """What a row may have for the sake of a medium that can't be cut, instead of `count`: the budget of all rows, and if
        nothing has come before it, as much as a step can hold. Otherwise a pace, or a share of it, could keep it waiting
        for ever."""
        room = (share.held + self._columns_for(share)) * self.limits.page_size - share.start
        most = self.tokens if self.plan.shares else self.limits.max_step_tokens - self.decode_tokens
        return max(count, min(share.left, room, most))

    def _tokens_for(self, share: Share) -> int:
        """What is left of the budget for a row of this kind."""
        tokens = min(self.tokens, self.long_tokens) if share.is_long else self.tokens
        if share.is_slow:  # one that waits gets its first chunk in any case: see `plan_prefill`
            least = self.limits.min_chunk_tokens if isinstance(share.phase, Waiting) else 0
            tokens = min(tokens, max(self.slow_tokens, least))
        return tokens

    def spend_rest(self) -> None:
        """Gives the long prompts what short ones did not use."""
        for share in self.plan.shares:
            if self.tokens > 0 and share.left:
                self.pages += share.num_new_columns(self.limits.page_size) * self.height
                self.tokens += share.num_tokens
                self.slow_tokens += share.num_tokens if share.is_slow else 0
                self.long_tokens = self.tokens
                share.num_tokens = 0
                self._give(share, first=True)

    # -- admission --------------------------------------------------------------------------------

    def admit(self, above: int | None = None) -> None:
        """Admits waiting requests in the policy's order until the step's tokens, slots or memory are used up.

        Each is matched with the prefix cache (`_match`), must find a slot and memory for its prompt and its expected output
        (`_fits`), may be overtaken by later ones that fill the step better (`_overtake`), and is given its first chunk
        (`_give_first`). The first request for which there is no slot or no memory ends the search: if smaller ones behind it
        were admitted, it could wait forever. One that fits, but for whose kind the step has no tokens left, does not end it:
        it waits for tokens, and comes first once it is starved (`policy.is_starved`).

        `above`: admits only requests with a higher priority than this. They come first in the policy's order.
        """
        queues, limits = self.queues, self.limits
        if self.tokens <= 0 or not len(queues.waiting):
            return
        slots_left = min(limits.max_running - queues.num_live, queues.slots.num_free) - len(self.admitted)
        if slots_left <= 0 and not limits.priority:  # with priorities, a request may still take the place of a row
            return
        # The candidate is one row more than those that `_reserved` estimates: the more rows, the closer their outputs are to
        # the mean.
        ratio = queues.ratio.estimate(len(queues.running) + len(queues.prefilling) + 1, limits.conservativeness)
        search = _Search(slots_left, ratio, self._reserved())
        for waiting in islice(ordered(queues, self.cache, limits), LOOK_AHEAD):
            if self.tokens <= 0 or search.looks_left == 0 or (above is not None and waiting.job.ask.priority <= above):
                return
            if search.looks_left is not None:
                search.looks_left -= 1
            candidate = self._match(waiting, search.ratio)
            if candidate is None:
                continue
            if not self._fits(candidate, search):
                return
            candidate.lengthen(self.cache)  # only now: a match within a page costs a search, and takes no more memory
            if not self._overtake(candidate, search) and self._give_first(candidate):
                search.slots_left -= 1

    def _match(self, waiting: Waiting, ratio: float) -> _Candidate | None:
        """What the request finds in the prefix cache, and the pages that admitting it would take. None: it is admitted
        already, or it should wait, because a row of this step computes a prefix that it can then read from the cache."""
        cache, limits = self.cache, self.limits
        found = match(waiting, cache)
        if waiting.job.id in self.admitted or (cache.enabled and _follows(waiting, found, self.leaders, limits)):
            return None
        locks: dict[int, int] = {}
        num_locked = 0
        # A request locks all pages of a node that grow with the context, and of windows only the columns that it sees.
        for node, used in found.path:
            before = self.locked.get(id(node), 0)
            if node.locks == 0 and used > before:
                locks[id(node)] = used
                num_locked += (used - before) * limits.layout.growing_pages
        windows = [column for column in cache.unlocked_columns(found) if column not in self.seen]
        num_locked += sum(limits.layout.windows[window].num_pages for _, window, _ in windows)
        cached = found.num_tokens // limits.page_size
        needed = new_need(limits, len(waiting.key) + expected_output(waiting.job, limits, ratio), cached)
        media = waiting.job.media
        media_pages = 0
        if media is not None and media.fixed_key and media.fixed_key not in self.contents:
            content = cache.find_fixed(media.fixed_key)
            if content is None:
                media_pages = limits.layout.pages_of_media(media.fixed.size)
            elif not content.users:
                num_locked += content.pages.size
        return _Candidate(waiting, found, cached, locks, windows, num_locked, needed + media_pages, media_pages)

    def _fits(self, candidate: _Candidate, search: _Search) -> bool:
        """Is there a slot, and memory for what the request is expected to need, beside what was promised to others? With
        nothing else running it is admitted in any case. If it does not fit, rows of lower priority may be preempted."""
        queues, limits = self.queues, self.limits
        alone = queues.num_live == 0 and not self.plan.shares
        wanted = candidate.needed + candidate.num_locked + search.reserved + self.promised + search.kept
        short_pages = 0 if alone else wanted - self.pages
        if search.slots_left > 0 and short_pages <= 0:
            return True
        if limits.priority and search.looks_left is None:
            self.plan.preempt = give_way(queues, limits, candidate.waiting, short_pages, 1 - search.slots_left)
        return False

    def _overtake(self, candidate: _Candidate, search: _Search) -> bool:
        """Leaves the request for the next step, if that one can compute its prompt whole, while later ones fill this one.
        Returns whether it does. A starved request is not overtaken, which bounds how long it can wait.

        If a part of the budget is reserved for short prompts, all long ones are left for the next step, and nothing is kept
        for them: the short ones were promised that part. Otherwise the search is from now on for `_PEEK` prompts that fit
        into the rest of the step, and the slots and pages of overtaken requests stay free for them.
        """
        waiting, left = candidate.waiting, candidate.left
        if search.looks_left is None and self._is_better_whole(left) and not is_starved(waiting):
            if self.tokens > self.long_tokens:
                self.long_tokens = 0
                return True
            search.looks_left = _PEEK
        if search.looks_left is not None and not self._fills_tiles(left):
            search.kept += candidate.needed + candidate.num_locked
            search.slots_left -= 1
            return True
        return False

    def _give_first(self, candidate: _Candidate) -> bool:
        """Gives the request its first chunk, and notes what it will need later. False: nothing is left that it could use."""
        waiting, left = candidate.waiting, candidate.left
        is_long = left > self.longest_short and not is_starved(waiting)
        start, tail = candidate.found.num_tokens, candidate.found.tail_pages
        share = Share(waiting, start, candidate.cached, 0, is_long, self._is_slow(left), tail)
        share.in_tree = candidate.found.in_tree
        at_once = candidate.num_locked + candidate.media_pages
        self.pages -= at_once
        if not self._give(share, first=not self.plan.shares):
            self.pages += at_once
            return False
        if waiting.job.media is not None:
            self.contents.add(waiting.job.media.fixed_key)
        self.locked |= candidate.locks
        self.seen.update(candidate.windows)
        given = share.num_new_columns(self.limits.page_size) * self.height
        self.promised += max(0, candidate.needed - candidate.media_pages - given)
        self.admitted.add(waiting.job.id)
        self.plan.shares.append(share)
        self.leaders.append((waiting.job.ask.namespace, waiting.key))
        return True

    def _is_better_whole(self, left: int) -> bool:
        """Is it better to compute a prompt with `left` tokens whole in the next step than to begin it in this one?

        Yes, if this step is almost full and the next one has room for all of it: the prompt ends in the next step in either
        case, and if it is not cut, attention need not read its beginning from the KV cache.
        """
        return (
            not self.limits.whole_prompts
            and self.tokens < left <= self.budget
            and self.budget >= self.limits.large_step_tokens
            and self.tokens <= self.budget // _SPARE
            and all(share.left == 0 for share in self.plan.shares)
        )

    def _fills_tiles(self, left: int) -> bool:
        """Does a prompt with `left` tokens fit into the rest of the step and leave fewer tokens of the last tile unused?"""
        tokens, tile = self.decode_tokens + self.budget - self.tokens, self.limits.tile_tokens
        return left <= self.tokens and -(tokens + left) % tile < -tokens % tile

    def _reserved(self, but: Prefilling | Waiting | None = None) -> int:
        """Pages that running and prefilling requests, all `but` one, are expected to need beyond what they have and what
        this step gives them."""
        queues, limits = self.queues, self.limits
        if not queues.running and not queues.prefilling:
            return 0
        rows = queues.running_slots()
        ratio = queues.ratio.estimate(len(rows) + len(queues.prefilling), limits.conservativeness)
        pages = int(running_need(queues, limits, rows, ratio).sum()) - self.decode_pages
        given = {id(each.phase): each.num_new_columns(limits.page_size) * self.height for each in self.plan.shares}
        for phase in queues.prefilling.values():
            if phase is not but:
                pages += max(0, prefill_need(queues, limits, phase, ratio) - given.get(id(phase), 0))
        return pages


def _follows(waiting: Waiting, found: Match, leaders: list[tuple[str, I64]], limits: Limits) -> bool:
    """Is a row of this step about to compute a prefix of this request, so that it had better wait for it?"""
    if not leaders:
        return False
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
