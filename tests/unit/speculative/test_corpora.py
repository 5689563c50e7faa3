"""Corpora: what they are looked up for, their bounds, and texts that come in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.core.errors import InvalidRequest
from bough.core.messages import Corpus, pack_ids
from bough.speculative.corpora import Corpora
from bough.speculative.ngram import NgramGuesser

TEXT = list(range(100, 130))


def call(corpora: Corpora, action: Any, name: str = "", tokens: list[int] | None = None, **parts: bool) -> Any:
    return corpora.handle(Corpus(call=1, action=action, corpus_id=name, tokens=pack_ids(tokens or []), **parts))


def guess(corpora: Corpora, text: list[int]) -> list[int]:
    guesser = NgramGuesser(most=4, least_match=1, most_match=8, capacity_tokens=0, corpora=corpora)
    return guesser.guess(np.array(text, np.int32), "a tenant").tokens.tolist()


def test_a_corpus_is_drafted_from_until_it_is_removed() -> None:
    corpora = Corpora(1000)
    assert guess(corpora, [5, *TEXT[3:7]]) == []
    call(corpora, "add", "a", TEXT)
    assert guess(corpora, [5, *TEXT[3:7]]) == TEXT[7:11]
    assert call(corpora, "list") == {"corpora": [["a", len(TEXT) + 1]]}
    call(corpora, "remove", "a")
    assert guess(corpora, [5, *TEXT[3:7]]) == []
    assert call(corpora, "list") == {"corpora": []}


def test_a_draft_ends_with_its_text() -> None:
    corpora = Corpora(1000)
    call(corpora, "add", "a", [*TEXT[:8], -1, *TEXT[20:]])
    assert guess(corpora, TEXT[2:6]) == TEXT[6:8]


def test_parts_count_when_the_last_is_there() -> None:
    corpora = Corpora(1000)
    call(corpora, "add", "a", TEXT[10:], goes_on=True)
    call(corpora, "add", "a", TEXT[:15], goes_on=True)  # the client began again
    assert guess(corpora, TEXT[2:6]) == []
    assert call(corpora, "add", "a", TEXT[15:], is_first=False) == {"corpora": [["a", len(TEXT) + 2]]}
    assert guess(corpora, TEXT[2:6]) == TEXT[6:10]
    assert guess(corpora, TEXT[12:15]) == []


def test_what_can_not_be_added_or_removed() -> None:
    corpora = Corpora(50)
    call(corpora, "add", "a", TEXT)
    with pytest.raises(InvalidRequest, match="already"):
        call(corpora, "add", "a", TEXT)
    with pytest.raises(InvalidRequest, match="too large"):
        call(corpora, "add", "b", TEXT)
    with pytest.raises(InvalidRequest, match="no corpus 'c'"):
        call(corpora, "remove", "c")
    assert call(corpora, "list") == {"corpora": [["a", len(TEXT) + 1]]}
