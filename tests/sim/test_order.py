"""What somebody waits for comes first: a step is launched, and its news leave, before the books are put in order."""

from __future__ import annotations

import pytest

from bough.bench.fake_runner import OracleLaunched
from bough.core.messages import ToDetokenizer, Tokens
from bough.core.sampling import GrammarSpec
from bough.core.step import Mask, Step
from tests.sim.harness import VOCAB, Sim, check_answer

PROMPT = [(7 * i + 3) % VOCAB for i in range(30)]


def test_a_step_is_launched_before_its_pages_enter_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim()
    cached = []
    launch = sim.runner.launch

    def look(step: Step) -> OracleLaunched:
        cached.append(sim.cache.tree.num_cached)
        return launch(step)

    monkeypatch.setattr(sim.runner, "launch", look)
    first = sim.ask(PROMPT, max_new=1)
    sim.turn()
    assert cached == [0]
    assert sim.cache.tree.num_cached == len(PROMPT) // sim.cache.page_size
    second = sim.ask(PROMPT, max_new=1)
    sim.turn()
    assert sim.runner.num_tokens == len(PROMPT) + len(PROMPT) % sim.cache.page_size, "found in the very next step"
    sim.run()
    for client in (first, second):
        check_answer(sim, client)


def test_a_step_that_could_not_be_launched_leaves_nothing_in_the_tree() -> None:
    sim = Sim(fail_launch=lambda step: RuntimeError("on purpose") if step.index == 0 else None)
    lost = sim.ask(PROMPT, max_new=1)
    sim.turn()
    assert lost.end.reason == "error"
    assert sim.cache.tree.num_cached == 0
    again = sim.ask(PROMPT, max_new=1)
    sim.run()
    assert again.end.cached_tokens == 0
    check_answer(sim, again)


@pytest.mark.parametrize("pooling", [False, True])
def test_an_end_is_told_before_its_memory_goes_back(monkeypatch: pytest.MonkeyPatch, pooling: bool) -> None:
    sim = Sim(pooling=pooling)
    free = []
    send = sim.send

    def look(message: ToDetokenizer) -> None:
        if isinstance(message, Tokens):
            free.append(sim.queues.slots.num_free)
        send(message)

    monkeypatch.setattr(sim, "send", look)
    client = sim.ask(PROMPT, max_new=1, pool="embed" if pooling else "")
    sim.turn()
    assert not client.ends
    sim.turn()
    assert client.end.reason == ("stop" if pooling else "length")
    assert free == [sim.limits.num_slots - 1]
    assert sim.queues.slots.num_free == sim.limits.num_slots, "before anything else can come in"
    assert sim.cache.num_held == 0


def test_masks_do_not_wait_for_the_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim()
    seen: list[str] = []
    send, sample = sim.send, OracleLaunched.sample

    def sent(message: ToDetokenizer) -> None:
        seen.append(type(message).__name__)
        send(message)

    def sampled(launched: OracleLaunched, masks: Mask) -> None:
        seen.append("sample")
        sample(launched, masks)

    monkeypatch.setattr(sim, "send", sent)
    monkeypatch.setattr(OracleLaunched, "sample", sampled)
    sim.ask(PROMPT, max_new=3, grammar=GrammarSpec(kind="regex", source="9,0,0"))
    sim.run()
    first = seen.index("Tokens")
    assert seen[first - 1 : first + 1] == ["sample", "Tokens"]
    assert seen.count("sample") == 3
