"""The picture of the tree: every number against a count by token ids, bounds that hold, and nothing that was said."""

from __future__ import annotations

import random

import msgspec
import pytest

from bough.core.messages import Look
from bough.scheduler import snapshot as pictures
from bough.scheduler.queues import Leaving, Prefilling, Running
from bough.scheduler.snapshot import Snapshot, snapshot
from tests.sim.harness import VOCAB, Sim

PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


def look(sim: Sim, *, max_spans: int = 10_000, max_rows: int = 10_000) -> Snapshot:
    return snapshot(sim.queues, sim.cache, max_spans=max_spans, max_rows=max_rows, now=sim.clock.now)


def in_tree(sim: Sim, row: Prefilling | Running | Leaving) -> tuple[str, list[int]]:
    """The tokens of a row that are in the tree, by its page table and its history."""
    slots = sim.queues.slots
    num_tokens = int(slots.tree_columns[row.slot]) * sim.cache.page_size
    output = slots.history[row.slot, slots.prompt_len[row.slot] : slots.known[row.slot]].tolist()
    tokens = [*row.job.prompt.tolist(), *output][:num_tokens]
    return row.job.ask.namespace, tokens


def common_pages(one: tuple[str, list[int]], other: tuple[str, list[int]], page_size: int) -> int:
    if one[0] != other[0]:
        return 0
    same = 0
    for a, b in zip(one[1], other[1], strict=False):
        if a != b:
            break
        same += 1
    return same // page_size * page_size


def check(sim: Sim) -> None:
    seen = look(sim)
    assert not seen.more_spans
    assert seen.more_rows == 0
    queues = sim.queues
    assert sum(span.pages for span in seen.spans) == sim.cache.tree.num_cached
    by_id = {span.id: span for span in seen.spans}
    assert len(by_id) == len(seen.spans)
    for at, span in enumerate(seen.spans):
        above = by_id[span.parent].depth if span.parent else 0
        assert span.depth == above + span.tokens
        assert span.tokens == span.pages * sim.cache.page_size
        below = [other for other in seen.spans if other.parent == span.id]
        assert len(below) == span.children
        assert all(seen.spans.index(other) > at for other in below)
        assert not (len(below) == 1 and below[0].requests == span.requests), "a span that could be longer"
    rows = [*queues.prefilling.values(), *queues.running.values(), *queues.leaving.values()]
    held = {row.job.ask.rid: in_tree(sim, row) for row in rows if not row.node.detached}
    for view in seen.rows:
        if view.phase in ("waiting", "compiling"):
            assert (view.span, view.shared_tokens) == (0, 0)
            continue
        mine = held[view.rid]
        others = [common_pages(mine, other, sim.cache.page_size) for rid, other in held.items() if rid != view.rid]
        assert view.shared_tokens == max(others, default=0)
        assert (by_id[view.span].depth if view.span else 0) >= len(mine[1])
    slots = queues.slots
    tables = [set(slots.table[0, row.slot, : int(slots.tree_columns[row.slot])].tolist()) for row in rows]
    for span in seen.spans:
        assert span.requests == sum(span.id in table for table in tables)
    assert len(seen.rows) == len(queues.where)


@pytest.mark.parametrize("seed", range(6))
def test_numbers_are_right_at_every_turn(seed: int) -> None:
    draw = random.Random(seed)
    sim = Sim(num_pages=96, num_slots=6, max_step_tokens=24, depth=seed % 2)
    for _ in range(120):
        if draw.random() < 0.35 and len(sim.queues.where) < 12:
            keep = draw.choice([0, 4, 8, 17, 30])
            tail = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))]
            sim.ask([*PROMPT[:keep], *tail], max_new=draw.randrange(1, 20), namespace=draw.choice(["", "", "a"]))
        if draw.random() < 0.05 and sim.queues.where:
            sim.abort(draw.choice([c for c in sim.clients.values() if c.ask.id in sim.queues.where]))
        sim.turn()
        check(sim)
    sim.run()
    check(sim)
    assert look(sim).rows == []


def test_two_live_requests_share_one_span() -> None:
    sim = Sim()
    sim.ask([*PROMPT[:20], 1, 2, 3], max_new=30)
    sim.ask([*PROMPT[:20], 4, 5, 6], max_new=30)
    for _ in range(4):
        sim.turn()
    sim.inbox.messages.append(Look(9))
    sim.turn()
    (reply,) = sim.replies
    body = msgspec.to_builtins(reply.body)
    (shared,) = [span for span in body["spans"] if span["requests"] == 2]
    assert (shared["tokens"], shared["parent"]) == (20, 0)
    assert {row["shared_tokens"] for row in body["rows"]} == {20}
    assert {row["rid"] for row in body["rows"]} == {"r1", "r2"}
    assert body["running"] == 2
    sim.run()


def test_bounds_hold_and_live_requests_stay_in_sight() -> None:
    sim = Sim(num_pages=512, num_slots=8)
    live = sim.ask([39, *PROMPT[:19]], max_new=60)
    sim.turn()
    for i in range(80):  # newer than the live one's, and more than one span's children are looked at
        sim.ask([i % VOCAB, i // VOCAB, *PROMPT[:6]], max_new=1)
    sim.turn()
    while len(sim.queues.where) > 1:
        sim.turn()
    seen = look(sim, max_spans=5, max_rows=3)
    assert len(seen.spans) == 5
    assert seen.more_spans
    assert seen.spans[0].requests == 1
    assert seen.rows[0].span == seen.spans[0].id
    assert seen.rows[0].rid == live.ask.rid
    for i in range(5):
        sim.ask([1, i, *PROMPT], max_new=30)
    sim.turn()
    crowded = look(sim, max_spans=5, max_rows=3)
    assert (len(crowded.rows), crowded.more_rows) == (3, 3)
    sim.run()


def test_long_chains_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "CHAIN", 3)
    sim = Sim(max_step_tokens=4)  # a node a chunk
    sim.ask(PROMPT, max_new=20)
    for _ in range(12):
        sim.turn()
    spans = look(sim).spans
    assert len(spans) > 1
    assert sum(span.pages for span in spans) == sim.cache.tree.num_cached
    assert [span.parent for span in spans] == [0, *[span.id for span in spans[:-1]]]
    sim.run()


def test_nothing_that_was_said_is_in_it() -> None:
    sim = Sim()
    sim.ask(PROMPT, max_new=10, namespace="tenant-secret")
    for _ in range(4):
        sim.turn()
    words = msgspec.json.encode(look(sim)).decode()
    assert "tenant-secret" not in words
    assert set(msgspec.json.decode(words)["rows"][0]) == {
        "rid", "phase", "prompt_tokens", "computed_tokens", "cached_tokens", "shared_tokens", "output_tokens",
        "output_limit", "span", "seconds",
    }  # fmt: skip
    sim.run()


def test_the_first_tokens_of_spans_are_there_if_they_are_asked_for() -> None:
    sim = Sim()
    sim.ask(PROMPT, max_new=10)
    for _ in range(4):
        sim.turn()
    seen = snapshot(sim.queues, sim.cache, max_spans=9, max_rows=9, now=sim.clock.now, span_tokens=5)
    assert seen.spans[0].first_ids == PROMPT[:5]
    assert all(span.first_ids == [] for span in look(sim).spans)
    sim.run()
