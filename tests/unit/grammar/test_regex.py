"""Patterns: parsed, written out again and compared with Python's own engine; formats against their own readers."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import string
import urllib.parse

import pytest
from hypothesis import given, settings, strategies as st

from bough.grammar.errors import BadGrammar
from bough.grammar.formats import FORMATS
from bough.grammar.notation import to_regex
from bough.grammar.regex import in_json, parse_regex, parse_search
from bough.grammar.rules import Grammar, chars, repeat
from tests.unit.grammar.random_texts import Sampler

ATOMS = st.sampled_from(
    ["a", "b", "ab", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\.", "(?:a|b)", "(ab|c)", "[a-c1]", "x?"]
)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        atom = draw(ATOMS)
        quantifier = draw(st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"]))
        parts.append(f"(?:{atom}){quantifier}" if len(atom) > 1 and quantifier else atom + quantifier)
    whole = "".join(parts)
    other = draw(st.sampled_from(["", "|b+", "|(a|c)b"]))
    return whole + other


@settings(max_examples=200, deadline=None)
@given(patterns(), st.lists(st.text("abc1 .x", max_size=6), max_size=12))
def test_same_language_as_python(pattern: str, texts: list[str]) -> None:
    ours, theirs = re.compile(to_regex(parse_regex(pattern))), re.compile(pattern, re.ASCII)
    for text in texts:
        assert bool(ours.fullmatch(text)) == bool(theirs.fullmatch(text)), (pattern, text)


@settings(max_examples=200, deadline=None)
@given(patterns(), st.booleans(), st.booleans(), st.lists(st.text("abc1 .x", max_size=6), max_size=12))
def test_searching_like_python(pattern: str, front: bool, back: bool, texts: list[str]) -> None:
    pattern = f"{'^' if front else ''}(?:{pattern}){'$' if back else ''}"
    any_text = repeat(chars(((0, 0x10FFFF),)), 0, None)
    ours, theirs = re.compile(to_regex(parse_search(pattern, any_text))), re.compile(pattern, re.ASCII)
    for text in texts:
        assert bool(ours.fullmatch(text)) == bool(theirs.search(text)), (pattern, text)


@settings(max_examples=100, deadline=None)
@given(patterns(), st.randoms(use_true_random=False))
def test_inside_json_strings(pattern: str, rng: random.Random) -> None:
    node = in_json(parse_regex(pattern + r'["\\\n]?'))
    text = Sampler(Grammar({"root": node}), rng).text()
    assert re.fullmatch(pattern + r'["\\\n]?', json.loads(f'"{text}"'), re.ASCII)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", r"(?P<x>a)(?P=x)", r"a\b", r"\Ba", "a++", "(?>a)", "(?i)a",
        "(", ")", "[a", "[", "a{3,2}", "*a", "|*", "[z-a]", "\\", "a^b", "a$b", r"\xZZ", r"\u{110000}", r"\p{Nope}",
        "a{99999999}", "a**", "(?#c)a", "[[:alpha:]]", r"\q", "(" * 100 + ")" * 100, "[^\\x00-\\U0010ffff]",
    ],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(BadGrammar):
        parse_regex(pattern)


def test_the_place_of_a_mistake_is_named() -> None:
    with pytest.raises(BadGrammar, match=r"look-ahead .*\(character 6\)"):
        parse_regex("abc(?=d)")


def test_unicode_properties() -> None:
    ours = re.compile(to_regex(parse_regex(r"\p{Lu}\p{L}*[\p{Nd}_]\P{L}")))
    assert ours.fullmatch("Éclair٣!")
    assert not ours.fullmatch("éclair3!")


READERS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_are_what_they_say(name: str) -> None:
    node = parse_search(FORMATS[name], repeat(chars(((0, 0x10FFFF),)), 0, None))
    sampler = Sampler(Grammar({"root": node}), random.Random(name))
    for _ in range(200):
        text = sampler.text()
        if name in READERS:
            READERS[name](text)
        if name == "uri":
            parts = urllib.parse.urlsplit(text)
            assert parts.scheme in ("http", "https", "ftp")
            assert parts.hostname
        if name in ("email", "hostname", "uri"):
            assert set(text) <= set(string.ascii_letters + string.digits + string.punctuation)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "24-1-1", "0000-01-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+02:00"], ["24:00:00Z", "12:00"]),
        ("duration", ["P1Y2M3D", "PT5M", "P4W", "P1DT12H"], ["P", "PT", "5M"]),
        ("email", ["a.b+c@example.co.uk"], ["a@b", "@x.y", "a..b@c.de"]),
        ("hostname", ["a", "x-1.example.org"], ["-a", "a..b", "a_b"]),
        ("ipv6", ["::", "::1", "2001::ff00:42:8329", "1:2:3:4:5:6:7:8"], ["1:2:3", ":::"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("json-pointer", ["", "/a~1b/0"], ["a", "/~2"]),
    ],
)
def test_formats_in_and_out(name: str, good: list[str], bad: list[str]) -> None:
    ours = re.compile(to_regex(parse_search(FORMATS[name], repeat(chars(((0, 0x10FFFF),)), 0, None))))
    assert [text for text in good if not ours.fullmatch(text)] == []
    assert [text for text in bad if ours.fullmatch(text)] == []
