"""Orders of waiting requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.cache.prefix import PrefixCache
from bough.core.messages import Generate, pack_ids
from bough.core.sampling import SamplingParams
from bough.scheduler.accept import accept
from bough.scheduler.limits import Limits
from bough.scheduler.policy import PATIENCE_STEPS, effective, ordered
from bough.scheduler.queues import Queues, Waiting


def _limits(**changes: Any) -> Limits:
    shape: dict[str, Any] = {
        "num_slots": 4,
        "num_pages": 200,
        "page_size": 1,
        "pages_per_slot": 100,
        "context_length": 100,
        "max_step_tokens": 64,
        "vocab_size": 50,
        "max_running": 4,
    }
    return Limits(**{**shape, **changes})


def _queues(limits: Limits, asks: list[tuple[list[int], int, int]]) -> Queues:
    queues = Queues(limits)
    for i, (prompt, max_new, priority) in enumerate(asks):
        sampling = SamplingParams(max_new_tokens=max_new)
        ask = Generate(id=i, rid=str(i), prompt=pack_ids(prompt), sampling=sampling, priority=priority)
        accept(queues, ask, now=0.0)
    return queues


def _cache(*prefixes: list[int]) -> PrefixCache:
    cache = PrefixCache(num_pages=200, page_size=1)
    for prefix in prefixes:
        key = np.array(prefix, np.int64)
        found = cache.match_prefix("", key, len(key))
        node, _ = cache.lock("", key, found.num_tokens)
        rest = key[found.num_tokens :]
        node = cache.insert(node, rest, cache.alloc(len(rest))[None], step=-1).node
        cache.release(node, np.empty(0, np.int32))
    return cache


def _order(queues: Queues, cache: PrefixCache, limits: Limits) -> list[int]:
    return [w.job.id for w in ordered(queues, cache, limits)]


ASKS = [([9, 9, 9, 9, 9], 5, 0), ([1, 2, 8], 50, 0), ([1, 2, 3, 4, 7], 9, 0), ([1, 2, 3, 8], 1, 0), ([5, 8], 7, 0)]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [0, 1, 2, 3, 4]),
        ("lpm", [2, 3, 1, 4, 0]),
        ("lof", [1, 2, 4, 0, 3]),
        ("shortest-prefill-first", [1, 2, 3, 4, 0]),
        ("dfs-weight", [1, 3, 2, 4, 0]),
    ],
)
def test_orders(policy: str, order: list[int]) -> None:
    limits = _limits(policy=policy)
    queues = _queues(limits, ASKS)
    cache = _cache([1, 2, 3, 4], [5], [1, 2, 3], [1, 2])
    assert _order(queues, cache, limits) == order


def test_random_is_a_fixed_shuffle() -> None:
    asks = [([1, i], 5, 0) for i in range(20)]
    orders = []
    for seed in (1, 1, 2):
        limits = _limits(policy="random", seed=seed)
        orders.append(_order(_queues(limits, asks), _cache(), limits))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(20)) != orders[0]


def test_lpm_gives_way_to_fcfs_in_a_long_queue() -> None:
    limits = _limits(policy="lpm", lpm_window=4)
    queues = _queues(limits, ASKS)
    assert effective(queues, _cache(), limits) == "fcfs"
    assert effective(_queues(limits, ASKS[:4]), _cache(), limits) == "lpm"


def test_tree_policies_need_a_tree() -> None:
    cache = PrefixCache(num_pages=20, page_size=1, enabled=False)
    for policy in ("lpm", "dfs-weight"):
        limits = _limits(policy=policy)
        assert effective(_queues(limits, ASKS), cache, limits) == "fcfs"


def test_auto_follows_the_hit_rate() -> None:
    limits = _limits(policy="auto")
    queues, cache = _queues(limits, ASKS), _cache([1, 2, 3, 4])
    assert effective(queues, cache, limits) == "fcfs"
    for _ in range(5):
        queues.hits.observe(100, 80)
    assert effective(queues, cache, limits) == "lpm"
    assert _order(queues, cache, limits)[0] == 2
    for _ in range(40):
        queues.hits.observe(100, 0)
    assert effective(queues, cache, limits) == "fcfs"


def test_priority_comes_before_policy() -> None:
    limits = _limits(policy="lof", priority=True)
    queues = _queues(limits, [([1], 5, 0), ([1], 9, 0), ([1], 1, 3), ([1], 2, 3), ([1], 9, -1)])
    assert _order(queues, _cache(), limits) == [3, 2, 1, 0, 4]


def test_those_who_lost_their_memory_and_the_starved_come_first() -> None:
    limits = _limits(policy="lof")
    queues, cache = _queues(limits, ASKS), _cache()
    for returning in (4, 3):
        waiting = queues.where[returning]
        assert isinstance(waiting, Waiting)
        queues.waiting.remove(waiting)
        queues.waiting.put_back(waiting)
    assert _order(queues, cache, limits) == [3, 4, 1, 2, 0]
    oldest = queues.waiting.oldest()
    assert oldest is not None
    assert oldest.job.id == 0
    oldest.skipped = PATIENCE_STEPS
    assert _order(queues, cache, limits) == [0, 3, 4, 1, 2]
