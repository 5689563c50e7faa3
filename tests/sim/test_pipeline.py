"""Several stages: steps in flight have no row in common, answers are those of one stage, and a grammar's rows wait for their
own step only."""

from __future__ import annotations

import random

import pytest

from bough.core.sampling import GrammarSpec
from bough.core.step import Step
from bough.scheduler.constrain import Gate
from tests.sim.harness import VOCAB, ParityMatcher, Sim, alone, check_answer

PROMPT = [(7 * i + 3) % VOCAB for i in range(20)]


class Watched:
    """An engine of several stages; notes how full the pipeline was."""

    def __init__(self, stages: int, **settings: object) -> None:
        self.sim = Sim(depth=stages - 1, num_stages=stages, **settings)  # type: ignore[arg-type]
        self.most = 0
        launch = self.sim.runner.launch

        def watched(step: Step) -> object:
            flying = [set(entry.flight.step.slots.tolist()) for entry in self.sim.loop._in_flight]
            decoding = set(step.slots[step.samples].tolist())
            sampled = [set(e.flight.step.slots[e.flight.step.samples].tolist()) for e in self.sim.loop._in_flight]
            assert all(not decoding & rows for rows in sampled), "a row is in two steps that sample"
            self.most = max(self.most, len(flying) + 1)
            return launch(step)

        self.sim.runner.launch = watched  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_answers_are_those_of_one_stage(stages: int, micro_batch: int) -> None:
    watched = Watched(stages, num_pages=200, micro_batch=micro_batch)
    clients = [watched.sim.ask(PROMPT[: 5 + i], max_new=9 + i, stops=(3,)) for i in range(8)]
    watched.sim.run()
    for client in clients:
        check_answer(watched.sim, client)
    assert watched.most == stages, "the pipeline was full"


@pytest.mark.parametrize("seed", range(12))
def test_traffic_with_aborts_and_little_memory(seed: int) -> None:
    draw = random.Random(seed)
    watched = Watched(draw.choice([2, 3, 4]), num_pages=draw.choice([24, 40, 64]), page_size=draw.choice([1, 4]))
    sim, clients = watched.sim, []
    for _ in range(25):
        match draw.randrange(4):
            case 0 | 1:
                length = draw.randrange(1, 20)
                clients.append(sim.ask(PROMPT[:length], max_new=draw.randrange(0, 20), stops=(draw.randrange(VOCAB),)))
            case 2 if clients:
                sim.abort(draw.choice(clients))
            case _:
                for _ in range(draw.randrange(1, 6)):
                    sim.turn()
    sim.run()
    for client in clients:
        if not client.aborted:
            check_answer(sim, client)
        assert len(client.ends) == 1


@pytest.mark.parametrize("run", [0, 3])
def test_grammar_rows_do_not_empty_the_pipeline(run: int) -> None:
    watched = Watched(3, num_pages=200)
    sim = watched.sim
    free = [sim.ask(PROMPT[: 6 + i], max_new=25) for i in range(5)]
    bound = sim.ask(PROMPT, max_new=30, grammar=GrammarSpec(kind="regex", source=f"30,{run},0"))
    sim.run()
    for client in free:
        check_answer(sim, client)
    assert bound.tokens == alone(bound, Gate(ParityMatcher(30, run)), 30)
    assert watched.most == 3
