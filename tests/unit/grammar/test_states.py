"""Places in grammars: texts that leave the same over share one, and what is seen from it is what a backend sees there."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.core.sampling import GrammarKind
from bough.grammar import Vocabulary
from bough.grammar.bits import bits
from bough.grammar.matcher import TokenMatcher, prepare
from bough.grammar.sights import Sights
from bough.grammar.sources import grammar_of
from bough.grammar.states import LOST, States, states_of
from tests.covers import cover
from tests.unit.grammar.conftest import BACKENDS, backend_of, compiled
from tests.unit.grammar.random_texts import Sampler

SCHEMAS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text())
BOUNDED = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 40}}


def states(kind: GrammarKind, source: str, longest: int = 32) -> States:
    made = states_of(grammar_of(kind, source, 8), longest)
    assert made is not None
    return made


def places(made: States, text: str, cut: int = 1) -> Iterator[int]:
    data, place = text.encode(), made.start
    yield place
    for at in range(0, len(data), cut):
        place = made.after(place, data[at : at + cut])
        yield place


def end(made: States, text: str, cut: int = 1) -> int:
    return list(places(made, text, cut))[-1]


def test_what_is_left_over_names_the_place() -> None:
    made = states("regex", "(?:ab|cd)*[xy]{2}!")
    assert end(made, "ab") == end(made, "cdab") == made.after(made.start, b"")
    assert end(made, "abx") == end(made, "y")
    assert len({end(made, text) for text in ("", "a", "x", "xx", "xx!")}) == 5
    assert end(made, "b") == end(made, "xx!!") == LOST


def test_it_does_not_matter_how_a_text_is_cut() -> None:
    made = states("json_schema", json.dumps(BOUNDED))
    text = '["zoë ß €", "\\u00e9\\n日本"]'
    assert {end(made, text, cut) for cut in (1, 2, 3, 5, 100)} == {end(made, text)}
    within = list(places(made, '["é'))
    assert len(set(within)) == len(within)
    assert made.view(within[-2]) != made.view(within[-1])
    assert made.after(within[-2], b"x") == LOST


def test_counts_that_no_token_reaches_look_alike() -> None:
    made = states("regex", "[a-z]{0,1000}", longest=10)
    views = [made.view(place) for place in places(made, "a" * 1000)]
    assert len(set(views[:989])) == 1
    assert len(set(views[989:])) == 12
    made = states("regex", "[a-z]{50}", longest=10)
    views = [made.view(place) for place in places(made, "a" * 50)]
    assert len(set(views[:40])) == 1
    assert len(set(views[39:])) == 12


def test_rules_that_begin_with_themselves_have_no_places() -> None:
    assert states_of(grammar_of("ebnf", 'root ::= more "a" | "b"\nmore ::= root?\n', 8), 32) is None
    assert states_of(grammar_of("ebnf", 'root ::= "b" root | "a"', 8), 32) is not None


AMBIGUOUS = "(?:(?:a{0,30}b?){0,30}a?){0,30}"


@pytest.mark.parametrize(
    ("pattern", "text", "named"),
    [
        (AMBIGUOUS, "ab" * 200, False),
        ("(?:a|ab|abc|b|bc|c|ca){0,300}", "abc" * 200, False),
        ("[ab]*x", "ab" * 5000, True),
    ],
)
def test_places_that_cost_too_much_stay_without_a_name(pattern: str, text: str, named: bool) -> None:
    made = states("regex", pattern)
    began = time.process_time()
    found = [made.after(made.start, text[:at].encode()) for at in range(0, len(text), len(text) // 20)]
    assert time.process_time() - began < 5.0
    assert made.num_bytes < 20 * 2**20
    assert (LOST not in found) == named


def test_every_text_of_a_grammar_has_places() -> None:
    """Random texts of 60 grammars, derived independently of the places, never leave the grammar."""
    rng = random.Random(5)
    for case in SCHEMAS[::4]:
        grammar = grammar_of("json_schema", json.dumps(case["schema"]), 8)
        made = states_of(grammar, 32)
        assert made is not None
        for _ in range(4):
            text = Sampler(grammar, rng).text()
            assert LOST not in places(made, text), (case["name"], text)


def shown(matcher: TokenMatcher) -> list[int]:
    mask = np.empty(1536, np.int32)
    matcher.fill_mask(mask)
    return bits(mask)


WALKED = [json.dumps(case["schema"]) for case in SCHEMAS[::9]] + [json.dumps(BOUNDED)]


@pytest.mark.parametrize(("source", "backend"), cover({str(at): each for at, each in enumerate(WALKED)}, BACKENDS))
def test_what_others_saw_is_what_is_seen(source: str, backend: str, vocabulary: Vocabulary) -> None:
    """Matchers that share what they see go random ways, back now and then, beside matchers that look for themselves."""
    pytest.importorskip(backend)
    rng = random.Random(source)
    automaton = compiled(backend, "json_schema", source)
    made = backend_of(backend)
    tree = made.tree("json_schema", source, made.translate("json_schema", source))
    shared = states_of(tree, vocabulary.longest) if tree is not None else None
    sights = Sights()
    for _ in range(3):
        pairs = [
            (
                TokenMatcher(automaton.matcher(), vocabulary),
                TokenMatcher(automaton.matcher(), vocabulary, shared, sights),
            )
            for _ in range(2)
        ]
        for _ in range(24):
            prepare([sharing for _, sharing in pairs], made)
            for alone, sharing in pairs:
                allowed = shown(sharing)
                assert allowed == shown(alone)
                assert sharing.forced() == alone.forced()
                assert sharing.is_terminated() == alone.is_terminated()
                token = rng.choice(allowed) if allowed and not alone.is_terminated() else vocabulary.tokens.stop_ids[0]
                assert sharing.accept(token) == alone.accept(token)
                assert sharing.respell() == alone.respell()
                back = rng.randrange(3) if rng.random() < 0.1 else 0
                for each in (alone, sharing):
                    each.rollback(min(back, len(each.tokens)))
            pairs = [pair for pair in pairs if not pair[0].is_terminated()]
            if not pairs:
                break


def test_a_place_is_looked_at_once(vocabulary: Vocabulary) -> None:
    source = json.dumps(BOUNDED)
    shared, sights = states("json_schema", source, vocabulary.longest), Sights()
    matchers = []
    for _ in range(3):
        matchers.append(
            TokenMatcher(compiled("llguidance", "json_schema", source).matcher(), vocabulary, shared, sights)
        )
        assert matchers[-1].accept(vocabulary.cut("[")[0])
    assert all(each.needs_sight for each in matchers)
    prepare(matchers, backend_of("llguidance"))
    assert len({id(each.find_sight()) for each in matchers}) == 1
    fresh = TokenMatcher(compiled("llguidance", "json_schema", source).matcher(), vocabulary, shared, sights)
    assert fresh.needs_sight
    assert fresh.accept(vocabulary.cut("[")[0])
    assert not fresh.needs_sight
