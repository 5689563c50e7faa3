"""What the engine tells of itself: out-of-memory counts, timelines; and that neither changes an answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.sim.harness import Sim, check_answer

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
OOM = MemoryError("out of memory")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_decode_that_never_fits_fails_its_request_and_not_the_server(depth: int) -> None:
    """Steps without a prefill run out of memory again and again: nothing else is to blame, so the row itself fails."""
    sim = Sim(depth=depth, num_slots=1, fail_launch=lambda step: OOM if step.num_decodes == step.num_rows else None)
    client = sim.ask(PROMPT, max_new=20)
    sim.run()
    assert client.end.reason == "error"
    assert "out of memory" in client.end.message
    assert sim.queues.counters.oom_steps == 2
    after = sim.ask(PROMPT[:9], max_new=1)  # one token needs no decode step
    sim.run()
    check_answer(sim, after)


@pytest.mark.parametrize("depth", [0, 1])
def test_many_steps_out_of_memory_never_break_the_engine(depth: int) -> None:
    failing = {"left": 7}

    def fail(step: Any) -> Exception | None:
        failing["left"] -= 1
        return OOM if failing["left"] >= 0 else None

    sim = Sim(depth=depth, fail_launch=fail)
    clients = [sim.ask(PROMPT[: 6 + i], max_new=5) for i in range(6)]
    sim.run()
    assert all(client.end.reason in ("length", "error") for client in clients)
    assert sim.queues.counters.oom_steps == 7
    last = sim.ask(PROMPT, max_new=5)
    sim.run()
    check_answer(sim, last)


def test_a_traced_request_has_a_timeline_and_the_same_answer() -> None:
    sim = Sim(max_step_tokens=8, context_length=200, num_pages=200)
    plain = sim.ask(PROMPT, max_new=6)
    sim.run()
    traced = sim.ask([7, *PROMPT], max_new=6, trace=True)
    sim.run()
    check_answer(sim, plain)
    check_answer(sim, traced)
    assert plain.end.spans == []
    spans = traced.end.spans
    names = [span.name for span in spans]
    assert names[0] == "queue"
    assert names[-1] == "decode"
    chunks = [span for span in spans if span.name == "prefill"]
    assert len(chunks) > 1, "a budget of 8 tokens cuts the prompt"
    assert sum(span.detail["tokens"] for span in chunks) == len(PROMPT) + 1
    assert [span.detail["start"] for span in chunks] == sorted(span.detail["start"] for span in chunks)
    assert spans[-1].detail["tokens"] == 6
    for before, after in pairwise(spans):
        assert before.start_s + before.seconds <= after.start_s + 1e-9
        assert after.seconds >= 0


def test_a_timeline_tells_of_the_cache() -> None:
    sim = Sim()
    sim.ask(PROMPT, max_new=3)
    sim.run()
    again = sim.ask(PROMPT, max_new=3, trace=True)
    sim.run()
    assert again.end.cached_tokens > 0
    assert again.end.spans[0].detail["cached_tokens"] == again.end.cached_tokens
