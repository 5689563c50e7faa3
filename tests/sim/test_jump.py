"""Certain tokens and respelled ones: fewer steps, the same answer whatever is in flight, and no page lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bough.bench.fake_runner import OracleLaunched, pick, prefix_hash
from bough.core.grammar import Compiled, CompileFailed, Matcher
from bough.core.messages import LogprobSpec
from bough.core.sampling import GrammarSpec
from bough.core.step import Outcome
from tests.covers import cover
from tests.sim.drafters import HostDrafter
from tests.sim.harness import VOCAB, Client, Sim, check_answer

PROMPT = [(5 * i + 2) % VOCAB for i in range(11)]


class Spelled:
    """`length` letters. A token below 20 is one letter; 20 + a stands for a and the letter that must follow it, 3 a % 20.

    `free` letters are free, three follow from the last of them, and so on. The tokenizer of this language takes two
    letters at once.
    """

    def __init__(self, length: int, free: int = 1) -> None:
        self.length = length
        self.free = free
        self.tokens: list[int] = []
        self.chosen = False

    def letters(self) -> list[int]:
        return [letter for token in self.tokens for letter in spell(token)]

    def _follows(self, letters: list[int]) -> int:
        """How many letters have followed the last free one; 0: the next one is free."""
        return max(0, len(letters) % (self.free + 3) - self.free + 1)

    def accept(self, token: int) -> bool:
        letters = self.letters()
        is_last_free = len(letters) % (self.free + 3) == self.free - 1
        if token >= 20 and not is_last_free and not self._follows(letters):
            return False
        for letter in spell(token):
            if len(letters) >= self.length or (self._follows(letters) and letter != 3 * letters[-1] % 20):
                return False
            letters.append(letter)
        self.chosen = is_last_free
        self.tokens.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]
        self.chosen = False

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = 0
        forced = self.forced()
        for token in forced[:1] or range(VOCAB):
            if self.accept(token):
                self.rollback(1)
                out.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))

    @property
    def is_open(self) -> bool:
        return False

    def is_terminated(self) -> bool:
        return len(self.letters()) >= self.length

    def forced(self) -> list[int]:
        letters, out = self.letters(), []
        while self._follows(letters) and len(letters) < self.length:
            letter = 3 * letters[-1] % 20
            pair = self._follows(letters) < 3 and len(letters) + 1 < self.length
            out.append(20 + letter if pair else letter)
            letters += spell(out[-1])
        return out

    def ends_with(self, tokens: Sequence[int]) -> bool:
        return len(self.letters()) + sum(len(spell(token)) for token in tokens) >= self.length

    def respell(self) -> int | None:
        if not self.chosen or self.tokens[-1] >= 20 or len(self.letters()) >= self.length:
            return None
        return 20 + self.tokens[-1]


def spell(token: int) -> list[int]:
    return [token] if token < 20 else [token - 20, 3 * (token - 20) % 20]


class Queue:
    def __init__(self) -> None:
        self.ready: list[Compiled | CompileFailed] = []
        self.looks: list[int] = []
        """How many masks were announced at once."""

    def submit(self, request_id: int, spec: GrammarSpec) -> None:
        self.ready.append(Compiled(request_id, Spelled(*map(int, spec.source.split(",")))))

    def poll(self) -> list[Compiled | CompileFailed]:
        ready, self.ready = self.ready, []
        return ready

    def cancel(self, request_id: int) -> None:
        pass

    def look(self, matchers: Sequence[Matcher]) -> None:
        self.looks.append(len(matchers))


def spelled_alone(client: Client, length: int, limit: int, free: int = 1) -> list[int]:
    """The answer by the book: mask, pick, respell, one token at a time."""
    matcher = Spelled(length, free)
    while len(matcher.tokens) < limit and not matcher.is_terminated():
        mask = np.zeros(-(-VOCAB // 32), np.int32)
        matcher.fill_mask(mask)
        assert matcher.accept(pick(prefix_hash(np.array(client.prompt + matcher.tokens, np.int64)), VOCAB, mask))
        better = matcher.respell()
        if better is not None and len(matcher.tokens) < limit and not matcher.is_terminated():
            matcher.rollback(1)
            assert matcher.accept(better)
    return matcher.tokens


def engine(depth: int, *, drafts: bool = False, **settings: object) -> Sim:
    if drafts:
        settings["drafter"] = HostDrafter(5, 0.9, 1.0)
    sim = Sim(depth=depth, **settings)  # type: ignore[arg-type]
    sim.queues.grammars = Queue()
    return sim


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("length", "limit"), [(3, 40), (30, 40), (31, 40), (60, 9), (40, 1)])
def test_respelled_answers(depth: int, stream: bool, length: int, limit: int, drafts: bool) -> None:
    sim = engine(depth, drafts=drafts)
    free = sim.ask(PROMPT[:7], max_new=25)
    clients = [
        sim.ask([i, *PROMPT], max_new=limit, stream=stream, grammar=GrammarSpec(kind="regex", source=str(length)))
        for i in range(4)
    ]
    sim.run()
    check_answer(sim, free)
    for client in clients:
        assert client.tokens == spelled_alone(client, length, limit)
        assert client.end.completion_tokens == len(client.tokens)
    assert not sim.queues.void
    assert isinstance(sim.queues.grammars, Queue)
    assert limit == 1 or max(sim.queues.grammars.looks) >= 2
    assert any(token >= 20 for client in clients for token in client.tokens)


@pytest.mark.parametrize(("depth", "free"), cover([0, 1, 2], [2, 3, 5]))
def test_a_token_is_respelled_within_a_run_of_accepted_drafts(depth: int, free: int) -> None:
    """What was drawn behind it was drawn for another text: it is dropped, and the row goes on from the better token."""
    sim = engine(depth, drafts=True, num_pages=128, context_length=200)
    source = GrammarSpec(kind="regex", source=f"80,{free}")
    clients = [sim.ask([i, *PROMPT], max_new=70, grammar=source) for i in range(5)]
    sim.run()
    for client in clients:
        assert client.tokens == spelled_alone(client, 80, 70, free)
    assert sim.queues.counters.accepted_tokens > 0
    again = sim.ask([*clients[0].prompt, *clients[0].tokens, 1], max_new=8)
    sim.run()
    check_answer(sim, again)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pages", [16, 19, 22])
def test_respelling_survives_retraction(depth: int, pages: int, drafts: bool) -> None:
    sim = engine(depth, drafts=drafts, num_pages=pages, page_size=4, conservativeness=0.0)
    clients = [sim.ask([i, *PROMPT[:8]], max_new=32, grammar=GrammarSpec(kind="regex", source="60")) for i in range(4)]
    sim.run()
    assert sum(client.end.retractions for client in clients) > 0
    for client in clients:
        assert client.tokens == spelled_alone(client, 60, 32)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("moment", ["fail_launch", "fail_wait"])
def test_respelling_survives_running_out_of_device_memory(depth: int, moment: str, drafts: bool) -> None:
    for at in range(2, 14):
        sim = engine(
            depth, drafts=drafts, **{moment: lambda step, at=at: MemoryError("no") if step.index == at else None}
        )
        client = sim.ask(PROMPT, max_new=24, grammar=GrammarSpec(kind="regex", source="40"))
        sim.run()
        assert client.tokens == spelled_alone(client, 40, 24)


def test_a_result_that_is_dropped_anyway_cannot_fail_its_request() -> None:
    """A step that had begun with a token which was respelled since computes something that is not read, usable or not."""
    sim = engine(1)
    clients = [sim.ask([i, *PROMPT], max_new=30, grammar=GrammarSpec(kind="regex", source="48")) for i in range(3)]
    waited, spoiled = sim.runner.waited, []

    def spoil(launched: OracleLaunched) -> Outcome:
        outcome, step = waited(launched), launched.step
        for row, slot in enumerate(step.slots.tolist()):
            if sim.queues.is_void(slot, step.index):
                outcome.failed[row] = "the logits are not finite"
                spoiled.append(row)
        return outcome

    sim.runner.waited = spoil  # type: ignore[method-assign]
    sim.run()
    assert spoiled
    for client in clients:
        assert client.end.reason == "stop"
        assert client.tokens == spelled_alone(client, 48, 30)


def test_what_a_respelled_answer_leaves_in_the_cache_is_right() -> None:
    """A second request with the first one's answer as its prompt hits the cache and says what it would say without."""
    sim = engine(1, page_size=4)
    first = sim.ask(PROMPT, max_new=30, grammar=GrammarSpec(kind="regex", source="48"))
    sim.run()
    second = sim.ask([*PROMPT, *first.tokens, 1, 2, 3], max_new=8)
    sim.run()
    assert second.end.cached_tokens >= len(PROMPT) + len(first.tokens) - 8
    check_answer(sim, second)


def test_certain_tokens_cost_no_step_without_overlap_and_one_with() -> None:
    def steps(depth: int, *, logprobs: LogprobSpec | None = None) -> tuple[int, int]:
        sim = engine(depth)
        client = sim.ask(PROMPT, max_new=80, logprobs=logprobs, grammar=GrammarSpec(kind="regex", source="80"))
        sim.run()
        return sim.queues.counters.steps, len(client.tokens)

    assert steps(0) == (21, 40)  # the last token of all is sampled
    assert steps(1)[0] <= 41
    without, tokens = steps(0, logprobs=LogprobSpec())
    assert without == tokens
    assert without > 1.9 * steps(0)[0]


def test_a_grammar_that_is_cut_is_counted_and_said() -> None:
    sim = engine(1)
    cut = sim.ask(PROMPT, max_new=5, grammar=GrammarSpec(kind="regex", source="60"))
    whole = sim.ask(PROMPT, max_new=60, grammar=GrammarSpec(kind="regex", source="12"))
    free = sim.ask(PROMPT, max_new=5)
    sim.run()
    assert (cut.end.reason, whole.end.reason, free.end.reason) == ("length", "stop", "length")
    assert "before its grammar was complete" in cut.end.message
    assert not whole.end.message
    assert not free.end.message
    assert sim.queues.counters.cut_grammars == 1
