"""Suffix decoding against counts made the long way: every occurrence of every suffix, looked at one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bough.speculative.host import HostDrafter
from bough.speculative.suffix import SuffixGuesser
from tests.sim.harness import VOCAB, Sim, check_answer


def guesser(**changed: float) -> SuffixGuesser:
    given: dict[str, float] = {
        "most": 6,
        "most_match": 8,
        "factor": 1.0,
        "least_likely": 0.1,
        "capacity_tokens": 10_000,
    }
    return SuffixGuesser(**(given | changed))  # type: ignore[arg-type]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def by_hand(text: list[int], most: int, most_match: int, factor: float, least: float) -> float:
    """The best score over all lengths of the match, with every occurrence found by comparing tokens."""
    best = 0.0
    for length in range(1, min(most_match, len(text) - 1) + 1):
        suffix = text[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        path: list[int] = []
        chance, score = 1.0, 0.0
        while ends and len(path) < min(most, max(1, int(factor * length))):
            repeated = [text[end:] * (most + 1) for end in ends]  # a text goes on as it did from there
            alive = [each for each in repeated if each[: len(path)] == path]
            counts: dict[int, int] = {}
            for each in alive:
                counts[each[len(path)]] = counts.get(each[len(path)], 0) + 1
            token = min(counts, key=lambda t: (-counts[t], t))
            chance *= counts[token] / len(alive)
            if chance < least:
                break
            path.append(token)
            score += chance
        best = max(best, score)
    return best


@pytest.mark.parametrize("vocabulary", [2, 4, 12])
def test_the_continuation_that_saves_most_is_taken(vocabulary: int) -> None:
    rng = random.Random(vocabulary)
    for _ in range(60):
        text = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 40))]
        made = guesser()
        found = max(
            (made._continue(pieces, length).score for length, pieces in made._own(np.array(text, np.int32))),
            default=0.0,
        )
        assert found == pytest.approx(by_hand(text, 6, 8, 1.0, 0.1))
        guessed = made.guess(np.array(text, np.int32), "").tokens
        assert (len(guessed) > 0) == (found > 0)


def test_what_followed_most_often_is_drafted() -> None:
    text = ids(1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 7, 0, 5, 1, 2)
    assert guesser().guess(text, "").tokens.tolist()[:1] == [7]
    assert guesser(least_likely=0.9).guess(text, "").tokens.tolist() == []


def test_the_match_bounds_the_draft() -> None:
    text = ids(*range(20), *range(3))
    assert guesser().guess(text, "").tokens.tolist() == [3, 4, 5]
    assert guesser(factor=2.0).guess(text, "").tokens.tolist() == [3, 4, 5, 6, 7, 8]
    assert guesser(factor=0.1).guess(text, "").tokens.tolist() == [3]


def test_served_texts_count_in_their_namespace_only() -> None:
    made = guesser()
    for last in (30, 30, 31):
        made.add(ids(9, 8, 7, 6, 5, last, 40, 41), 0, "a")
    text = ids(50, 8, 7, 6, 5)
    guess = made.guess(text, "a")
    assert guess.tokens.tolist()[:1] == [30]
    assert made.guess(text, "b").tokens.tolist() == []
    assert guess.kind >= 5


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_the_same_with_it(depth: int) -> None:
    drafter = HostDrafter(guesser(factor=2.0, least_likely=0.0), 8, overlaps=depth > 0, adaptive=False)
    sim = Sim(depth=depth, drafter=drafter, num_pages=200, context_length=200)
    for first in range(0, 6, 2):
        clients = [sim.ask([first + i, *[(7 * j + 3) % VOCAB for j in range(20)]], max_new=40) for i in range(2)]
        sim.run()
        for client in clients:
            check_answer(sim, client)
    again = sim.ask([0, *[(7 * j + 3) % VOCAB for j in range(20)]], max_new=40)
    sim.run()
    check_answer(sim, again)
    assert again.end.accepted_tokens > 20, "it was served before"
