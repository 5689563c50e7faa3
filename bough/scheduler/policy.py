"""The order in which waiting requests are looked at. Pure: reads the queue and the cache, changes nothing.

Under every policy, retracted requests come first, and the oldest request that younger ones have overtaken too often
comes before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from bough.cache.nodes import Match, Node
from bough.cache.prefix import CacheView
from bough.config.concerns import SchedulePolicy
from bough.scheduler.limits import Limits
from bough.scheduler.queues import Queues, Waiting

PATIENCE_STEPS = 16
"""Steps in which younger requests may be admitted before the oldest one. A request without a cached prefix among 120 a
second with one waits 1.1 s; 1.5 s without this bound (`benchmarks/scheduler_constants.py`)."""
_AUTO_HIT_RATE = 0.1
"""Share of prompt tokens found in the prefix cache from which on the policy `auto` sorts by longest prefix (`lpm`). Where
prompts share prefixes, 0 to 0.5 make no difference, and never sorting takes twice as long; where they do not, there is
nothing to sort by (`benchmarks/scheduler_constants.py`)."""
_MASK = (1 << 64) - 1


def match(waiting: Waiting, cache: CacheView) -> Match:
    """The longest cached prefix that the request can use. Remembered while it stays true."""
    memo, version = waiting.memo, cache.version
    if memo is not None and memo[0] == version:
        return memo[1]
    job, key = waiting.job, waiting.key
    limit = job.match_limit(len(key))
    found = memo[1] if memo is not None else None
    if found is None or not cache.still_longest(found, key, limit):
        found = cache.match_prefix(job.ask.namespace, key, limit, job.ask.follows)
    found = outside_media(waiting, found, cache)
    waiting.memo = (version, found)
    return found


def outside_media(waiting: Waiting, found: Match, cache: CacheView) -> Match:
    """The match, or a shorter one if it ends inside a medium that is computed whole."""
    job = waiting.job
    if job.media is None:
        return found
    limit = job.media.outside(found.num_tokens)
    if limit == found.num_tokens:
        return found
    return cache.match_prefix(job.ask.namespace, waiting.key, limit, job.ask.follows)


def is_starved(waiting: Waiting) -> bool:
    """Whether younger requests have run before this one in too many steps. It then comes first under every policy, and
    counts as short. `commit` counts the steps, because planning changes nothing."""
    return waiting.skipped >= PATIENCE_STEPS


def ordered(queues: Queues, cache: CacheView, limits: Limits) -> Iterator[Waiting]:
    """Waiting requests in the order in which they are considered: by descending priority, and within each, retracted
    requests first. A starved request, if it is of the highest priority, comes before all."""
    sort = ORDERS[effective(queues, cache, limits)]
    oldest = queues.waiting.oldest()
    starved = oldest if oldest is not None and is_starved(oldest) else None
    if starved is not None:
        yield starved
    for returning, fresh in queues.waiting.levels():
        for waiting in returning:
            if waiting is not starved:
                yield waiting
        for waiting in sort(fresh, queues, cache, limits):
            if waiting is not starved:
                yield waiting


def effective(queues: Queues, cache: CacheView, limits: Limits) -> SchedulePolicy:
    """The policy that applies now: policies that use the prefix tree need one, and lpm is replaced if the queue is
    long."""
    policy = limits.policy
    queued = len(queues.waiting)
    if policy == "auto":
        worth_it = queued > 1 and queues.hits.recent >= _AUTO_HIT_RATE
        policy = "lpm" if worth_it else "fcfs"
    elif policy == "lpm" and queued > limits.lpm_window:
        policy = "fcfs"
    if policy in ("lpm", "dfs-weight") and not cache.enabled:
        policy = "fcfs"
    return policy


Order = Callable[[Iterable[Waiting], Queues, CacheView, Limits], Iterable[Waiting]]


def fcfs(fresh: Iterable[Waiting], queues: Queues, cache: CacheView, limits: Limits) -> Iterable[Waiting]:
    """First come, first served."""
    return fresh


def lpm(fresh: Iterable[Waiting], queues: Queues, cache: CacheView, limits: Limits) -> Iterable[Waiting]:
    """Longest cached prefix first, among the oldest of a long queue."""
    rest = iter(fresh)
    window = list(islice(rest, limits.lpm_window))
    yield from sorted(window, key=lambda w: -match(w, cache).num_tokens)
    yield from rest


def dfs_weight(fresh: Iterable[Waiting], queues: Queues, cache: CacheView, limits: Limits) -> Iterable[Waiting]:
    """Depth first through the tree, into the branch that most requests wait for: its pages are used while they are there."""
    at: dict[int, list[Waiting]] = {}
    weight: dict[int, int] = {}
    below: dict[int, dict[int, Node]] = {}
    top: dict[int, Node] = {}
    nowhere = []
    for waiting in fresh:
        path = [node for node, _ in match(waiting, cache).path]
        if not path:
            nowhere.append(waiting)
            continue
        top[id(path[0])] = path[0]
        at.setdefault(id(path[-1]), []).append(waiting)
        for above, node in zip([None, *path[:-1]], path, strict=True):
            weight[id(node)] = weight.get(id(node), 0) + 1
            if above is not None:
                below.setdefault(id(above), {})[id(node)] = node
    stack = sorted(top, key=weight.__getitem__)
    while stack:
        here = stack.pop()
        yield from at.get(here, ())
        stack.extend(sorted(below.get(here, {}), key=weight.__getitem__))
    yield from nowhere


def lof(fresh: Iterable[Waiting], queues: Queues, cache: CacheView, limits: Limits) -> Iterable[Waiting]:
    """Longest output first: long outputs then overlap with the most others."""
    return sorted(fresh, key=lambda w: -w.job.limit)


def random(fresh: Iterable[Waiting], queues: Queues, cache: CacheView, limits: Limits) -> Iterable[Waiting]:
    """A fixed shuffle per seed."""
    return sorted(fresh, key=lambda w: mix(limits.seed, w.job.id))


def shortest_prefill_first(
    fresh: Iterable[Waiting], queues: Queues, cache: CacheView, limits: Limits
) -> Iterable[Waiting]:
    """Least left to compute first."""
    return sorted(fresh, key=lambda w: len(w.key) - match(w, cache).num_tokens)


ORDERS: dict[SchedulePolicy, Order] = {
    "fcfs": fcfs,
    "lpm": lpm,
    "dfs-weight": dfs_weight,
    "lof": lof,
    "random": random,
    "shortest-prefill-first": shortest_prefill_first,
}


def mix(seed: int, value: int) -> int:
    """A 64-bit hash of two numbers."""
    x = (seed * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x
