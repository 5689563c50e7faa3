"""The engine on the oracle, one behaviour at a time."""

from __future__ import annotations

from typing import Any

import pytest

from bough.core.messages import TextSpec
from bough.scheduler.slots import NEVER
from tests.sim.harness import VOCAB, Sim, check_answer, expected

PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("radix", [True, False])
def test_requests_get_what_they_would_get_alone(depth: int, page_size: int, radix: bool) -> None:
    sim = Sim(depth=depth, page_size=page_size, num_pages=400 // page_size, radix=radix)
    clients = [sim.ask(PROMPT[: 5 + 3 * i], max_new=4 + i, stops=(3,)) for i in range(8)]
    sim.run()
    for client in clients:
        check_answer(sim, client)


def test_second_request_reuses_pages() -> None:
    sim = Sim()
    first = sim.ask(PROMPT, max_new=6)
    sim.run()
    second = sim.ask(PROMPT, max_new=6)
    sim.run()
    assert first.end.cached_tokens == 0
    assert second.end.cached_tokens == 29, "all but the token that is computed, to the middle of a page"
    assert second.tokens == first.tokens


def test_a_match_leaves_one_token_to_compute() -> None:
    sim = Sim()
    sim.ask(PROMPT[:28], max_new=6)
    sim.run()
    again = sim.ask(PROMPT[:28], max_new=6)
    sim.run()
    assert again.end.cached_tokens == 27


def test_a_prompt_that_parts_within_a_page_copies_the_rest_of_it() -> None:
    sim = Sim()
    sim.ask(PROMPT, max_new=1)
    sim.run()
    before = sim.runner.num_tokens
    other = sim.ask([*PROMPT[:27], 1, 2, 3, 4], max_new=6)
    sim.run()
    assert PROMPT[27] != 1
    assert other.end.cached_tokens == 27
    assert sim.runner.num_tokens - before == 4 + 5
    check_answer(sim, other)
    little = sim.ask([*PROMPT[:24], 1, 2, 3, 4], max_new=6)
    sim.run()
    assert little.end.cached_tokens == 24, "nothing of the next page is the same"


@pytest.mark.parametrize("rest", [[20, 21, 22, 23, 5, 5, 5], [20, 21, 22, 19, 5, 5, 5]])
def test_a_match_that_another_request_split_is_found_anew(rest: list[int]) -> None:
    """Of two that were matched together the first splits the node, and behind the split lies what the second looks for."""
    sim = Sim(max_running=1, num_pages=100)
    head = [1, 2, 3, 4, 5, 6, 7, 8]
    sim.ask([*head, 9, 9, 1, 1, 7, 7, 7, 7, 20, 21, 22, 23, 30, 30, 30, 30], max_new=1)
    sim.run()
    first = sim.ask([*head, 15, 16], max_new=1)
    second = sim.ask([*head, *rest], max_new=4)
    sim.run()
    check_answer(sim, first)
    check_answer(sim, second)
    assert second.end.cached_tokens == 8


def test_copies_share_the_prompt_within_a_batch() -> None:
    sim = Sim(num_pages=200)
    clients = [sim.ask(PROMPT, max_new=4) for _ in range(6)]
    sim.run()
    assert len({tuple(c.tokens) for c in clients}) == 1
    assert sorted(c.end.cached_tokens for c in clients) == [0, 28, 28, 28, 28, 28]
    assert sim.runner.num_tokens <= 30 + 5 * 2 + 6 * 4


def test_outputs_are_cached_for_the_next_turn() -> None:
    sim = Sim()
    first = sim.ask(PROMPT, max_new=9)
    sim.run()
    second = sim.ask(PROMPT + first.tokens + [1, 2, 3], max_new=4)
    sim.run()
    check_answer(sim, second)
    assert second.end.cached_tokens == 36


def test_namespaces_do_not_share() -> None:
    sim = Sim()
    sim.ask(PROMPT, namespace="a")
    sim.run()
    other = sim.ask(PROMPT, namespace="b")
    same = sim.ask(PROMPT, namespace="a")
    sim.run()
    assert other.end.cached_tokens == 0
    assert same.end.cached_tokens == 29


def test_no_output_wanted() -> None:
    sim = Sim()
    client = sim.ask(PROMPT, max_new=0)
    sim.run()
    assert client.tokens == []
    assert client.end.reason == "length"
    assert client.end.completion_tokens == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_minimum_of_new_tokens(depth: int) -> None:
    sim = Sim(depth=depth)
    every = tuple(range(12))
    client = sim.ask(PROMPT, max_new=12, stops=every, min_new=5)
    sim.run()
    check_answer(sim, client)
    assert len(client.tokens) > 5


@pytest.mark.parametrize(("min_new", "length"), [(4, 5), (5, 12)])
def test_a_stop_token_counts_after_the_minimum(min_new: int, length: int) -> None:
    """The fifth token is a stop token: after a minimum of four it ends the answer, as the last of five it does not."""
    sim = Sim()
    tokens, _ = expected(sim, sim.ask(PROMPT, max_new=12))
    assert tokens.count(tokens[4]) == 1
    client = sim.ask(PROMPT, max_new=12, stops=(tokens[4],), min_new=min_new)
    sim.run()
    assert len(client.tokens) == length


def test_pages_that_a_match_locks_are_not_counted_twice() -> None:
    """The first request locks most of what could be evicted; the second must not be promised the same pages."""
    sim = Sim(page_size=1, num_pages=31, max_step_tokens=64, conservativeness=0.0)
    sim.ask(PROMPT[:20], max_new=1)
    sim.run()
    assert sim.cache.tree.num_evictable == 20
    clients = [sim.ask(PROMPT[:21], max_new=1), sim.ask([1] * 15, max_new=1)]
    sim.run()
    for client in clients:
        check_answer(sim, client)
    assert clients[0].end.cached_tokens == 20


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "lof", "shortest-prefill-first"])
def test_no_policy_starves_the_oldest(policy: str) -> None:
    """Requests that every policy prefers keep coming; the one that none prefers is served all the same."""
    sim = Sim(policy=policy, num_slots=2, num_pages=200)
    sim.ask(PROMPT[:12], max_new=1)
    sim.run()
    for _ in range(4):
        sim.ask(PROMPT[:13], max_new=3)
    unloved = sim.ask([9] * 20, max_new=1)
    for _ in range(90):
        for _ in range(2):
            sim.ask(PROMPT[:13], max_new=3)
        sim.turn()
    assert unloved.ends
    sim.run()


def test_more_stop_ids_than_the_table_holds() -> None:
    sim = Sim()
    client = sim.ask(PROMPT, max_new=40, stops=tuple(range(0, 40, 2)))
    sim.run()
    check_answer(sim, client)
    assert client.end.reason == "stop"


def test_held_back_until_the_end() -> None:
    sim = Sim()
    silent = sim.ask(PROMPT[:10], max_new=40, stream=False)
    watched = sim.ask(PROMPT[:11], max_new=40, stream=False, text=TextSpec(stop=("x",)))
    thirds = sim.ask(PROMPT[:12], max_new=40, text=TextSpec(every=3))
    sizes: dict[int, list[int]] = {}
    before = {c.ask.id: 0 for c in sim.clients.values()}
    while not all(c.ends for c in sim.clients.values()):
        sim.turn()
        for c in sim.clients.values():
            if len(c.tokens) > before[c.ask.id]:
                sizes.setdefault(c.ask.id, []).append(len(c.tokens) - before[c.ask.id])
                before[c.ask.id] = len(c.tokens)
    sim.run()
    assert sizes[silent.ask.id] == [40]
    assert sizes[watched.ask.id] == [16, 16, 8]
    assert sizes[thirds.ask.id] == [3] * 13 + [1]
    for client in (silent, watched, thirds):
        check_answer(sim, client)


def test_context_cuts_the_answer() -> None:
    sim = Sim(context_length=40)
    client = sim.ask(PROMPT, max_new=100)
    sim.run()
    check_answer(sim, client)
    assert len(client.tokens) == 10
    assert client.end.reason == "length"


def test_memory_cuts_the_answer_of_a_lone_request() -> None:
    sim = Sim(num_pages=11, page_size=4)
    client = sim.ask(PROMPT, max_new=60)
    sim.run()
    check_answer(sim, client)
    assert len(client.tokens) == 11
    assert client.end.retractions == 0


@pytest.mark.parametrize(
    ("prompt", "status", "words"),
    [
        ([], 400, "no tokens"),
        ([1] * 96, 400, "at most 95 fit"),
        ([VOCAB], 400, "vocabulary"),
        ([-1], 400, "vocabulary"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], status: int, words: str) -> None:
    sim = Sim()
    client = sim.ask(prompt)
    sim.run()
    assert client.end.reason == "error"
    assert client.end.status == status
    assert words in client.end.message


def test_prompt_larger_than_memory_is_refused() -> None:
    sim = Sim(num_pages=5, page_size=4)
    client = sim.ask(PROMPT)
    sim.run()
    assert client.end.status == 400
    assert "memory for 16" in client.end.message


def test_queue_caps() -> None:
    sim = Sim(max_queued_requests=3)
    clients = [sim.ask(PROMPT) for _ in range(5)]
    sim.run()
    assert [c.end.status for c in clients] == [0, 0, 0, 429, 429]
    sim = Sim(max_queued_tokens=50)
    clients = [sim.ask(PROMPT) for _ in range(3)]
    sim.run()
    assert [c.end.status for c in clients] == [0, 429, 429]


def test_deadline() -> None:
    sim = Sim()
    late = sim.ask(PROMPT, deadline_s=sim.clock.now - 1)
    slow = sim.ask(PROMPT, max_new=60, deadline_s=sim.clock.now + 0.1)
    fine = sim.ask(PROMPT, max_new=4, deadline_s=sim.clock.now + 10)
    sim.run()
    assert late.end.status == 504
    assert slow.end.status == 504
    assert 0 < len(slow.tokens) < 60
    check_answer(sim, slow)
    check_answer(sim, fine)


def test_deadlines_of_requests_that_have_ended_are_forgotten() -> None:
    sim = Sim(num_slots=8)
    slow = sim.ask(PROMPT, max_new=60, deadline_s=sim.clock.now + 500)
    for _ in range(300):
        for _ in range(4):
            sim.ask(PROMPT[:3], max_new=1, deadline_s=sim.clock.now + 100_000)
        sim.turn()
        if slow.ends:
            slow = sim.ask(PROMPT, max_new=60, deadline_s=sim.clock.now + 500)
    assert 1 <= len(sim.queues.deadlines) <= 300
    sim.clock.now += 1000
    sim.run()
    assert slow.end.reason == "abort"


def test_timings_add_up() -> None:
    sim = Sim(max_running=1)
    first = sim.ask(PROMPT, max_new=10)
    second = sim.ask(PROMPT, max_new=10)
    sim.run()
    assert first.end.queued_s < second.end.queued_s
    assert second.end.queued_s == pytest.approx(0.11, abs=0.03)
    assert second.end.decode_s == pytest.approx(0.09, abs=0.015)


def test_long_prefill_leaves_room_for_short_requests() -> None:
    sim = Sim(context_length=400, num_pages=400, max_step_tokens=32, small_share=0.25)
    long = sim.ask([i % VOCAB for i in range(350)], max_new=2)
    sim.turn()
    short = sim.ask([5, 6, 7, 8, 9], max_new=2)
    turns = 0
    while not short.ends:
        sim.turn()
        turns += 1
    assert turns <= 5
    assert not long.ends
    sim.run()
    check_answer(sim, long)


def test_rows_that_decode_take_nothing_from_a_prompts_chunk() -> None:
    sizes: list[int] = []
    sim = Sim(
        context_length=400, num_pages=400, chunk_tokens=64, max_step_tokens=64 + 8, tpot_target_ms=0.0, small_share=0.0,
        fail_launch=lambda step: sizes.append(step.num_tokens),
    )  # fmt: skip
    for start in range(3):
        sim.ask([start, *PROMPT], max_new=50)
    for _ in range(4):
        sim.turn()
    sizes.clear()
    long = sim.ask([5 + i % 7 for i in range(192)], max_new=2)
    for _ in range(3):
        sim.turn()
    assert sizes == [64 + 3] * 3
    sim.run()
    check_answer(sim, long)


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([15, 15, 15, 15, 15], [[15, 15, 15, 15], [15]]),  # the last ends in the second step either way
        ([15, 15, 15, 10, 15], [[15, 15, 15, 10, 9], [6]]),  # there is more room than may stay free
        ([20, 20, 20, 90], [[20, 20, 20, 4], [64], [22]]),  # no step has room for the last
        ([100, 10, 10], [[48, 10, 6], [52, 4]]),  # the next step doesn't begin with the one that waits
        ([29, 29, 30, 4], [[29, 29, 4], [30]]),  # short prompts have the part that is kept for them
        ([29, 29, 30, 90, 4], [[29, 29, 4], [30, 34], [56]]),  # and no younger one begins there instead
    ],
)
def test_a_prompt_is_not_cut_for_the_last_tokens_of_a_large_step(lengths: list[int], steps: list[list[int]]) -> None:
    assert prefills_of(lengths) == steps


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([15, 15, 15, 14, 30, 5], [[15, 15, 15, 14, 5], [30]]),  # 64 tokens are eight full tiles
        ([15, 15, 15, 14, 30, 6, 3], [[15, 15, 15, 14, 3], [30, 6]]),  # 6 don't fit
        ([15, 15, 15, 14, 30, 2, 3], [[15, 15, 15, 14, 2, 3], [30]]),
        ([15, 15, 15, 11, 30, 7, 8], [[15, 15, 15, 11], [30, 7, 8]]),  # its tiles are full already
        ([15, 15, 15, 12, 30, *[8] * 33, 7], [[15, 15, 15, 12], [30, 8, 8, 8]]),  # too far behind
    ],
)
def test_what_fills_the_last_tile_of_a_large_step_overtakes_what_does_not_fit(
    lengths: list[int], steps: list[list[int]]
) -> None:
    assert prefills_of(lengths)[: len(steps)] == steps


def test_who_is_overtaken_still_finds_memory_in_the_next_step() -> None:
    assert prefills_of([15, 15, 15, 14, 30, 5], num_pages=95)[0] == [15, 15, 15, 14, 5], "room for all of them"
    assert prefills_of([15, 15, 15, 14, 30, 5], num_pages=94)[:2] == [[15, 15, 15, 14], [30]]


def test_who_is_overtaken_still_finds_its_cached_beginning() -> None:
    """Pages of the tree that nobody holds yet are memory for others, until it has them."""
    for num_pages, overtakes in ((122, False), (123, True)):
        seen: list[list[int]] = []
        sim = large_steps(seen, num_pages)
        sim.ask(cached := [30, *[6] * 19], max_new=1)
        sim.run()
        seen.clear()
        for start, length in enumerate([15, 15, 15, 14]):
            sim.ask([start, *[5] * (length - 1)], max_new=3)
        sim.ask([*cached, *[7] * 30], max_new=1)
        sim.ask([20, *[5] * 4], max_new=1)
        sim.turn()
        sim.turn()
        assert seen == [[15, 15, 15, 14, *[5] * overtakes], [1, 1, 1, 1, 30]]
        sim.run()


@pytest.mark.parametrize(
    ("num_slots", "num_pages", "overtakes"),
    [(6, 600, False), (7, 600, True), (8, 156, False), (8, 166, False), (8, 167, True)],
)
def test_nobody_takes_the_place_of_those_it_overtakes(num_slots: int, num_pages: int, overtakes: bool) -> None:
    """The first of them leaves the rest of the step to others, and the next does not fit either."""
    seen: list[list[int]] = []
    sim = large_steps(seen, num_pages, num_slots=num_slots, max_step_tokens=80, chunk_tokens=64, tpot_target_ms=0.0)
    for start, length in enumerate([15, 15, 15, 14, 30, 30, 5]):
        sim.ask([start, *[5] * (length - 1)], max_new=7)
    sim.turn()
    sim.turn()
    assert seen[0] == [15, 15, 15, 14, *[5] * overtakes]
    assert seen[1] == [*[1] * len(seen[0]), 30, 30]
    sim.run()


def test_nobody_gives_way_twice_to_one_that_waits_for_the_next_step() -> None:
    """Of less urgent rows, some get the rest of the step: the urgent request is looked at before them and after."""
    seen: list[list[int]] = []
    sim = large_steps(seen, num_pages=67 + 59 + 30 + 1, priority=True)
    sim.ask([39, *[6] * 66], max_new=1)
    sim.turn()
    for start, length in enumerate([15, 15, 15, 14, 30]):
        sim.ask([start, *[5] * (length - 1)], max_new=1, priority=20)
    sim.run()
    assert seen == [[64], [15, 15, 15, 14, 3], [30]]
    assert sim.queues.counters.retractions == 0, "there is memory for all"


def test_decodes_and_prompts_fill_tiles_together() -> None:
    sizes: list[int] = []
    sim = Sim(
        context_length=400, num_pages=800, page_size=1, chunk_tokens=64, max_step_tokens=72, large_step_tokens=64,
        tpot_target_ms=0.0, small_share=0.0, fail_launch=lambda step: sizes.append(step.num_tokens),
    )  # fmt: skip
    for start in range(3):
        sim.ask([start] * 5, max_new=50)
    sim.turn()
    sim.ask([9] * 186, max_new=1)
    sizes.clear()
    for _ in range(3):
        sim.turn()
    assert sizes == [64, 64, 64 + 3], "nothing is left over for a step of its own"
    sim.run()


def test_whole_prompts_fill_a_large_step_to_the_end() -> None:
    """Where none is cut, those that fit follow one that doesn't."""
    assert prefills_of([20, 20, 18, 30, 6], whole_prompts=True) == [[20, 20, 18, 6], [30]]


def prefills_of(lengths: list[int], num_pages: int = 600, **limits: object) -> list[list[int]]:
    """Prompts of such lengths that come at once, in large steps of 64 tokens: what each step computes of them."""
    seen: list[list[int]] = []
    sim = large_steps(seen, num_pages, **limits)
    clients = [sim.ask([start, *[5] * (length - 1)], max_new=1) for start, length in enumerate(lengths)]
    sim.run()
    for client in clients:
        check_answer(sim, client)
    return seen


def large_steps(seen: list[list[int]], num_pages: int, **limits: object) -> Sim:
    """Steps of 64 tokens, which are eight tiles. `seen`: what each step computes of its rows."""
    shape: dict[str, Any] = {"max_step_tokens": 64, "large_step_tokens": 64, "small_share": 0.25, **limits}
    return Sim(
        context_length=400, num_pages=num_pages, page_size=1,
        fail_launch=lambda step: seen.append(step.num_query.tolist()), **shape,
    )  # fmt: skip


@pytest.mark.parametrize("watched", [None, "decoding", "begun", "waiting"])
def test_steps_are_larger_while_nobody_sees_tokens_arrive(watched: str | None) -> None:
    sizes: list[int] = []
    sim = Sim(
        context_length=400, num_pages=400, chunk_tokens=64, unwatched_tokens=128, max_step_tokens=128 + 8,
        tpot_target_ms=0.0, small_share=0.0, fail_launch=lambda step: sizes.append(step.num_tokens),
    )  # fmt: skip
    if watched == "decoding":
        sim.ask(PROMPT, max_new=50)
        sim.turn()
    if watched == "begun":
        sim.ask([9] * 100, max_new=1)
        sim.turn()
    sizes.clear()
    for start in range(4):
        sim.ask([start] * 50, max_new=1, stream=watched == "waiting" and start == 3)
    sim.turn()
    assert sizes == [{None: 128, "decoding": 65}.get(watched, 64)]
    sim.run()


def test_a_stop_string_is_looked_for_in_answers_that_nobody_watches() -> None:
    """Their tokens go to the detokenizer as they come, but from there to nobody."""
    sizes: list[int] = []
    sim = Sim(
        context_length=400, num_pages=400, chunk_tokens=64, unwatched_tokens=128, max_step_tokens=128 + 8,
        tpot_target_ms=0.0, small_share=0.0, fail_launch=lambda step: sizes.append(step.num_tokens),
    )  # fmt: skip
    text = TextSpec(stop=("x",), every=NEVER)
    decoding = sim.ask(PROMPT, max_new=50, text=text)
    sim.turn()
    sim.ask([9] * 200, max_new=1, text=text)
    for start in range(4):
        sim.ask([start] * 50, max_new=1, text=text)
    sizes.clear()
    sim.turn()
    sim.turn()
    assert sizes == [1 + 128, 1 + 128]
    while not decoding.tokens:
        sim.turn()
    assert len(decoding.tokens) < 50
    sim.run()


def test_chunks_shrink_to_the_time_per_token() -> None:
    sim = Sim(context_length=400, num_pages=400, max_step_tokens=256, tpot_target_ms=20.0, min_chunk_tokens=8)
    for _ in range(20):
        sim.queues.cost.observe(10.0, 0)
        sim.queues.cost.observe(10.0 + 64 * 0.5, 64)
    runner = sim.ask(PROMPT, max_new=50)
    for _ in range(4):
        sim.turn()
    sim.ask([i % 7 for i in range(300)], max_new=2)
    before = sim.runner.num_tokens
    sim.turn()
    assert sim.runner.num_tokens - before <= 1 + 20
    sim.run()
    check_answer(sim, runner)


def test_rows_that_nobody_watches_wait_longer() -> None:
    """Beside an answer that is sent when it is whole, prompts take larger chunks, but not all of the step."""
    sim = Sim(context_length=400, num_pages=400, max_step_tokens=256, tpot_target_ms=12.0, min_chunk_tokens=8)
    for _ in range(20):
        sim.queues.cost.observe(10.0, 0)
        sim.queues.cost.observe(10.0 + 64 * 0.5, 64)
    sim.ask(PROMPT, max_new=50, stream=False)
    for _ in range(4):
        sim.turn()
    sim.ask([i % 7 for i in range(300)], max_new=2)
    before = sim.runner.num_tokens
    sim.turn()
    assert 1 + 8 < sim.runner.num_tokens - before <= 1 + 172
    sim.run()


def test_pool_requests_end_with_their_embedding() -> None:
    sim = Sim(pooling=True)
    clients = [sim.ask(PROMPT[: 3 + i], pool="embed") for i in range(5)]
    sim.run()
    for client in clients:
        assert client.end.reason == "stop"
        assert client.tokens == []
        assert len(client.rows[-1].embedding) == 8


def test_expected_is_not_trivial() -> None:
    """The oracle itself: answers differ with the prompt and are not constant."""
    sim = Sim()
    answers = {tuple(expected(sim, sim.ask(PROMPT[:n], max_new=12))[0]) for n in range(2, 20)}
    assert len(answers) == 18
    assert all(len(set(answer)) > 3 for answer in answers)
    sim.run()


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_long_prefill_does_not_starve_an_older_request(share: float) -> None:
    """The younger prompt got in first and takes more than a hundred steps; the older one does not wait for its end."""
    sim = Sim(policy="lof", context_length=600, num_pages=400, max_step_tokens=5, small_share=share)
    older = sim.ask([9] * 20, max_new=1)
    sim.ask([i % VOCAB for i in range(550)], max_new=9)
    turns = 0
    while not older.ends:
        sim.turn()
        turns += 1
    assert turns <= 64
    sim.run()
