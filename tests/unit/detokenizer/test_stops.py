"""Stop strings and patterns, against searching the whole text."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings, strategies as st

from bough.core.errors import InvalidRequest
from bough.detokenizer.stops import StopPatterns, Stops, StopStrings

AB = st.text(alphabet="ab\n", max_size=30)
WORDS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def by_hand(text: str, words: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [word for word in words if text[:end].endswith(word)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def withheld(text: str, words: list[str]) -> int:
    """Length of the longest end of the text that could begin a stop string."""
    return max(
        (k for word in words for k in range(1, min(len(word) - 1, len(text)) + 1) if text.endswith(word[:k])), default=0
    )


@given(AB, WORDS, st.lists(st.integers(0, 30), max_size=6))
@settings(max_examples=150)
def test_strings_are_found_wherever_the_text_is_cut(text: str, words: list[str], places: list[int]) -> None:
    scan, said, seen, matched = StopStrings(tuple(words)), "", "", None
    for piece in cut(text, places):
        found = scan.feed(piece)
        said, seen = said + found.text, seen + piece
        if found.matched is not None:
            matched = found.matched
            break
        assert said == seen[: len(seen) - withheld(seen, words)], "exactly what may begin a stop is held back"
    else:
        said += scan.finish()
    assert (said, matched) == by_hand(text, words)


@given(AB, WORDS, st.lists(st.integers(0, 30), max_size=6))
def test_the_match_can_be_kept(text: str, words: list[str], places: list[int]) -> None:
    scan, said, matched = StopStrings(tuple(words), keep_match=True), "", None
    for piece in cut(text, places):
        found = scan.feed(piece)
        said += found.text
        if found.matched is not None:
            matched = found.matched
            break
    else:
        said += scan.finish()
    expected, word = by_hand(text, words)
    assert matched == word
    assert said == expected + (word or "")


def test_hostile_strings_cost_linear_time() -> None:
    words = tuple("a" * length + "b" for length in range(200, 232))
    scan = StopStrings(words)
    started = time.process_time()
    for _ in range(20_000):
        assert scan.feed("aaaa").matched is None
    assert time.process_time() - started < 5


@given(st.text(alphabet="abc12 ", max_size=25), st.lists(st.integers(0, 25), max_size=5))
@settings(max_examples=100)
@pytest.mark.parametrize("pattern", [r"\d+c", r"a+b", r"[ab]{3}c", r"2{2,}", r"^a\d", r"\b1a"])
def test_patterns_end_the_text_where_searching_does(pattern: str, text: str, places: list[int]) -> None:
    """After each piece, the verdict is that of a plain search over all text so far."""
    scan, said, seen = StopPatterns((pattern,)), "", ""
    for piece in cut(text, places):
        seen += piece
        found = scan.feed(piece)
        said += found.text
        expected = re.search(pattern, seen)
        if expected is not None:
            assert found.matched == pattern
            assert said == seen[: expected.start()]
            return
        assert found.matched is None
        assert seen.startswith(said)
    assert said + scan.finish().text == text


def test_a_pattern_holds_back_only_what_may_match() -> None:
    scan = StopPatterns((r"END\d",))
    assert scan.feed("some text EN").text == "some text "
    assert scan.feed("D").text == ""
    assert scan.feed("x").text == "ENDx"
    assert scan.feed("END7").matched == r"END\d"


def test_a_pattern_that_could_always_match_does_not_hold_everything() -> None:
    scan = StopPatterns((r"a.*b",))
    said = "".join(scan.feed("a" + "x" * 99).text for _ in range(200))
    assert len(said) > 10_000


def test_a_pattern_that_matches_nothing_does_not_end() -> None:
    assert StopPatterns((r"x*",)).feed("abc") == ("abc", None)


def test_runaway_patterns_are_no_problem_and_very_wide_ones_are_stopped() -> None:
    scan = StopPatterns((r"(a|aa)+(\d|[xy])",))
    assert scan.feed("a" * 5000).matched is None
    assert scan.feed("x").matched is not None
    scan = StopPatterns((r"[ab]{0,300}c",))
    with pytest.raises(InvalidRequest, match="too long"):
        scan.feed("abab" * 100)


def test_anchors_at_the_end_wait_for_what_follows() -> None:
    scan = StopPatterns((r"\bcab\b",))
    assert scan.feed("a cab") == ("a ", None)
    assert scan.feed("s cab") == ("cabs ", None)
    assert scan.feed(".") == ("", r"\bcab\b")
    scan = StopPatterns((r"\bcab\b",))
    assert scan.feed("a cab") == ("a ", None)
    assert scan.finish() == ("", r"\bcab\b")
    stops = Stops(("STOP",), (r"end$",))
    assert stops.feed("the end") == ("the ", None)
    assert stops.finish() == ("", r"end$")


def test_strings_and_patterns_together() -> None:
    stops = Stops(("STOP",), (r"\d{3}",))
    assert stops.feed("abc ST") == ("abc ", None)
    assert stops.feed("x 12") == ("STx ", None)
    assert stops.feed("3") == ("", r"\d{3}")
    stops = Stops(("STOP",), (r"\d{3}",))
    assert stops.feed("a1STOPb") == ("a1", "STOP")
    stops = Stops(("STOP",), (r"T\d",))
    assert stops.feed("aST") == ("a", None)
    assert stops.finish() == ("ST", None)


@given(st.text(alphabet="abc12 ", max_size=25), st.integers(1, 3), st.booleans())
@settings(max_examples=150)
@pytest.mark.parametrize("pattern", [r"\d+c", r"a+b", r"[ab]{3}c", r"[a1]", r"\bcab"])
@pytest.mark.parametrize("words", [("abc",), ("b1", "c 2"), ("aa1", "1")])
def test_whichever_is_complete_first_ends_the_text(
    words: tuple[str, ...], pattern: str, text: str, size: int, keep: bool
) -> None:
    """Neither waits for text that the other holds back: the verdict falls in the piece that completes the stop."""
    stops, said, seen = Stops(words, (pattern,), keep_match=keep), "", ""
    for piece in (text[at : at + size] for at in range(0, len(text), size)):
        seen += piece
        found = stops.feed(piece)
        said += found.text
        ends = [(at + len(word), at, word) for word in words if (at := seen.find(word)) >= 0]
        match = re.search(pattern, seen)
        if match is not None:
            ends.append((match.end(), match.start(), pattern))
        if ends:
            end, start, name = min(ends)
            assert found.matched == name
            assert said == seen[: end if keep else start]
            return
        assert found.matched is None
        assert seen.startswith(said)
    assert said + stops.finish().text == text


def test_a_plain_pattern_counts_as_a_string() -> None:
    stops = Stops((), ("END",))
    assert stops.feed("xEN") == ("x", None)
    assert stops.feed("D") == ("", "END")
