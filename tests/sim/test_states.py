"""Layers that keep a state: rows go on from snapshots, wherever they come from, and places for them are never lost."""

from __future__ import annotations

import pytest

from bough.core.kv import Grows, KvGroup, Window
from bough.core.messages import Pause, Resume
from bough.core.step import Step
from tests.sim.harness import VOCAB, Sim, check_answer

LONG = [(3 * i * i + i) % VOCAB for i in range(90)]


def test_a_conversation_goes_on_from_its_last_state() -> None:
    sim = Sim(num_snapshots=8, num_pages=200, state_interval=8, context_length=200)
    said = LONG[:21]
    for turn in range(4):
        client = sim.ask(said, max_new=22)
        sim.run()
        check_answer(sim, client)
        if turn:  # 8 tokens between states, and what has not filled a page
            assert client.end.cached_tokens >= len(said) - 3 - 8 - 4, turn
        said = [*said, *client.tokens, 5, 6, 7]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_branches_share_what_was_computed_before_them(depth: int) -> None:
    """The second request finds KV but no state where it parts from the first, and leaves one there for the third."""
    sim = Sim(num_snapshots=8, num_pages=200, depth=depth, max_step_tokens=64)
    first = sim.ask(LONG[:40], max_new=3)
    sim.run()
    others = []
    for at in range(3):
        others.append(sim.ask([*LONG[:24], 1 + at, 2, 3, 4, 5], max_new=3))
        sim.run()
    assert [client.end.cached_tokens for client in others] == [0, 24, 24]
    for client in (first, *others):
        check_answer(sim, client)


def test_forks_begin_with_the_state_of_their_prompt() -> None:
    sim = Sim(num_snapshots=8, num_pages=300, num_slots=8, max_step_tokens=64)
    clients = [sim.ask(LONG[:33], max_new=5) for _ in range(6)]
    sim.run()
    for client in clients:
        check_answer(sim, client)
    assert sorted(client.end.cached_tokens for client in clients) == [0, *[32] * 5]


@pytest.mark.parametrize(("page_size", "length", "cached"), [(1, 33, 32), (4, 32, 28), (4, 33, 32), (4, 4, 0)])
def test_the_same_prompt_again(page_size: int, length: int, cached: int) -> None:
    """It computes its last token anew, so a state behind that one would be of no use, wherever pages end."""
    sim = Sim(num_snapshots=8, num_pages=200, page_size=page_size, max_step_tokens=64)
    clients = []
    for _ in range(2):
        clients.append(sim.ask(LONG[:length], max_new=5))
        sim.run()
        check_answer(sim, clients[-1])
    assert [client.end.cached_tokens for client in clients] == [0, cached]


def test_a_state_is_gone_on_from_only_where_windows_are_whole() -> None:
    """The answer has left its last window and no state; where the prompt's state is, the window's pages have gone."""
    groups = (KvGroup(Grows()), KvGroup(Window(3)))
    sim = Sim(groups=groups, num_snapshots=8, num_pages=100, page_size=1)
    first = sim.ask(LONG[:6], max_new=12)
    sim.run()
    sim.cache.free_private(sim.cache.alloc(sim.cache.pool.num_free + 6))  # what lies before the last window goes first
    again = sim.ask([*LONG[:6], *first.tokens, 1, 2, 3], max_new=4)
    sim.run()
    assert again.end.cached_tokens == 0
    for client in (first, again):
        check_answer(sim, client)


@pytest.mark.parametrize("num_snapshots", [0, 1, 3])
def test_few_places_are_shared(num_snapshots: int) -> None:
    sim = Sim(num_snapshots=num_snapshots, num_pages=200, num_slots=4, state_interval=4)
    clients = [sim.ask(LONG[at : at + 20], max_new=20) for at in range(12)]
    sim.run()
    for client in clients:
        check_answer(sim, client)
    snapshots = sim.cache.snapshots
    assert snapshots is not None
    assert (snapshots.num_lent, snapshots.num_kept) == (0, num_snapshots)


def test_the_least_recently_used_state_gives_way() -> None:
    sim = Sim(num_snapshots=2, num_pages=400)
    for at in (0, 30, 0, 60):
        sim.ask(LONG[at : at + 18], max_new=1)
        sim.run()
    for at, cached in ((0, 16), (60, 16), (30, 0)):
        client = sim.ask([*LONG[at : at + 18], 1], max_new=1)
        sim.run()
        assert client.end.cached_tokens >= cached if cached else client.end.cached_tokens == 0


def test_rows_are_retracted_and_go_on_from_their_states() -> None:
    sim = Sim(num_snapshots=16, num_pages=200, num_slots=4, state_interval=4)
    clients = [sim.ask(LONG[at : at + 30], max_new=40) for at in range(4)]
    for _ in range(25):
        sim.turn()
    computed = sim.runner.num_tokens
    sim.inbox.messages += [Pause(call=1, mode="retract")]
    for _ in range(4):
        sim.turn()
    sim.inbox.messages += [Resume(call=2)]
    sim.run()
    assert sim.queues.counters.retractions == 4
    for client in clients:
        check_answer(sim, client)
    assert sim.runner.num_tokens - computed < 4 * (40 + 12), "what was computed before is not computed again"


@pytest.mark.parametrize("moment", ["fail_launch", "fail_wait"])
@pytest.mark.parametrize("index", [0, 1, 3, 6])
def test_no_row_goes_on_from_a_state_that_was_never_computed(moment: str, index: int) -> None:
    def failing(step: Step) -> Exception | None:
        return MemoryError("out of memory") if step.index == index else None

    sim = Sim(num_snapshots=8, num_pages=300, num_slots=6, max_step_tokens=16, depth=1, **{moment: failing})  # type: ignore[arg-type]
    clients = [sim.ask([*LONG[:21], at], max_new=6) for at in range(5)]
    sim.run()
    for client in clients:
        check_answer(sim, client)


def test_flushing_frees_the_states() -> None:
    sim = Sim(num_snapshots=4, num_pages=200)
    sim.ask(LONG[:40], max_new=3)
    sim.run()
    snapshots = sim.cache.snapshots
    assert snapshots is not None
    assert snapshots.num_kept > 0
    sim.cache.flush()
    assert (snapshots.num_kept, snapshots.balanced) == (0, True)
