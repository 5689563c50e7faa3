"""Two grammar engines behind one door: which of them gets what, and that nobody can tell."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import pytest

from bough.core.sampling import GrammarKind
from bough.grammar import Vocabulary
from bough.grammar.backend import GrammarBackend
from bough.grammar.bits import bits
from bough.grammar.matcher import TokenMatcher, prepare
from bough.tokenizer import Tokenizer
from tests.unit.grammar.conftest import backend_of, compiled
from tests.unit.grammar.test_matcher import raw

pytest.importorskip("llguidance")

BOUNDED = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 40}}, "required": ["a"]}
FREE = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FEW = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}, "required": ["a"]}


def tag(content: dict[str, Any], kind: str = "tag") -> str:
    inner = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    if kind == "repeat":
        inner = {"type": "repeat", "content": inner, "min": 1, "max": 2}
    return json.dumps({"type": "structural_tag", "format": inner})


CASES: list[tuple[GrammarKind, str, str]] = [
    ("json_schema", json.dumps(FREE), "ebnf"),
    ("json_schema", json.dumps(FEW), "ebnf"),
    ("json_schema", json.dumps(BOUNDED), "lark"),
    ("json_schema", json.dumps({"type": "string", "minLength": 30}), "lark"),
    ("regex", "[a-z]{0,100}", "ebnf"),
    ("regex", ".{0,100}!", "lark"),
    ("structural_tag", tag({"type": "json_schema", "json_schema": FREE}), "tag"),
    ("structural_tag", tag({"type": "json_schema", "json_schema": BOUNDED}), "lark"),
    ("structural_tag", tag({"type": "regex", "pattern": ".{30}"}), "lark"),
    ("structural_tag", tag({"type": "json_schema", "json_schema": BOUNDED}, "repeat"), "tag"),
]


@pytest.mark.parametrize(("kind", "source", "form"), CASES)
def test_what_counts_characters_goes_to_the_one_that_counts(kind: GrammarKind, source: str, form: str) -> None:
    backend = backend_of("auto")
    program = backend.translate(kind, source)
    assert program.form == form
    assert backend.compile(program).matcher().is_complete() in (True, False)


def test_without_the_second_the_first_does_everything(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    from bough.grammar.both_backends import BothBackends

    monkeypatch.setitem(sys.modules, "bough.grammar.llguidance_backend", None)
    backend: GrammarBackend = BothBackends(vocabulary.tokens, 8)
    program = backend.translate("json_schema", json.dumps(BOUNDED))
    assert program.form == "ebnf"
    assert not backend.compile(program).matcher().is_complete()


def test_masks_of_both_at_once(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    """Rows of a step come in any order, and each gets its own mask."""
    schemas = [FREE, BOUNDED, FREE, BOUNDED, FEW]
    texts = ['{"a": "x', '{"a": "y', "{", '{"a"', '{"a":"12345678']
    matchers = [TokenMatcher(compiled("auto", "json_schema", json.dumps(s)).matcher(), vocabulary) for s in schemas]
    for matcher, text in zip(matchers, texts, strict=True):
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert matcher.accept(token)
    alone = [raw(each) for each in matchers]
    assert len({frozenset(each) for each in alone}) == 5
    for some in ([0, 1, 2, 3, 4], [0, 2], [3, 1]):
        for each in matchers:
            if each.tokens:  # there and back again: it has seen nothing from here
                token = each.tokens[-1]
                each.rollback(1)
                assert each.accept(token)
        prepare([matchers[i] for i in some], backend_of("auto"))
        for i in some:
            assert not matchers[i].needs_sight
            assert set(bits(matchers[i].look().mask)) == alone[i]


@pytest.mark.parametrize("schema", [BOUNDED, {"type": "string", "minLength": 12, "maxLength": 60}, {"type": "string"}])
def test_no_mask_holds_up_a_step(schema: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Also near the end of a bounded string, where every token's length matters."""
    text = "The quick brown fox jumps over the lazy dogs and more of them again"
    said = f'{{"a": "{text[:40]}"}}' if schema is BOUNDED else f'"{text[:60]}"'
    automaton = compiled("auto", "json_schema", json.dumps(schema))
    mask = np.empty(1536, np.int32)
    quickest: dict[int, float] = {}
    for _ in range(3):
        matcher = automaton.matcher()
        for at, token in enumerate(tokenizer.encode(said, add_special_tokens=False)):
            began = time.thread_time()
            matcher.fill(mask)
            quickest[at] = min(quickest.get(at, 1.0), time.thread_time() - began)
            assert matcher.accept(token)
        assert matcher.is_complete()
    assert max(quickest.values()) < 0.003
