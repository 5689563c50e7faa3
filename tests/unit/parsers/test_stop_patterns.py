"""Stop patterns against trying every place of the text with Python's `re`; what they refuse; and how much they may take."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings, strategies as st

from bough.parsers.stop_patterns import MAX_STATES, BadPattern, TooMuchWork, compile_patterns, is_plain

ATOMS = (
    "a", "b", "1", r"\d", r"\w", "[ab]", "[^a]", ".", r"\s", " ", "\n", "(?:a|bc)", "(?P<x>a|)", r"\x61", r"[]a]", r"[\]b]",
    "(?i:A)", "(?s:.)", "(?#note)", r"\.", "é", "(?a:\\w)",
)  # fmt: skip
ANCHORS = (r"\b", r"\B", "^", "(?m:^)", "(?m:$)", r"\A")
REPEATS = ("*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "+?")


@st.composite
def patterns(draw: st.DrawFn, depth: int = 0) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        if depth < 2 and draw(st.integers(0, 4)) == 0:
            part = f"(?:{draw(patterns(depth + 1))}|{draw(patterns(depth + 1))})"
        else:
            part = draw(st.sampled_from([*ATOMS, *ANCHORS]))
        if part not in ANCHORS and draw(st.integers(0, 2)) == 0:
            part = f"(?:{part}){draw(st.sampled_from(REPEATS))}"
        parts.append(part)
    return "".join(parts)


def first_match(pattern: str, text: str) -> tuple[int, int] | None:
    """The match that ends first, and begins furthest to the left: every place is tried. The text that is left decides where
    a match may end, so that anchors see all of it."""
    pattern = re.sub(r"\?P<x>", "?:", pattern)
    for end in range(1, len(text) + 1):
        ending = re.compile(f"(?:{pattern})(?=[\\s\\S]{{{len(text) - end}}}\\Z)")
        for start in range(end):
            if ending.match(text, start):
                return start, end
    return None


@given(patterns(), st.text(alphabet="abcA1_ \né.", max_size=10), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_match_that_ends_first(pattern: str, text: str, pick: random.Random) -> None:
    pattern = pattern.replace("(?P<x>", "(?:", max(0, pattern.count("(?P<x>") - 1))  # a name is given once
    scan, found, at = compile_patterns((pattern,)).scan(), None, 0
    try:
        while at < len(text) and found is None:
            size = pick.randint(1, 4)
            found = scan.feed(text[at : at + size])
            at += size
            assert found is not None or scan.hold_from(1000) <= scan.at
        found = found or scan.finish()
    except TooMuchWork:
        return
    assert (None if found is None else (found.start, found.end)) == first_match(pattern, text)


@given(patterns(), st.text(alphabet="abcA1_ \n", max_size=8), st.text(alphabet="abcA1_ \n", max_size=4))
@settings(max_examples=150)
def test_what_may_be_part_of_a_match_is_held_back(pattern: str, text: str, rest: str) -> None:
    """Whatever follows, no match begins before the place that is held."""
    pattern = pattern.replace("(?P<x>", "(?:")
    scan = compile_patterns((pattern,)).scan()
    try:
        if scan.feed(text) is not None:
            return
        held = scan.hold_from(1000)
        found = scan.feed(rest) or scan.finish()
    except TooMuchWork:
        return
    assert found is None or found.start >= held


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (r"(a)\1", "back reference"),
        (r"(?P<x>a)(?P=x)", "back reference"),
        (r"(a)?(?(1)b|c)", "back reference"),
        (r"(?=a)b", "look-"),
        (r"(?!a)b", "look-"),
        (r"(?<=a)b", "look-"),
        (r"(?<!a)b", "look-"),
        (r"a++b", "possessive"),
        (r"a{2}+b", "possessive"),
        (r"(?>a)b", "atomic"),
        (r"(?x) a b", "flag x"),
        (r"(?x:a b)", "flag x"),
        (r"a{5000}", "too large"),
        (r"(a{100}){100}", f"{MAX_STATES}"),
        ("(" * 70 + "a" + ")" * 70, "nested"),
        (r"(a", "unterminated"),
        (r"a)", "parenthesis"),
        (r"[a", "unterminated"),
        (r"*a", "nothing to repeat"),
        (r"\p{L}", "bad escape"),
    ],
)
def test_what_no_automaton_follows_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(BadPattern, match=re.escape(says)):
        compile_patterns((pattern,))


def test_flags_and_braces() -> None:
    for pattern, text, found in (
        ("(?i)end|stop", "The STOP", (4, 8)),
        ("(?s)a.b", "xa\nb", (1, 4)),
        ("(?m)^b$", "a\nb\nc", (2, 3)),
        (r"a{,}b{x}", "aab{x}", (0, 6)),
        (r"x{1,3}y", "xxxxy", (1, 5)),
        (r"\N{BULLET}\u0041\101\07", "•AA\a", (0, 4)),
    ):
        scan = compile_patterns((pattern,)).scan()
        match = scan.feed(text) or scan.finish()
        assert match is not None, pattern
        assert (match.start, match.end) == found, pattern


def test_work_is_bounded_by_the_turn() -> None:
    """All texts that are watched for the same patterns share what a turn may take."""
    wide = compile_patterns((r"[ab]{0,100}c",))
    scans = [wide.scan() for _ in range(64)]
    for scan in scans[:8]:
        assert scan.feed("ab") is None
    with pytest.raises(TooMuchWork):
        scans[8].feed("ab" * 200)
    wide.begin_turn(1)
    assert scans[0].feed("a") is None
    narrow = compile_patterns((r"a.*b", r"END\d", r"\bstop\b"))
    scan = narrow.scan()
    for _ in range(200):
        assert scan.feed("a long text without the letter that ends it. " * 20) is None
        scan.hold_from(4096)


def test_plain_text() -> None:
    assert is_plain("END of it, 5-6")
    assert not any(is_plain(each) for each in (r"\n", "a.", "[a]", "a|b", "(a)", "^a", "a$", "a*", "a+", "a?", "{1}"))
