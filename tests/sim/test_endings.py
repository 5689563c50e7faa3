"""Every way a request can end or be interrupted, at every stage it can be in."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from bough.config.concerns import SchedulerConfig
from bough.core.messages import StopAt
from bough.core.sampling import GrammarSpec
from bough.core.step import Step
from bough.scheduler.limits import Limits
from tests.sim.harness import VOCAB, Client, Sim, check_answer, expected

PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


def _stage(name: str, depth: int) -> tuple[Sim, Client]:
    """An engine with a request in the stage that is named."""
    if name == "queued":
        sim = Sim(depth=depth, num_slots=1)
        sim.ask(PROMPT[:8], max_new=20)
        sim.turn()
        client = sim.ask(PROMPT, max_new=20)
        sim.turn()
        assert len(sim.queues.waiting) == 1
    elif name == "prefilling":
        sim = Sim(depth=depth, max_step_tokens=8)
        client = sim.ask(PROMPT, max_new=20)
        sim.turn()
        sim.turn()
        assert sim.queues.prefilling
    elif name == "decoding":
        sim = Sim(depth=depth)
        client = sim.ask(PROMPT, max_new=20)
        for _ in range(6):
            sim.turn()
        assert sim.queues.running
        assert client.tokens
    elif name == "compiling":
        sim = Sim(depth=depth)
        client = sim.ask(PROMPT, max_new=20, grammar=GrammarSpec(kind="regex", source="9,0,1000"))
        sim.turn()
        assert sim.queues.compiling
    else:
        sim, client = _retracted(depth)
    return sim, client


def _retracted(depth: int) -> tuple[Sim, Client]:
    sim = Sim(depth=depth, num_pages=18, page_size=4, conservativeness=0.0)
    sim.ask(PROMPT[:12], max_new=36)
    client = sim.ask([1, *PROMPT[:12]], max_new=36)
    for _ in range(100):
        sim.turn()
        if any(w.job.id == client.ask.id and w.job.retractions for w in sim.queues.waiting):
            return sim, client
    raise AssertionError("nothing was retracted")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("stage", ["queued", "compiling", "prefilling", "decoding", "retracted"])
def test_abort(stage: str, depth: int) -> None:
    sim, client = _stage(stage, depth)
    before = sim.queues.next_step
    sim.abort(client)
    sim.turn()
    assert client.end.reason == "abort"
    assert client.end.status == 499
    while any(row.job.id == client.ask.id for row in sim.queues.leaving.values()):
        sim.turn()
    assert sim.queues.next_step - before <= 1 + depth
    sim.abort(client)
    sim.run()
    if stage != "compiling":
        check_answer(sim, client)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("stage", ["decoding", "retracted"])
def test_stop_at(stage: str, depth: int) -> None:
    sim, client = _stage(stage, depth)
    sim.stop(client, 2)
    sim.run()
    assert client.end.reason == "stop"
    assert client.end.completion_tokens == 2
    assert client.tokens == expected(sim, client)[0][: len(client.tokens)]


def test_stop_at_after_the_end_changes_nothing() -> None:
    sim = Sim()
    client = sim.ask(PROMPT, max_new=5)
    sim.run()
    sim.inbox.messages.append(StopAt(client.ask.id, 3))
    sim.run()
    assert client.end.reason == "length"
    assert client.end.completion_tokens == 5


def test_ten_thousand_clients_come_and_go() -> None:
    """A smaller ten thousand: clients that vanish at random leave nothing behind."""
    import random

    rng = random.Random(5)
    sim = Sim(num_pages=40, num_slots=4)
    baseline = sim.cache.num_available
    for _ in range(120):
        client = sim.ask([rng.randrange(4) for _ in range(rng.randrange(1, 20))], max_new=rng.randrange(20))
        for _ in range(rng.randrange(4)):
            sim.turn()
        if rng.random() < 0.7:
            sim.abort(rng.choice([client, *sim.clients.values()]))
    sim.run()
    assert sim.cache.num_available == baseline


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("radix", [True, False])
def test_retraction_keeps_answers(depth: int, radix: bool) -> None:
    sim = Sim(depth=depth, radix=radix, num_pages=16, page_size=4, conservativeness=0.0)
    clients = [sim.ask([i, *PROMPT[:9]], max_new=30, stream=i % 2 == 0) for i in range(5)]
    sim.run()
    for client in clients:
        check_answer(sim, client)
    assert sum(c.end.retractions for c in clients) > 0
    assert max(c.end.retractions for c in clients) <= sim.limits.max_retractions
    assert clients[0].end.retractions == 0


def test_learned_ratio_prevents_retraction() -> None:
    def retractions(**limits: Any) -> int:
        sim = Sim(num_pages=30, page_size=4, **limits)
        for i in range(12):
            sim.ask([i, *PROMPT[:9]], max_new=30)
        sim.run()
        return sim.queues.counters.retractions

    assert retractions(conservativeness=1.5) == 0
    assert retractions(conservativeness=0.0) > 0


def test_after_four_retractions_memory_is_reserved() -> None:
    sim = Sim(num_pages=16, page_size=4, conservativeness=0.0)
    often = sim.ask(PROMPT[:9], max_new=40)
    sim.turn()
    row = sim.queues.where[often.ask.id]
    row.job.dry_retractions = 4
    sim.queues.slots.pinned[row.slot] = True
    others = [sim.ask([i, *PROMPT[:9]], max_new=40) for i in range(3)]
    sim.run()
    assert often.end.retractions == 0
    for client in (often, *others):
        check_answer(sim, client)


# -- priorities -----------------------------------------------------------------------------------


def test_urgent_requests_go_first() -> None:
    sim = Sim(num_slots=1, priority=True)
    sim.ask(PROMPT[:5], max_new=6)
    sim.turn()
    low = sim.ask(PROMPT[:6], max_new=6, priority=0)
    high = sim.ask(PROMPT[:7], max_new=6, priority=5)
    while not low.ends:
        sim.turn()
    assert high.ends
    sim.run()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("scarce", ["slots", "pages"])
def test_much_more_urgent_requests_preempt(depth: int, scarce: str) -> None:
    sim = Sim(
        depth=depth, num_slots=2 if scarce == "slots" else 8, num_pages=64 if scarce == "slots" else 26, priority=True
    )
    low = [sim.ask([i, *PROMPT[:12]], max_new=50 if scarce == "slots" else 34) for i in range(2)]
    for _ in range(6):
        sim.turn()
    assert len(sim.queues.running) == 2
    high = sim.ask(PROMPT[:20], max_new=12, priority=10)
    turns = 0
    while not high.ends:
        sim.turn()
        turns += 1
    assert turns <= 20
    assert not all(c.ends for c in low)
    sim.run()
    for client in (*low, high):
        check_answer(sim, client)
    assert high.end.retractions == 0
    assert [c.end.retractions for c in low] == [0, 1]


def test_urgent_requests_overtake_a_long_prefill() -> None:
    sim = Sim(context_length=400, num_pages=200, max_step_tokens=16, priority=True)
    low = sim.ask([i % VOCAB for i in range(300)], max_new=2)
    sim.turn()
    high = sim.ask(PROMPT, max_new=2, priority=3)
    turns = 0
    while not high.ends:
        sim.turn()
        turns += 1
    assert turns <= 6
    sim.run()
    check_answer(sim, low)
    assert low.end.retractions == 0


def test_a_little_more_urgent_requests_do_not_preempt() -> None:
    sim = Sim(num_slots=1, priority=True)
    low = sim.ask(PROMPT[:5], max_new=12)
    sim.turn()
    sim.ask(PROMPT[:7], max_new=6, priority=9)
    sim.run()
    assert low.end.retractions == 0


def test_without_preemption_urgent_requests_only_go_first() -> None:
    runner = Sim().runner_limits
    gap = Limits.of(runner, SchedulerConfig(priority_scheduling=True, priority_preemption=False)).preempt_gap
    sim = Sim(num_slots=1, priority=True, preempt_gap=gap)
    low = sim.ask(PROMPT[:5], max_new=12, priority=-(2**31))
    sim.turn()
    sim.ask(PROMPT[:7], max_new=6, priority=2**31 - 1)
    sim.run()
    assert low.end.retractions == 0


# -- failures -------------------------------------------------------------------------------------


class _Boom:
    """Fails the steps that it is told to."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.at: set[int] = set()
        self.error = error or RuntimeError("the device is on fire")

    def __call__(self, step: Any) -> Exception | None:
        return self.error if step.index in self.at else None


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("moment", ["fail_launch", "fail_wait"])
def test_a_failed_step_fails_its_requests_only(depth: int, moment: str) -> None:
    boom = _Boom()
    sim = Sim(depth=depth, num_slots=1, **{moment: boom})
    first = sim.ask(PROMPT, max_new=20)
    second = sim.ask(PROMPT, max_new=20)
    boom.at = {6}
    sim.run()
    assert first.end.reason == "error"
    assert first.end.status == 500
    assert "on fire" not in first.end.message, "what broke is for the log"
    assert len(sim.problems) == 1
    assert "on fire" in sim.problems[0]
    check_answer(sim, second)


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_read_a_failed_step_start_again(depth: int) -> None:
    """The second request is admitted while the step that computes its prefix is in flight, and that step fails."""
    boom = _Boom()
    sim = Sim(depth=depth, fail_wait=boom)
    boom.at = {0}
    first = sim.ask(PROMPT, max_new=8)
    second = sim.ask(PROMPT, max_new=8)
    sim.run()
    assert first.end.reason == "error"
    check_answer(sim, second)
    assert second.end.retractions == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_out_of_memory_retracts_and_shrinks(depth: int) -> None:
    boom = _Boom(error=MemoryError("out of memory"))
    sim = Sim(depth=depth, fail_launch=boom, context_length=200, num_pages=200, max_step_tokens=64)
    running = sim.ask(PROMPT[:5], max_new=30)
    for _ in range(4):
        sim.turn()
    boom.at = {sim.queues.next_step}
    large = sim.ask([i % 11 for i in range(150)], max_new=5)
    sim.turn()
    assert sim.queues.prefill_cap == 31 or sim.queues.prefill_cap == 32
    sim.run()
    check_answer(sim, running)
    check_answer(sim, large)
    assert sim.queues.prefill_cap in (31, 32), "not tried again before whoever met it is through"
    for at in range(100):
        sim.ask([at % 37, *range(9)], max_new=1)
        sim.run()
    assert sim.queues.prefill_cap is None or sim.queues.prefill_cap > 32, "and then it is"


class _Computed:
    """What a step had in memory when it ran out of it."""


@pytest.mark.parametrize("moment", ["fail_launch", "fail_wait"])
def test_what_a_step_had_computed_is_gone_before_a_smaller_one_is_tried(moment: str) -> None:
    held: list[weakref.ref[_Computed]] = []

    def run_out(step: Step) -> None:
        if not held:
            computed = _Computed()
            held.append(weakref.ref(computed))
            raise MemoryError("out of memory")

    sim = Sim(depth=0, **{moment: run_out})
    client = sim.ask(PROMPT, max_new=5)
    gc.disable()  # nothing says when the collector comes
    try:
        sim.turn()
        assert held[0]() is None
    finally:
        gc.enable()
    sim.run()
    check_answer(sim, client)


def test_a_request_that_runs_out_of_memory_twice_fails() -> None:
    boom = _Boom(error=MemoryError("out of memory"))
    sim = Sim(depth=0, fail_wait=boom)
    boom.at = {0, 1}
    client = sim.ask(PROMPT, max_new=5)
    sim.run()
    assert client.end.reason == "error"
    assert "out of memory" in client.end.message


def test_three_failures_in_a_row_break_the_engine() -> None:
    from bough.engine.loop import EngineBroken

    sim = Sim(num_slots=1, fail_launch=lambda step: RuntimeError("dead"))
    clients = [sim.ask(PROMPT[: 3 + i], max_new=5) for i in range(5)]
    with pytest.raises(EngineBroken, match="3 steps in a row"):
        sim.run()
    assert [c.end.reason for c in clients] == ["error", "error", "error", "abort", "abort"]


@pytest.mark.parametrize("depth", [0, 1])
def test_failures_that_are_not_in_a_row_break_nothing(depth: int) -> None:
    """However many there are: a step that works makes up for those before it."""
    sim = Sim(
        depth=depth, num_slots=1, fail_wait=lambda step: RuntimeError("now and then") if step.index % 4 == 3 else None
    )
    clients = [sim.ask(PROMPT[: 3 + i], max_new=20) for i in range(8)]
    sim.run()
    assert [c.end.reason for c in clients] == ["error"] * 8
    assert len(sim.problems) == 8


def test_steps_that_are_too_large_break_nothing() -> None:
    """Each request that meets it twice fails, and the next one is tried."""
    sim = Sim(depth=0, num_slots=1, fail_wait=lambda step: MemoryError("out of memory"))
    clients = [sim.ask(PROMPT[: 3 + i], max_new=5) for i in range(4)]
    sim.run()
    assert [c.end.reason for c in clients] == ["error"] * 4


def test_a_runner_can_say_that_the_engine_is_broken() -> None:
    from bough.engine.loop import EngineBroken

    sim = Sim(num_slots=1, fail_launch=lambda step: EngineBroken(what="the ranks are apart, out of memory"))
    clients = [sim.ask(PROMPT[: 3 + i], max_new=5) for i in range(3)]
    with pytest.raises(EngineBroken, match="apart"):
        sim.run()
    assert [c.end.reason for c in clients] == ["abort"] * 3, "those of the step, too: they may be sent again"
    assert {c.end.status for c in clients} == {503}


def test_one_row_of_a_step_can_fail() -> None:
    sim = Sim()
    good, bad = sim.ask(PROMPT, max_new=9), sim.ask(PROMPT[1:], max_new=9)
    launch = sim.runner.launch

    def spoiled(step: Any) -> Any:
        launched = launch(step)
        if step.index == 5:
            slot = sim.queues.where[bad.ask.id].slot
            launched._outcome.failed[step.slots.tolist().index(slot)] = "the logits are not finite"
        return launched

    sim.runner.launch = spoiled  # type: ignore[method-assign]
    sim.run()
    check_answer(sim, good)
    assert bad.end.reason == "error"
    assert "not finite" in bad.end.message


def test_a_pooled_result_that_is_missing_fails_its_request() -> None:
    sim = Sim(pooling=True)
    good, bad = sim.ask(PROMPT, pool="embed"), sim.ask(PROMPT[1:], pool="embed")
    waited = sim.runner.waited

    def lose(launched: Any) -> Any:
        outcome = waited(launched)
        for row, slot in enumerate(launched.step.slots.tolist()):
            if sim.queues.slots.request_id[slot] == bad.ask.id:
                outcome.embeddings.pop(row, None)
        return outcome

    sim.runner.waited = lose  # type: ignore[method-assign]
    sim.run()
    assert good.end.reason == "stop"
    assert bad.end.reason == "error"
    assert "yielded nothing" in bad.end.message


def test_a_page_begun_by_a_failed_step_is_not_cached_when_a_later_step_fills_it() -> None:
    boom = _Boom()
    sim = Sim(page_size=16, num_pages=20, max_step_tokens=8, num_slots=1, fail_wait=boom)
    boom.at = {0}
    first = sim.ask(PROMPT, max_new=4)
    second = sim.ask(PROMPT, max_new=4)
    sim.run()
    assert first.end.reason == "error"
    check_answer(sim, second)


def test_prompts_that_block_each_other_are_told_apart() -> None:
    """Two prompts under way and no page left for either: the younger gives way."""
    from bough.scheduler.plan import plan_step
    from bough.scheduler.policy import PATIENCE_STEPS

    sim = Sim(depth=0, max_step_tokens=8, small_share=0.5, num_pages=40)
    sim.ask(PROMPT, max_new=4)
    younger = sim.ask([1, *PROMPT], max_new=4)
    sim.turn()
    sim.queues.where[younger.ask.id].skipped = PATIENCE_STEPS
    sim.turn()
    assert len(sim.queues.prefilling) == 2
    sim.cache.alloc(sim.cache.num_available)
    plan = plan_step(sim.queues, sim.cache.view(), sim.limits)
    assert plan.retract == [sim.queues.where[younger.ask.id].slot]
    assert not plan.has_rows
