"""Control messages: information, flushes, pauses and the end."""

from __future__ import annotations

import pytest

from bough.core.messages import FlushCache, GetInfo, Pause, Profile, Resume, Shutdown
from tests.sim.harness import VOCAB, Sim, check_answer

PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


def test_info() -> None:
    sim = Sim(num_slots=2)
    for i in range(4):
        sim.ask([i, *PROMPT], max_new=20)
    for _ in range(5):
        sim.turn()
    sim.inbox.messages.append(GetInfo(7))
    sim.turn()
    (reply,) = sim.replies
    assert reply.call == 7
    body = reply.body
    assert (body["running"], body["queued"]) == (2, 2)
    pages = body["pages"]
    assert pages["free"] + pages["cached"] + pages["held"] == pages["total"] == 63
    assert body["counters"]["accepted"] == 4
    sim.run()
    assert sim.loop.control.info()["counters"]["finished"] == 4


def test_flush() -> None:
    sim = Sim()
    sim.ask(PROMPT, max_new=12)
    sim.turn()
    sim.inbox.messages.append(FlushCache(1))
    sim.turn()
    assert "1 requests are running" in sim.replies[0].error
    sim.run()
    sim.inbox.messages.append(FlushCache(2))
    sim.turn()
    assert sim.replies[1].error == ""
    assert sim.replies[1].body["pages_freed"] == 10
    assert sim.cache.pool.num_free == sim.cache.total
    again = sim.ask(PROMPT, max_new=3)
    sim.run()
    assert again.end.cached_tokens == 0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("depth", [0, 1])
def test_pause_and_resume(mode: str, depth: int) -> None:
    sim = Sim(depth=depth, max_step_tokens=16)
    clients = [sim.ask([i, *PROMPT], max_new=20) for i in range(3)]
    for _ in range(4):
        sim.turn()
    sim.inbox.messages.append(Pause(1, mode))  # type: ignore[arg-type]
    for _ in range(3):
        sim.turn()
    steps = sim.queues.counters.steps
    later = sim.ask(PROMPT, max_new=4)
    for _ in range(5):
        sim.turn()
    assert sim.queues.counters.steps == steps
    live = sim.queues.num_live
    assert live == {"abort": 0, "retract": 0, "in_place": 2}[mode]
    if mode != "in_place":
        sim.inbox.messages.append(FlushCache(2))
        sim.turn()
        assert sim.replies[-1].error == ""
    sim.inbox.messages.append(Resume(3))
    for client in clients if mode == "abort" else []:
        client.aborted = True
    sim.run()
    for client in (*clients, later):
        check_answer(sim, client)
    assert later.end.reason != "abort"


def test_shutdown_lets_requests_finish() -> None:
    sim = Sim()
    client = sim.ask(PROMPT, max_new=20)
    sim.turn()
    sim.inbox.messages.append(Shutdown(drain_s=10.0))
    sim.turn()
    late = sim.ask(PROMPT, max_new=20)
    for _ in range(40):
        if not sim.loop.done:
            sim.turn()
    assert sim.loop.done
    check_answer(sim, client)
    assert late.end.status == 503


def test_shutdown_gives_up_in_time() -> None:
    sim = Sim(context_length=400, num_pages=200)
    client = sim.ask(PROMPT, max_new=300)
    sim.turn()
    sim.inbox.messages.append(Shutdown(drain_s=0.2))
    while not sim.loop.done:
        sim.turn()
    assert client.end.reason == "abort"
    assert "shutting down" in client.end.message
    assert sim.cache.num_held == 0


def test_closed_inbox_ends_the_loop() -> None:
    sim = Sim()
    client = sim.ask([1, 2, 3], max_new=5)
    for _ in range(3):
        sim.turn()
    steps = sim.queues.counters.steps
    sim.inbox.closed = True
    sim.loop.run()
    assert sim.queues.counters.steps == steps, "no turn is taken any more"
    assert client.tokens, "what was in flight is settled"


def test_profile_without_profiler_and_with() -> None:
    sim = Sim()
    sim.inbox.messages.append(Profile(call=1, start=True))
    sim.turn()
    assert sim.replies[0].error == "this engine has no profiler"
    seen: list[Profile] = []
    sim.loop.hooks.profile = lambda message: {"seen": seen.append(message) is None}
    sim.inbox.messages.append(Profile(call=2, start=True, num_steps=3))
    sim.turn()
    assert sim.replies[1].error == ""
    assert sim.replies[1].body == {"seen": True}
    assert seen[0].num_steps == 3


def test_heartbeat_and_report() -> None:
    sim = Sim()
    beats: list[int] = []
    sim.loop.hooks.heartbeat = beats.append
    sim.loop.control._every_s = 0.05
    sim.ask(PROMPT, max_new=30)
    sim.run()
    assert len(beats) >= 30
    assert beats == sorted(beats)
    assert sim.reports
    assert sum(r["steps"] for r in sim.reports) <= sim.queues.counters.steps
    assert max(r["output_tokens_per_s"] for r in sim.reports) == pytest.approx(100, rel=0.3)


def test_reports_may_go_by_steps() -> None:
    sim = Sim()
    sim.loop.control._every_s, sim.loop.control._every_steps = 0.0, 8
    sim.ask(PROMPT, max_new=40)
    sim.run()
    assert [r["steps"] for r in sim.reports] == [8] * (sim.queues.counters.steps // 8)


def test_a_broken_account_is_repaired_and_counted() -> None:
    sim = Sim()
    first = sim.ask(PROMPT, max_new=3)
    sim.run()
    sim.loop.strict = False
    sim.cache.pool.alloc(3)
    second = sim.ask(PROMPT, max_new=3)
    for _ in range(12):
        sim.loop.turn()
    assert sim.cache.num_repairs == 1
    assert any("account" in problem for problem in sim.problems)
    assert sim.cache.pool.num_free == sim.cache.total
    assert second.tokens == first.tokens
