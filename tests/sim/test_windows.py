"""Windows that move on while rows run: memory comes back, more rows fit, and nothing that is still needed is gone."""

from __future__ import annotations

import pytest

from bough.bench.fake_runner import lone_output
from bough.config.kv_groups import plan_groups
from bough.config.layout import Layout
from bough.core.kv import Grows, KvGroup, KvLayout, Window
from bough.core.messages import JoinBranches, Pause, Resume, joined_namespace
from bough.models.registry import facts_of
from tests.sim.drafters import DeviceDrafter, proposer
from tests.sim.harness import VOCAB, Sim, check_answer
from tests.unit.config.test_kv_groups import GEMMA_27B

BOTH = (KvGroup(Grows()), KvGroup(Window(8), ((), ())))
LONG = [(3 * i * i + i) % VOCAB for i in range(90)]


def held_by_rows(sim: Sim) -> int:
    """Pages that rows can't do without."""
    return sim.cache.total - sim.cache.num_available


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("window", [Window(8), Window(8, chunked=True), Window(1)])
def test_a_row_holds_its_windows_and_no_more(window: Window, radix: bool, depth: int) -> None:
    groups = (KvGroup(Grows()), KvGroup(window, ((), ())))
    sim = Sim(groups=groups, num_pages=200, context_length=200, depth=depth, radix=radix)
    client = sim.ask(LONG[:40], max_new=120)
    layout, most = KvLayout(groups, 4), 0
    while not client.ends:
        sim.turn()
        if len(client.tokens) > 4:
            tokens = len(client.prompt) + len(client.tokens)
            # Steps in flight are ahead of what is known, and one column ahead of that has its pages.
            assert held_by_rows(sim) <= layout.pages_for(tokens + depth + 4) + layout.column_pages
            most = max(most, held_by_rows(sim))
    assert most > 40, "all tokens are held in one line"
    sim.run()
    check_answer(sim, client)


def test_more_rows_of_gemmas_shape_run_at_once() -> None:
    """Gemma 3 27B at 32k tokens, 64 times as small: as many more rows run at once as the plan says."""
    planned = plan_groups(facts_of(GEMMA_27B), Layout(), context=32_768, page_size=64).groups
    small = tuple(
        KvGroup(Window(16) if isinstance(group.lifetime, Window) else Grows(), group.layers) for group in planned
    )

    def most_at_once(groups: tuple[KvGroup, ...], pages_per_column: int) -> int:
        sim = Sim(
            groups=groups, page_size=1, num_pages=1500 * pages_per_column + 1, num_slots=64, context_length=520,
            max_step_tokens=512, chunk_tokens=512, radix=False, conservativeness=1.0,
        )  # fmt: skip
        clients = [sim.ask([(at * i + 7 * at) % VOCAB for i in range(470)], max_new=40) for at in range(24)]
        most = 0
        while not all(client.ends for client in clients):
            sim.turn()
            most = max(most, len(sim.queues.running))
        assert sim.queues.counters.retractions == 0
        for client in clients:
            check_answer(sim, client)
        return most

    # 62 layers in one line take as much memory for a token as 6.2 lines of 10.
    whole = most_at_once((KvGroup(Grows()),), 1)
    freed = most_at_once(small, 6)
    assert freed >= 5 * whole, (freed, whole)


@pytest.mark.parametrize("turns", [5, 6, 7, 8])
def test_a_long_prompt_does_not_take_what_others_were_promised(turns: int) -> None:
    """Its chunks hold more columns of windows than it keeps. Rows that decode have their columns all the same, and are
    neither retracted nor left out of a step."""
    decoded: list[int] = []
    sim = Sim(
        groups=(KvGroup(Grows()), KvGroup(Window(8), ((),) * 6)), num_pages=126, context_length=120, max_step_tokens=70,
        chunk_tokens=64, tpot_target_ms=0.0, fail_launch=lambda step: decoded.append(step.num_decodes),
    )  # fmt: skip
    rows = [sim.ask([at, 5, 9], max_new=40) for at in range(2)]
    for _ in range(turns):
        sim.turn()
    late = sim.ask(LONG[:64], max_new=10)
    first = len(decoded)
    while not late.tokens:
        sim.turn()
    assert min(decoded[first:]) == 2, decoded
    sim.run()
    assert sim.queues.counters.retractions == 0
    for client in (*rows, late):
        check_answer(sim, client)


def test_a_prompt_as_long_as_memory_allows_goes_through() -> None:
    for groups in (BOTH, (KvGroup(Window(8)),), (KvGroup(Grows()), KvGroup(Window(12, chunked=True)))):
        for depth in (0, 1, 2):
            sim = Sim(groups=groups, num_pages=30, context_length=400, depth=depth, max_step_tokens=64)
            most = sim.limits.capacity_tokens
            assert most > KvLayout(groups, 4).page_size * 29 // KvLayout(groups, 4).column_pages
            client = sim.ask([(7 * i) % VOCAB for i in range(min(most, 399) - 3)], max_new=20)
            sim.run()
            check_answer(sim, client)
            assert client.end.completion_tokens >= 3


def test_a_cached_prefix_needs_its_last_window_only() -> None:
    sim = Sim(groups=BOTH, num_pages=64)
    first = sim.ask(LONG[:40], max_new=4)
    sim.run()
    lines = sim.cache.tree.num_cached
    evicted = sim.cache.alloc(sim.cache.pool.num_free + 10)  # what lies before the last window goes first
    sim.cache.free_private(evicted)
    assert sim.cache.tree.num_cached == lines - 10
    again = sim.ask([*LONG[:40], *first.tokens[:3], 1, 2], max_new=4)
    sim.run()
    assert again.end.cached_tokens == 40
    check_answer(sim, again)


def test_rows_are_retracted_and_come_back() -> None:
    sim = Sim(groups=BOTH, num_pages=100, num_slots=4)
    clients = [sim.ask(LONG[at : at + 30], max_new=40) for at in range(4)]
    for _ in range(20):
        sim.turn()
    sim.inbox.messages += [Pause(call=1, mode="retract")]
    for _ in range(4):
        sim.turn()
    sim.inbox.messages += [Resume(call=2)]
    sim.run()
    assert sim.queues.counters.retractions >= 4
    for client in clients:
        check_answer(sim, client)


@pytest.mark.parametrize("right", [0.0, 0.6, 0.95])
def test_drafts_that_are_wrong_find_their_window(right: float) -> None:
    """Rows with drafts run ahead by several columns and are taken back: what they see then is still there."""
    sim = Sim(
        groups=(KvGroup(Grows()), KvGroup(Window(3))), page_size=1, num_pages=300, depth=1,
        drafter=DeviceDrafter(6), propose=proposer(right),
    )  # fmt: skip
    clients = [sim.ask(LONG[at : at + 20], max_new=50) for at in range(3)]
    sim.run()
    for client in clients:
        check_answer(sim, client)


def test_branches_of_windows_are_not_joined() -> None:
    sim = Sim(groups=BOTH, kv_stays="some of its layers keep the last tokens of a context only")
    sim.inbox.messages.append(
        JoinBranches(call=7, namespace="", branches=("a",), starts=(0,), joined=joined_namespace("", "s"))
    )
    kept = sim.ask(LONG[:10], max_new=0)
    kept.ask.keep = True
    kept.ask.rid = "a"
    sim.run()
    sim.inbox.messages.append(
        JoinBranches(call=8, namespace="", branches=("a",), starts=(0,), joined=joined_namespace("", "s"))
    )
    sim.turn()
    assert "keep the last tokens" in sim.replies[-1].error


def test_a_kept_request_is_gone_on_from_within_its_last_page() -> None:
    sim = Sim(groups=BOTH)
    kept = sim.ask(LONG[:22], max_new=0)
    kept.ask.keep = True
    sim.run()
    after = sim.ask([*LONG[:22], 4, 5], max_new=8)
    after.ask.follows = "r1"
    sim.run()
    assert after.end.cached_tokens == 22
    check_answer(sim, after)


def test_forks_copy_the_page_they_part_in() -> None:
    """Answers to one prompt share its full columns, and copy the last one in every line."""
    sim = Sim(groups=BOTH, num_pages=200)
    asked = [sim.ask(LONG[:30], max_new=6) for _ in range(3)]
    sim.run()
    wanted = lone_output(LONG[:30], vocab_size=VOCAB, limit=6)[0]
    assert [client.tokens for client in asked] == [wanted] * 3
    assert sorted(client.end.cached_tokens for client in asked) == [0, 28, 28]
