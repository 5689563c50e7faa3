"""Traffic made by hypothesis, over every shape of engine: whatever happens, nobody gets another answer than alone."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bough.core.kv import Grows, KvGroup, KvLayout, Window
from bough.core.messages import LogprobSpec, TextSpec
from bough.core.sampling import GrammarSpec
from bough.core.step import Step
from bough.scheduler.accept import output_limit
from tests.sim.harness import VOCAB, Client, Sim, alone, check_answer, check_scores, gate_of

EXAMPLES = int(os.environ.get("BOUGH_SIM_EXAMPLES", "60"))
_QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def _at_length(test: Any) -> Any:
    """Ten times as many examples."""
    return pytest.mark.long(
        pytest.mark.timeout(1800)(settings(_QUICK, max_examples=10 * EXAMPLES, derandomize=False)(test))
    )


LONGEST = 90
"""Tokens of a prompt, such that the context has room for an answer."""
STEMS = [[(stem * 11 + i * i) % VOCAB for i in range(40)] for stem in range(3)]


@st.composite
def prompts(draw: st.DrawFn, longest: int = 40) -> list[int]:
    """Prompts that share stems, so that the tree branches and rows follow each other."""
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(0, longest - 6))]
    return stem + draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))


@st.composite
def asks(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "prompt": draw(prompts()),
        "max_new": draw(st.one_of(st.integers(0, 12), st.integers(0, 60))),
        "stops": tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=10))),
        "stream": draw(st.booleans()),
        "text": draw(st.sampled_from([None, TextSpec(), TextSpec(stop=("x",)), TextSpec(every=4)])),
        "priority": draw(st.sampled_from([0, 0, 0, 5, 20])),
        "namespace": draw(st.sampled_from(["", "", "", "other"])),
    }


Event = tuple[str, Any]


def events() -> st.SearchStrategy[list[Event]]:
    """What happens between two turns."""
    ask = st.tuples(st.just("ask"), asks())
    crowd = st.tuples(st.just("crowd"), st.tuples(asks(), st.integers(2, 6)))
    abort = st.tuples(st.just("abort"), st.integers(0, 30))
    stop = st.tuples(st.just("stop"), st.tuples(st.integers(0, 30), st.integers(1, 30)))
    wait = st.tuples(st.just("wait"), st.integers(1, 12))
    again = st.tuples(st.just("again"), st.tuples(st.integers(0, 30), asks()))
    return st.lists(st.one_of(ask, ask, crowd, abort, stop, wait, wait, again), min_size=3, max_size=25)


ALL = KvGroup(Grows())
LAYOUTS: dict[str, tuple[KvGroup, ...]] = {
    "all tokens": (ALL,),
    "and a window": (ALL, KvGroup(Window(8))),
    "a window alone": (KvGroup(Window(7)),),
    "chunks": (ALL, KvGroup(Window(6, chunked=True), ((), ()))),
    "windows": (KvGroup(Grows(), ((), ())), KvGroup(Window(1)), KvGroup(Window(21), ((), ()))),
    "parts": (KvGroup(Grows(), parts=2), KvGroup(Window(10))),
    "parts of windows": (ALL, KvGroup(Window(12), ((), ()), parts=4)),
}


@st.composite
def engines(draw: st.DrawFn, *, states: bool = True) -> dict[str, Any]:
    """`states`: of models with recurrent layers too."""
    page_size = draw(st.sampled_from([1, 4, 16]))
    tokens = draw(st.sampled_from([48, 64, 96, 400]))
    step_tokens = draw(st.sampled_from([8, 20, 64]))
    groups = (ALL,)
    if draw(st.booleans()):
        groups = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
        groups = tuple(group for group in groups if page_size % group.parts == 0) or (ALL,)
    height = draw(st.integers(1, KvLayout(groups, page_size).column_pages))
    return {
        "num_snapshots": draw(st.sampled_from([None, None, None, 0, 2, 20])) if states else None,
        "state_interval": draw(st.sampled_from([4, 16])),
        "groups": groups,
        "page_size": page_size,
        "num_pages": tokens // page_size * height + 1,
        "num_slots": draw(st.sampled_from([1, 3, 8])),
        "max_step_tokens": step_tokens,
        "chunk_tokens": draw(st.sampled_from([4, 7, step_tokens])),
        "unwatched_tokens": draw(st.sampled_from([0, step_tokens])),
        "large_step_tokens": draw(st.sampled_from([8, 16, 64, 4096])),
        "whole_prompts": draw(st.sampled_from([False, False, True])),
        "depth": draw(st.integers(0, 2)),
        "radix": draw(st.sampled_from([True, True, True, False])),
        "eviction": draw(st.sampled_from(["lru", "lfu", "fifo", "mru", "priority"])),
        "policy": draw(
            st.sampled_from(["auto", "fcfs", "lpm", "dfs-weight", "lof", "random", "shortest-prefill-first"])
        ),
        "conservativeness": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "small_share": draw(st.sampled_from([0.0, 0.25])),
        "priority": draw(st.booleans()),
    }


def play(sim: Sim, script: list[Event]) -> list[Client]:
    clients: list[Client] = []
    for kind, value in script:
        match kind:
            case "ask":
                clients.append(sim.ask(**value))
            case "crowd":
                ask, count = value
                clients += [sim.ask(**{**ask, "prompt": ask["prompt"] + [i] * (i % 3)}) for i in range(count)]
            case "again":  # goes on from what was said so far
                number, ask = value
                said = clients[number % len(clients)].prompt + clients[number % len(clients)].tokens if clients else []
                clients.append(sim.ask(**{**ask, "prompt": said[: LONGEST - 3] + ask["prompt"][-3:]}))
            case "abort":
                if clients:
                    sim.abort(clients[value % len(clients)])
            case "stop":
                if clients:
                    sim.stop(clients[value[0] % len(clients)], value[1])
            case "wait":
                for _ in range(value):
                    sim.turn()
    sim.run(max_turns=6000)
    return clients


TRAFFIC = {"engine": engines(), "script": events()}
BROKEN = st.dictionaries(st.integers(0, 40), st.sampled_from(["launch", "wait", "oom launch", "oom wait"]), max_size=5)


def check_all_get_what_they_would_get_alone(engine: dict[str, Any], script: list[Event]) -> None:
    sim = Sim(**engine)
    for client in play(sim, script):
        check_answer(sim, client, failures=len(client.prompt) > sim.limits.capacity_tokens)
    assert not sim.problems


@_QUICK
@given(**TRAFFIC)
def test_everybody_gets_what_they_would_get_alone(engine: dict[str, Any], script: list[Event]) -> None:
    check_all_get_what_they_would_get_alone(engine, script)


@_at_length
@given(**TRAFFIC)
def test_everybody_gets_what_they_would_get_alone_at_length(engine: dict[str, Any], script: list[Event]) -> None:
    check_all_get_what_they_would_get_alone(engine, script)


def check_failed_steps(engine: dict[str, Any], script: list[Event], broken: dict[int, str]) -> None:
    def failing(moment: str) -> Any:
        def fail(step: Step) -> Exception | None:
            how = broken.get(step.index, "")
            if not how.endswith(moment) or {step.index - 1, step.index - 2} <= set(broken):
                return None
            return MemoryError("out of memory") if how.startswith("oom") else RuntimeError("the device is on fire")

        return fail

    sim = Sim(**engine, fail_launch=failing("launch"), fail_wait=failing("wait"))
    for client in play(sim, script):
        check_answer(sim, client, failures=True)


@_QUICK
@given(**TRAFFIC, broken=BROKEN)
def test_failed_steps_take_only_their_requests(
    engine: dict[str, Any], script: list[Event], broken: dict[int, str]
) -> None:
    check_failed_steps(engine, script, broken)


@_at_length
@given(**TRAFFIC, broken=BROKEN)
def test_failed_steps_take_only_their_requests_at_length(
    engine: dict[str, Any], script: list[Event], broken: dict[int, str]
) -> None:
    check_failed_steps(engine, script, broken)


@st.composite
def special_asks(draw: st.DrawFn) -> dict[str, Any]:
    """Requests under grammars and budgets, requests that want scores, and plain ones among them."""
    ask = draw(asks())
    ask["prompt"] = ask["prompt"][:20]
    kind = draw(st.sampled_from(["plain", "grammar", "reasoned", "budget", "scored"]))
    source = f"{draw(st.integers(1, 40))},{draw(st.integers(0, 7))},{draw(st.integers(0, 3))}"
    budget = draw(st.integers(0, 12))
    if kind == "grammar":
        ask["grammar"] = GrammarSpec(kind="regex", source=source)
    elif kind == "reasoned":
        ask["grammar"] = GrammarSpec(kind="regex", source=source, after_reasoning=True)
        ask |= {"reasoning_end": (11, 12, 13), "thinking_budget": budget}
    elif kind == "budget":
        ask |= {"reasoning_end": (11, 12, 13), "thinking_budget": budget}
    elif kind == "scored":
        ask["logprobs"] = LogprobSpec(start=draw(st.integers(-1, len(ask["prompt"]))))
    return ask


SPECIAL = {
    "engine": engines(),
    "script": st.lists(
        st.one_of(
            st.tuples(st.just("ask"), special_asks()),
            st.tuples(st.just("ask"), special_asks()),
            st.tuples(st.just("abort"), st.integers(0, 30)),
            st.tuples(st.just("wait"), st.integers(1, 12)),
        ),
        min_size=2,
        max_size=16,
    ),
    "broken": st.dictionaries(st.integers(0, 40), st.sampled_from(["launch", "wait"]), max_size=2),
}


def check_constrained_and_scored(engine: dict[str, Any], script: list[Event], broken: dict[int, str]) -> None:
    def failing(moment: str) -> Any:
        return lambda step: MemoryError("out of memory") if broken.get(step.index) == moment else None

    sim = Sim(**engine, fail_launch=failing("launch"), fail_wait=failing("wait"))
    for client in play(sim, script):
        gate = gate_of(client)
        limit = output_limit(sim.limits, len(client.prompt), client.ask.sampling.max_new_tokens)
        if gate is None:
            check_answer(sim, client, failures=True)
        elif client.end.reason in ("abort", "error"):
            assert alone(client, gate, limit)[: len(client.tokens)] == client.tokens
        else:
            assert alone(client, gate, limit) == client.tokens
        if client.ask.logprobs is not None:
            check_scores(client)


@_QUICK
@given(**SPECIAL)
def test_constrained_and_scored_requests_in_traffic(
    engine: dict[str, Any], script: list[Event], broken: dict[int, str]
) -> None:
    check_constrained_and_scored(engine, script, broken)


@_at_length
@given(**SPECIAL)
def test_constrained_and_scored_requests_in_traffic_at_length(
    engine: dict[str, Any], script: list[Event], broken: dict[int, str]
) -> None:
    check_constrained_and_scored(engine, script, broken)
