"""Earlier places of a text against a search written out; and what is found in texts that were served before."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.messages import Corpus, pack_ids
from bough.speculative import store
from bough.speculative.corpora import Corpora
from bough.speculative.matching import earlier, following
from bough.speculative.ngram import NgramGuesser
from bough.speculative.store import GRAM, ServedTexts, TokenStore


def text_of(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def agree(text: list[int], end: int, suffix: list[int], most: int) -> int:
    count = 0
    while count < min(most, end, len(suffix)) and text[end - 1 - count] == suffix[len(suffix) - 1 - count]:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(30))
def test_the_places_that_agree_in_most_tokens(seed: int):
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, rng.integers(1, 60)).astype(np.int32)
    most = int(rng.integers(1, 9))
    found = earlier(text, most)
    counts = {end: agree(text.tolist(), end, text.tolist(), most) for end in range(1, len(text))}
    best = max(counts.values(), default=0)
    assert found.length == best
    assert found.ends.tolist() == [end for end, count in counts.items() if count == best and best > 0]


def test_a_text_that_ends_goes_on_repeating_itself():
    assert following(text_of(1, 2, 3, 4, 5), 1, 3).tolist() == [2, 3, 4]
    assert following(text_of(1, 2, 3, 4, 5), 3, 7).tolist() == [4, 5, 4, 5, 4, 5, 4]


@pytest.mark.parametrize("seed", range(12))
def test_a_store_finds_what_a_search_through_all_of_it_finds(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "YOUNG_TOKENS", 40)
    monkeypatch.setattr(store, "SEGMENT_TOKENS", 150)
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 4, rng.integers(1, 70)).astype(np.int32) for _ in range(20)]
    kept = TokenStore()
    for text in texts:
        kept.add(text)
    assert len(kept.segments) > 1
    assert kept.num_tokens == sum(len(text) + 1 for text in texts)
    for _ in range(20):
        suffix = rng.integers(0, 4, 9).astype(np.int32)
        found = {}
        for text, places in kept.find(suffix, 9):
            for end in places.ends.tolist():
                assert agree(text.tolist(), end, suffix.tolist(), 9) == places.length >= GRAM
                assert text[end] != store.BORDER
                found[places.length] = found.get(places.length, 0) + 1
        longest = max(
            (agree(t.tolist(), end, suffix.tolist(), 9) for t in texts for end in range(1, len(t))), default=0
        )
        assert max(found, default=0) == (longest if longest >= GRAM else 0)


def test_namespaces_do_not_see_each_other_and_the_oldest_text_goes_first():
    served = ServedTexts(capacity_tokens=100)
    served.add("mine", np.arange(40, dtype=np.int32))
    served.add("yours", np.arange(100, 140, dtype=np.int32))
    mine, yours = served.of("mine"), served.of("yours")
    assert mine is not None
    assert yours is not None
    assert list(mine.find(text_of(5, 6, 7), 8))
    assert not list(mine.find(text_of(105, 106, 107), 8))
    served.add("yours", np.arange(200, 240, dtype=np.int32))
    assert served.of("mine") is None
    assert served.of("nobody's") is None


def test_guesses_follow_the_longest_match_and_of_several_the_newest():
    guesser = NgramGuesser(most=3, least_match=2, most_match=8, capacity_tokens=1000)
    text = text_of(1, 2, 3, 70, 71, 72, 1, 2, 3, 80, 81, 82, 9, 2, 3, 90, 91, 92, 1, 2, 3)
    assert guesser.guess(text, "").tokens.tolist() == [80, 81, 82]
    assert not len(guesser.guess(text_of(1, 2, 3, 4), "").tokens)
    assert not len(guesser.guess(text_of(5, 2, 3, 2), "").tokens), "one token is not enough"
    longer, shorter = guesser.guess(text, ""), guesser.guess(text[:15], "")
    assert longer.kind > shorter.kind


def test_what_others_were_told_is_used_where_the_text_itself_says_nothing():
    guesser = NgramGuesser(most=4, least_match=1, most_match=8, capacity_tokens=1000, corpora=Corpora(1000))
    guesser.add(np.arange(30, dtype=np.int32), 10, "a")
    text = text_of(50, 51, 20, 21, 22)
    assert guesser.guess(text, "a").tokens.tolist() == [23, 24, 25, 26]
    assert not len(guesser.guess(text, "b").tokens)
    assert guesser.guess(text_of(50, 27, 28, 29), "a").tokens.tolist() == [], "nothing followed"
    guesser.corpora.handle(Corpus(call=1, action="add", corpus_id="manual", tokens=pack_ids(range(300, 330))))
    assert guesser.guess(text_of(7, 310, 311, 312), "b").tokens.tolist() == [313, 314, 315, 316]
