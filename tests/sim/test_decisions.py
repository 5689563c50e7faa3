"""What one step decides when memory, slots or tokens are short: looked at in the step itself, since most wrong decisions
only cost time, and answers stay the same."""

from __future__ import annotations

from typing import Any

import pytest

from bough.core.messages import Pause, Resume
from bough.core.sampling import GrammarSpec
from bough.core.step import Step
from bough.scheduler.constrain import Gate
from bough.scheduler.estimate import expected_output, new_need, running_need
from bough.scheduler.plan import plan_step, prefill_budget
from bough.scheduler.preempt import victims
from bough.scheduler.prefill import PATIENCE_TO_FOLLOW
from bough.scheduler.queues import Waiting
from tests.sim.drafters import HostDrafter
from tests.sim.harness import VOCAB, Client, ParityMatcher, Sim, alone, check_answer

PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


def forced(length: int, run: int) -> GrammarSpec:
    """`length` tokens, of which `run` in eight are forced."""
    return GrammarSpec(kind="regex", source=f"{length},{run},0")


def fill(sim: Sim, prompt: list[int]) -> None:
    """Has a prompt cached, with one token behind it."""
    sim.ask(prompt, max_new=1)
    sim.run()


def admitted(sim: Sim) -> set[int]:
    """Requests that have a slot."""
    queues = sim.queues
    return {row.job.id for row in (*queues.prefilling.values(), *queues.running.values())}


# -- forced runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_that_gives_way_takes_its_forced_tokens_along(depth: int) -> None:
    """Whenever the more urgent request comes: also in a step that was to take a run of forced tokens."""
    with_runs = 0
    for turns in range(2, 9):
        sim = Sim(depth=depth, num_slots=1, priority=True)
        low = sim.ask(PROMPT[:9], max_new=40, grammar=forced(40, 6))
        for _ in range(turns):
            sim.turn()
        high = sim.ask(PROMPT, max_new=4, priority=20)
        sim.inbox.messages, asked = [], list(sim.inbox.messages)
        with_runs += bool(plan_step(sim.queues, sim.cache.view(), sim.limits).runs)
        sim.inbox.messages = asked
        sim.run()
        assert low.end.retractions == 1
        assert low.tokens == alone(low, Gate(ParityMatcher(40, 6)), 40)
        check_answer(sim, high)
    assert with_runs >= 2, "some came when a run was due"


@pytest.mark.parametrize("num_rows", [2, 3])
def test_forced_tokens_are_part_of_a_steps_tokens(num_rows: int) -> None:
    """Several runs, and runs and a prompt's chunk, are together no longer than a step may be."""
    sizes: list[int] = []

    def note(step: Step) -> None:
        sizes.append(len(step.tokens))

    sim = Sim(max_step_tokens=16, num_pages=160, context_length=200, fail_launch=note)  # type: ignore[arg-type]
    rows = [sim.ask([at, *PROMPT[:4]], max_new=60, grammar=forced(60, 7)) for at in range(num_rows)]
    while len(sim.queues.running) < num_rows:
        sim.turn()
    long = sim.ask([at % 7 for at in range(150)], max_new=2)
    sim.run()
    assert max(sizes) == 16
    for client in rows:
        assert client.tokens == alone(client, Gate(ParityMatcher(60, 7)), 60)
    check_answer(sim, long)


@pytest.mark.parametrize("num_pages", range(30, 40))
def test_forced_tokens_take_their_pages_before_prompts_do(num_pages: int) -> None:
    """However tight it is: what a step takes is no more than there is, or the pool would be dry."""
    sim = Sim(num_pages=num_pages, page_size=2, conservativeness=0.0, radix=False, max_step_tokens=24, depth=0)
    rows = [sim.ask([at, *PROMPT[:3]], max_new=40, grammar=forced(40, 7)) for at in range(2)]
    while len(sim.queues.running) < 2:
        sim.turn()
    late = sim.ask(PROMPT, max_new=1)
    sim.run()
    check_answer(sim, late)
    for client in rows:
        assert client.tokens == alone(client, Gate(ParityMatcher(40, 7)), 40)


@pytest.mark.parametrize("spare", [0, -1])
def test_pages_that_forced_tokens_take_are_counted_once(spare: int) -> None:
    """A request is admitted beside a run of forced tokens if what both are expected to need is there, and with a page
    less it is not. Pages that the run takes in this step are not reserved for its row a second time."""
    sim = Sim(num_pages=128, page_size=2, radix=False, depth=0)
    sim.ask(PROMPT[:5], max_new=40, grammar=forced(40, 7))
    while not (runs := plan_step(sim.queues, sim.cache.view(), sim.limits).runs) or runs[0].num_new_columns < 2:
        sim.turn()
    late = sim.ask(PROMPT[:6], max_new=6)
    sim.loop._receive()
    waiting = sim.queues.where[late.ask.id]
    assert isinstance(waiting, Waiting)
    ratio = {count: sim.queues.ratio.estimate(count, 1.0) for count in (1, 2)}
    needed = int(running_need(sim.queues, sim.limits, sim.queues.running_slots(), ratio[1]).sum())
    needed += new_need(sim.limits, 6 + expected_output(waiting.job, sim.limits, ratio[2]), 0)
    sim.cache.alloc(sim.cache.num_available - needed - spare)
    plan = plan_step(sim.queues, sim.cache.view(), sim.limits)
    assert plan.runs
    assert bool(plan.shares) is (spare == 0)


# -- who is admitted ------------------------------------------------------------------------------


def test_nobody_waits_for_the_prefix_of_another_tenant() -> None:
    """It would never be found. Within a tenant, the second one waits for the first one's pages."""
    apart = Sim(num_pages=128)
    for namespace in ("a", "b"):
        apart.ask(PROMPT[:12], max_new=4, namespace=namespace)
    apart.turn()
    assert len(admitted(apart)) == 2
    together = Sim(num_pages=128)
    for _ in range(2):
        together.ask(PROMPT[:12], max_new=4, namespace="a")
    together.turn()
    assert len(admitted(together)) == 1
    apart.run()
    together.run()


def test_who_was_overtaken_often_waits_for_nobodys_prefix() -> None:
    sim = Sim(num_pages=128)
    sim.ask(PROMPT[:12], max_new=4)
    patient, overtaken = (sim.ask(PROMPT[:12], max_new=4) for _ in range(2))
    sim.loop._receive()
    for client, times in ((patient, PATIENCE_TO_FOLLOW - 1), (overtaken, PATIENCE_TO_FOLLOW)):
        waiting = sim.queues.where[client.ask.id]
        assert isinstance(waiting, Waiting)
        waiting.skipped = times
    sim.turn()
    assert (patient.ask.id in admitted(sim), overtaken.ask.id in admitted(sim)) == (False, True)
    sim.run()


def test_what_one_request_will_need_is_not_promised_to_the_next() -> None:
    """Each fits by itself, both do not: the second waits, although the first has not taken its memory yet."""
    sim = Sim(page_size=1, num_pages=21, conservativeness=1.0, share_tokens=64)
    first, second = (sim.ask([at, *PROMPT[:4]], max_new=10) for at in range(2))
    sim.turn()
    assert admitted(sim) == {first.ask.id}
    sim.run()
    assert first.end.retractions == second.end.retractions == 0


def test_rows_that_do_not_fit_into_a_step_take_turns() -> None:
    sim = Sim(max_step_tokens=4, num_pages=128, num_slots=8)
    clients = [sim.ask([at, *PROMPT[:2]], max_new=24) for at in range(7)]
    while len(sim.queues.running) < len(clients):
        sim.turn()
    began = [len(client.tokens) for client in clients]
    for _ in range(21):
        sim.turn()
    grown = [len(client.tokens) - before for client, before in zip(clients, began, strict=True)]
    assert min(grown) >= 8, "of twelve on average"
    sim.run()


def test_pages_that_two_requests_lock_are_counted_once() -> None:
    """Both begin with the same cached pages: with them counted twice, the second would find no memory."""
    sim = Sim(page_size=1, num_pages=31, max_step_tokens=64, conservativeness=0.0, share_tokens=8)
    fill(sim, PROMPT[:20])
    assert sim.cache.num_available == 30
    clients = [sim.ask([*PROMPT[:20], 1 + at], max_new=1) for at in range(2)]
    sim.turn()
    assert admitted(sim) | {each.ask.id for each in clients if each.ends} == {each.ask.id for each in clients}
    sim.run()
    assert [client.end.cached_tokens for client in clients] == [20, 20]


def test_pages_are_given_back_by_those_who_do_not_fit_into_the_step() -> None:
    """The second prompt, most of it cached, may not be cut and is too long for what is left; the third finds the memory
    that it would have locked."""
    sim = Sim(
        page_size=1, num_pages=35, max_step_tokens=16, context_length=34, conservativeness=0.0, whole_prompts=True,
        share_tokens=64,
    )  # fmt: skip
    fill(sim, PROMPT[:16])
    first = sim.ask([5] * 10, max_new=1)
    second = sim.ask([*PROMPT[:16], *[6] * 8], max_new=1)
    third = sim.ask([7] * 5, max_new=5)
    sim.turn()
    assert admitted(sim) == {first.ask.id, third.ask.id}
    sim.run()
    for client in (first, second, third):
        check_answer(sim, client)


@pytest.mark.parametrize(
    ("num_waiting", "num_decodes", "rests"), [(8, 32, True), (8, 33, False), (7, 4, False), (20, 8, True)]
)
def test_a_crowd_is_served_before_the_time_per_token_is_kept(num_waiting: int, num_decodes: int, rests: bool) -> None:
    sim = Sim(context_length=400, num_pages=400, max_step_tokens=256, tpot_target_ms=20.0, min_chunk_tokens=8)
    for _ in range(20):
        sim.queues.cost.observe(10.0, 0)
        sim.queues.cost.observe(10.0 + 64 * 0.5, 64)
    for at in range(num_waiting):
        sim.ask([at, *PROMPT], max_new=2)
    sim.loop._receive()
    assert len(sim.queues.waiting) == num_waiting
    budget = prefill_budget(sim.queues, sim.limits, 200, num_decodes, 1.0)
    assert budget == (200 if rests else 20)


# -- whose memory is taken ------------------------------------------------------------------------


def two_rows(**changes: Any) -> tuple[Sim, list[Client]]:
    """An engine at depth 1, with two rows that decode."""
    settings: dict[str, Any] = {"num_pages": 26, "priority": True, "depth": 1, **changes}
    sim = Sim(**settings)
    rows = [sim.ask([at, *PROMPT[:12]], max_new=34) for at in range(2)]
    for _ in range(6):
        sim.turn()
    assert len(sim.queues.running) == 2
    return sim, rows


def test_the_last_row_keeps_its_memory() -> None:
    """However much is wanted: an engine that retracts its only row never gets anywhere."""
    sim, (older, younger) = two_rows()
    slots = {row.job.id: slot for slot, row in sim.queues.running.items()}
    assert victims(sim.queues, sim.limits, short_pages=1000) == [slots[younger.ask.id]]
    sim.abort(younger)
    for _ in range(3):
        sim.turn()
    assert list(sim.queues.running) == [slots[older.ask.id]]
    assert victims(sim.queues, sim.limits, short_pages=1000) == []
    sim.run()


def test_a_row_whose_memory_is_reserved_keeps_it() -> None:
    sim, (older, younger) = two_rows()
    slots = {row.job.id: slot for slot, row in sim.queues.running.items()}
    sim.queues.slots.pinned[slots[younger.ask.id]] = True
    assert victims(sim.queues, sim.limits, short_pages=1) == [slots[older.ask.id]]
    sim.run()


@pytest.mark.parametrize("scarce", ["slots", "pages"])
def test_who_leaves_makes_room_and_nobody_else_gives_way(scarce: str) -> None:
    """A row is on its way out, and a step still reads its pages: they are enough for the urgent request."""
    sim, (stays, leaves) = two_rows(**({"num_slots": 2, "num_pages": 64} if scarce == "slots" else {"num_pages": 25}))
    sim.abort(leaves)
    sim.ask(PROMPT[:20], max_new=12, priority=20)
    sim.loop._receive()
    assert sim.queues.leaving, "its last step is in flight"
    plan = plan_step(sim.queues, sim.cache.view(), sim.limits)
    assert (plan.preempt, plan.shares) == ([], []), "it waits for what is about to come"
    sim.run()
    assert stays.end.retractions == 0


def test_pages_that_are_coming_spare_a_retraction() -> None:
    """Rows need a page each when there is none, but one that leaves is about to return its own."""
    sim = Sim(num_pages=21, page_size=4, depth=1, conservativeness=0.0, radix=False, num_slots=3)
    rows = [sim.ask([at, *PROMPT[: 7 + 2 * at]], max_new=30) for at in range(3)]
    sim.turn()
    while not plan_step(sim.queues, sim.cache.view(), sim.limits).retract:
        sim.turn()
    sim.abort(rows[0])
    sim.loop._receive()
    assert sim.queues.leaving
    plan = plan_step(sim.queues, sim.cache.view(), sim.limits)
    assert plan.retract == []
    assert len(plan.decodes) == 1, "the other one needs a page that is not there yet"
    sim.run()
    check_answer(sim, rows[1])


def test_prompts_leave_the_pages_that_rows_wait_for() -> None:
    """Two rows may need a page each if all their drafts are right, and one page is left: both wait until it is known. The
    chunk of a prompt does not take the page meanwhile, or a row would be retracted for it."""
    sim = Sim(num_pages=64, radix=False, depth=0, drafter=HostDrafter(), max_step_tokens=8, small_share=0.5)
    for at in range(2):
        sim.ask([at, *PROMPT[:4]], max_new=34)
    while len(sim.queues.running) < 2:
        sim.turn()
    long = sim.ask([at % 7 for at in range(60)], max_new=2)
    while not sim.queues.prefilling:
        sim.turn()
    slots, rows = sim.queues.slots, sim.queues.running_slots()
    # As if a step with drafts were in flight that fills the last page of both.
    slots.out_high[rows] += 2
    slots.kv_high[rows] = slots.num_columns[rows] * sim.limits.page_size
    sim.cache.alloc(sim.cache.num_available - 1)
    plan = plan_step(sim.queues, sim.cache.view(), sim.limits)
    assert (len(plan.decodes), plan.retract) == (0, [])
    assert sum(share.num_new_columns(sim.limits.page_size) for share in plan.shares) == 0
    assert long.ask.id in admitted(sim)


@pytest.mark.parametrize(("retractions", "reserved"), [(3, False), (4, True), (5, True)])
def test_memory_is_reserved_from_the_fourth_retraction_on(retractions: int, reserved: bool) -> None:
    sim = Sim(num_pages=64, max_running=1, conservativeness=0.0)
    sim.ask(PROMPT[:5], max_new=2)
    client = sim.ask(PROMPT[:9], max_new=40)
    sim.turn()
    waiting = sim.queues.where[client.ask.id]
    assert isinstance(waiting, Waiting)
    waiting.job.dry_retractions = retractions
    assert (expected_output(waiting.job, sim.limits, 0.0) == 39) is reserved
    while client.ask.id not in admitted(sim):
        sim.turn()
    slot = sim.queues.where[client.ask.id].slot  # type: ignore[union-attr]
    assert bool(sim.queues.slots.pinned[slot]) is reserved
    other = sim.ask([1, 2], max_new=2)
    sim.run()
    check_answer(sim, other)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_first_token_came_when_it_came_first(depth: int) -> None:
    """A request that loses its memory computes its tokens again; what it measured before stays."""
    sim = Sim(depth=depth, num_pages=18, page_size=4, conservativeness=0.0)
    clients = [sim.ask([at, *PROMPT[:12]], max_new=36) for at in range(2)]
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}
    began_s = sim.clock.now
    while not sim.queues.idle or sim.inbox.messages:
        sim.turn()
        for client in clients:
            if client.tokens:
                first_s.setdefault(client.ask.id, sim.clock.now)
            if client.ends:
                last_s.setdefault(client.ask.id, sim.clock.now)
    assert sum(client.end.retractions for client in clients) > 0
    for client in clients:
        end = client.end
        assert end.queued_s + end.prefill_s == pytest.approx(first_s[client.ask.id] - began_s, abs=0.011)
        assert end.decode_s == pytest.approx(last_s[client.ask.id] - first_s[client.ask.id], abs=0.011)


# -- waiting --------------------------------------------------------------------------------------


def test_a_paused_engine_waits_without_looking() -> None:
    """Requests that wait are no news while nothing may run."""
    sim = Sim(num_slots=1)
    sim.ask(PROMPT, max_new=20)
    for _ in range(3):
        sim.turn()
    sim.inbox.messages.append(Pause(1, "retract"))
    sim.ask(PROMPT[:7], max_new=3)
    blocks: list[float] = []
    take = sim.inbox.drain

    def drain(block_s: float) -> list[Any]:
        blocks.append(block_s)
        return take(block_s)

    sim.inbox.drain = drain  # type: ignore[method-assign]
    for _ in range(6):
        sim.turn()
    assert sim.loop.control.paused
    assert len(sim.queues.waiting) == 2
    assert blocks[-3:] == [sim.loop.idle_s] * 3
    sim.inbox.messages.append(Resume(2))
    sim.run()
