"""Matchers: masks against brute force, tokens that are certain, tokens that are respelled, and the way back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import regex

from bough.core.sampling import GrammarKind
from bough.entrypoints.http.openai.schema import ChatRequest
from bough.entrypoints.http.openai.tools import offer
from bough.grammar import Vocabulary
from bough.grammar.bits import bits
from bough.grammar.matcher import TokenMatcher, prepare
from bough.parsers import TOOL_FORMATS, ToolSpec, call_format, parse_tool_calls
from bough.parsers.call_shapes import MarkupShape, PythonShape
from bough.tokenizer import Tokenizer
from tests.unit.grammar.conftest import backend_of, compiled

Make = Callable[[GrammarKind, str], TokenMatcher]
KEY = "customer_identification_number"
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            KEY: {"type": "integer", "maximum": 99, "minimum": 10},
            "shipping_address_line": {"enum": ["x"]},
        },
        "required": [KEY, "shipping_address_line"],
    }
)


def shown(matcher: TokenMatcher) -> list[int]:
    mask = np.full(1536, 7, np.int32)
    matcher.fill_mask(mask)
    return bits(mask)


def raw(matcher: TokenMatcher) -> set[int]:
    mask = np.full(1536, 7, np.int32)
    matcher.native.fill(mask)
    return set(bits(mask))


PATTERNS = ["(?:ab|a)*c[0-9]{2}", "[a-f]{3,5}(?:x|yz)?", "é+[ \n]?ß", '"[a-z ]*"', "red|redder|green"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_against_brute_force(pattern: str, make: Make, vocabulary: Vocabulary) -> None:
    """Every token of the vocabulary is tried on an independent engine that knows partial matches."""
    judge = regex.compile(pattern)
    rng = random.Random(pattern)
    names = [(i, name) for i, name in enumerate(vocabulary.tokens.spelled()) if name]
    matcher, said = make("regex", pattern), b""
    ends = set(vocabulary.tokens.stop_ids)
    for _ in range(6):
        allowed = raw(matcher)
        assert set(shown(matcher)) <= allowed
        expected = set()
        for i, name in names:
            text = text_of(said + name)
            if text is not None and judge.fullmatch(text, partial=True):
                expected.add(i)
        got = {token for token in allowed - ends if text_of(said + vocabulary.bytes_of(token)) is not None}
        if len(allowed) > 1:  # llguidance spells certain text its own way, one token at a time
            assert got == expected
        else:
            assert got <= expected
        complete = judge.fullmatch(said.decode()) is not None
        assert matcher.native.is_complete() == complete
        assert bool(allowed & ends) == complete
        if not expected:
            break
        token = rng.choice(sorted(expected))
        assert matcher.accept(token)
        said += vocabulary.bytes_of(token)


def text_of(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def test_certain_text_is_cut_as_the_tokenizer_cuts_it(make: Make, tokenizer: Tokenizer) -> None:
    matcher = make("json_schema", SCHEMA)
    opening, whole = (tokenizer.encode(text, add_special_tokens=False) for text in ('{"', f'{{"{KEY}":'))
    for token in opening:
        assert matcher.accept(token)
    forced = matcher.forced()
    assert opening + forced == whole
    assert len(forced) >= 5
    assert shown(matcher) == forced[:1]
    assert matcher.tokens == opening, "looking ahead changes nothing"


def test_a_certain_end_is_left_open_where_a_longer_token_would_do(make: Make, tokenizer: Tokenizer) -> None:
    """The colon before a string may be one token with the string's quote: the model is asked."""
    source = json.dumps({"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]})
    matcher = make("json_schema", source)
    for token in tokenizer.encode('{"', add_special_tokens=False):
        assert matcher.accept(token)
    forced = matcher.forced()
    assert tokenizer.decode(forced) == KEY
    for token in forced:
        assert matcher.accept(token)
    assert not matcher.forced()
    texts = {tokenizer.token_text(token) for token in shown(matcher)}
    assert {'":', '":"'} <= texts


def test_a_certain_end_is_left_open_inside_words(make: Make, tokenizer: Tokenizer) -> None:
    """`data` is certain, but the tokenizer has `database` and `datasets` in one piece: the model is asked."""
    matcher = make("choice", '["database","dataset"]')
    assert not matcher.forced()
    assert {tokenizer.token_text(token) for token in shown(matcher)} >= {"database"}


def test_detours_are_closed(make: Make, tokenizer: Tokenizer) -> None:
    """Of `r`, `re` and `red` only `red` is offered, since nothing but the rest of it could follow."""
    choices = [" red", " green", " blue"]
    matcher = make("choice", json.dumps(choices))
    whole = {tokenizer.encode(choice, add_special_tokens=False)[0] for choice in choices}
    texts = {tokenizer.token_text(token) for token in shown(matcher)}
    assert whole <= set(shown(matcher))
    assert not texts & {" r", " g", " b", " re", " bl"}


def test_respelling(make: Make, tokenizer: Tokenizer, backend: str) -> None:
    """The model says `r` where only `reduction` can follow: it should have said the longer token."""
    first, whole = (tokenizer.encode(text, add_special_tokens=False) for text in ("r", "reduction of"))
    matcher = make("regex", "[a-z0-9]{1,3}z!!:|reduction of [a-z]+")
    shown(matcher)
    assert matcher.accept(first[0])
    assert matcher.respell() is None, "more than one text can follow"
    matcher = make("regex", "(?:[^r].{0,9}|reduction of) [a-z]+")
    mask = np.empty(1536, np.int32)
    matcher.fill_mask(mask)
    assert len(bits(mask)) > 2048, "too many to look at one by one"
    assert matcher.accept(first[0])
    better = matcher.respell()
    assert better == (whole[0] if backend == "xgrammar" or better is not None else None)
    assert matcher.tokens == first, "asking changes nothing"
    matcher.rollback(1)
    assert matcher.respell() is None, "nothing was said"


def test_there_and_back(make: Make, tokenizer: Tokenizer) -> None:
    """After going back, everything is as if nothing had happened."""
    text = f'{{"{KEY}": 42, "shipping_address_line": "x"}}'
    tokens = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(3)
    matcher, at = make("json_schema", SCHEMA), 0
    seen: dict[int, tuple[list[int], list[int], bool]] = {}
    for _ in range(200):
        state = (shown(matcher), matcher.forced(), matcher.is_terminated())
        assert seen.setdefault(at, state) == state
        if at and rng.random() < 0.2:
            back = rng.randint(1, min(at, 6))
            matcher.rollback(back)
            at -= back
        elif at < len(tokens):
            assert matcher.accept(tokens[at])
            at += 1
    assert len(seen) > len(tokens) // 2


def test_the_end(make: Make, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = make("regex", "ab?")
    eos = vocabulary.tokens.stop_ids[0]
    assert not matcher.accept(eos)
    assert matcher.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert not matcher.is_terminated()
    assert eos in shown(matcher)
    assert matcher.accept(eos)
    assert matcher.is_terminated()
    assert not matcher.accept(eos)
    matcher.rollback(1)
    assert matcher.accept(tokenizer.encode("b", add_special_tokens=False)[0])
    assert matcher.is_terminated(), "nothing but an end token could follow"
    matcher.rollback(2)
    assert not matcher.accept(tokenizer.encode("b", add_special_tokens=False)[0])


def test_special_tokens_are_no_text_unless_spelled_out(make: Make, tokenizer: Tokenizer) -> None:
    end = tokenizer.id_of("<|im_end|>")
    other = tokenizer.id_of("<|im_start|>")
    assert end is not None
    assert other is not None
    free = make("regex", "[^!]*")
    assert other not in raw(free)
    tag = {"type": "tag", "begin": "<|im_start|>", "content": {"type": "regex", "pattern": "[a-z]"}, "end": "!"}
    matcher = make("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    assert other in shown(matcher)
    assert matcher.accept(other)
    assert "a" in {tokenizer.token_text(token) for token in shown(matcher)}


def test_many_at_once(backend: str, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    sources = [("regex", "[a-z]+ [0-9]"), ("json_schema", SCHEMA), ("choice", '["yes","no"]'), ("json", "")]
    apart = [TokenMatcher(compiled(backend, kind, source).matcher(), vocabulary) for kind, source in sources]  # type: ignore[arg-type]
    together = [TokenMatcher(compiled(backend, kind, source).matcher(), vocabulary) for kind, source in sources]  # type: ignore[arg-type]
    prepare(together, backend_of(backend))
    assert not any(each.needs_sight for each in together)
    assert [shown(each) for each in together] == [shown(each) for each in apart]


ONE = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {"const": 1}}, "end": "</f>"}
EITHER = {
    "type": "or",
    "elements": [{"type": "const_string", "value": "!"}, {"type": "grammar", "grammar": 'root ::= "?"{2}'}],
}
PARTS = [{"type": "const_string", "value": "A:"}, {"type": "regex", "pattern": "[0-9]+"}, EITHER]
TAGS: dict[str, Any] = {
    "forced calls": (
        {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, "tags": [ONE]},
        ["<f>1</f>", "<f>1</f>\n<f>1</f>"],
        ["", "x", "<f>2</f>"],
    ),
    "one call": (
        {"type": "tags_with_separator", "separator": "", "at_least_one": True, "stop_after_first": True, "tags": [ONE]},
        ["<f>1</f>"],
        ["", "<f>1</f><f>1</f>"],
    ),
    "calls in free text": (
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [ONE]},
        ["", "hello", "a <f>1</f> b", "<f>1</f><f>1</f>"],
        ["<f>2</f>", "<fg", "<f>1"],
    ),
    "sequence": ({"type": "sequence", "elements": PARTS}, ["A:12!", "A:3??"], ["A:!", "B:1!", "A:1?"]),
    "text up to its end": (
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
        ["<t></t>", "<t>a < b</t>"],
        ["<t>a", "a</t>"],
    ),
}


@pytest.mark.parametrize("name", TAGS)
def test_structural_tags(name: str, fits: Any) -> None:
    format, good, bad = TAGS[name]
    source = json.dumps({"type": "structural_tag", "format": format})
    for text in good:
        assert fits("structural_tag", source, text), text
    for text in bad:
        assert not fits("structural_tag", source, text), text


def test_the_older_form_of_tags(fits: Any) -> None:
    source = json.dumps({"structures": [{"begin": "<a>", "schema": {"const": 5}, "end": "</a>"}], "triggers": ["<a>"]})
    assert fits("structural_tag", source, "see <a>5</a>.")
    assert not fits("structural_tag", source, "see <a>6", whole=False)


@pytest.fixture
def make(matcher: Make) -> Make:
    return matcher


@pytest.mark.parametrize("name", list(TOOL_FORMATS))
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_tool_calls_of_every_format(name: str, choice: str, fits: Any) -> None:
    """A call as its family writes it is taken, forced or in free text; one whose arguments don't fit is not."""
    properties = {"n": {"type": "integer"}, "unit": {"enum": ["C", "F"]}, "note": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["n", "unit"]}
    body = msgspec.convert(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}],
            "tool_choice": choice,
        },
        ChatRequest,
    )
    source = offer(body, name).structural_tag
    shape, form = TOOL_FORMATS[name].shape, call_format(name, [ToolSpec("f", parameters)])
    assert form is not None
    (call,) = form.calls

    def marked(key: str, value: Any, shape: MarkupShape) -> str:
        is_text = isinstance(value, str)
        begin = shape.argument_begin.replace("IS_TEXT", str(is_text).lower()).replace("KEY", key)
        begin = begin.replace(
            "TYPE", "string" if is_text else properties[key]["type"] if key in properties else "integer"
        )
        return begin + (value if is_text else json.dumps(value)) + shape.argument_end.replace("KEY", key)

    def assigned(key: str, value: Any, shape: PythonShape) -> str:
        quoted = bool(shape.quote) and isinstance(value, str)
        return f"{key}{shape.assign}" + (f"{shape.quote}{value}{shape.quote}" if quoted else json.dumps(value))

    def written(**arguments: Any) -> str:
        inner = json.dumps(arguments)
        if isinstance(shape, MarkupShape):
            inner = "".join(marked(key, value, shape) for key, value in arguments.items())
        if isinstance(shape, PythonShape):
            inner = shape.comma.join(assigned(key, value, shape) for key, value in arguments.items())
        return f"{form.section_begin}{call.begin}{inner}{call.end}{form.section_end}"

    for good in ({"n": 7, "unit": "C"}, {"n": -12, "unit": "F", "note": "a < b"}):
        text = written(**good)
        assert fits("structural_tag", source, text), text
        parsed = parse_tool_calls(text, [{"name": "f", "parameters": parameters}], name)
        assert [json.loads(each.arguments) for each in parsed.tool_calls] == [good]
    for bad in ({"n": "x", "unit": "C"}, {"n": 7}, {"n": 7, "unit": "K"}, {"n": 7, "unit": "C", "other": 1}, {}):
        assert not fits("structural_tag", source, written(**bad)), bad
    assert fits("structural_tag", source, "hello") == (choice == "auto")


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_written_as_python(choice: str, fits: Any) -> None:
    """Without a marker, only a list that begins with a call of an offered tool is one."""
    numbers = {"type": "object", "properties": {"n": {"type": "integer"}, "why": {"type": "string"}}}
    tools = [{"name": "f", "parameters": numbers}, {"name": "now", "parameters": {"type": "object", "properties": {}}}]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {**each, "strict": True}} for each in tools],
        "tool_choice": choice,
    }
    source = offer(msgspec.convert(body, ChatRequest), "pythonic").structural_tag
    for good, calls in (
        ("[f()]", [("f", {})]),
        ("[f(n=3)]", [("f", {"n": 3})]),
        ('[f(why="it\'s \\"so\\"")]', [("f", {"why": 'it\'s "so"'})]),
        ('[f(n=3, why="a, b)"), now(), f(n=-1)]', [("f", {"n": 3, "why": "a, b)"}), ("now", {}), ("f", {"n": -1})]),
    ):
        assert fits("structural_tag", source, good), good
        parsed = parse_tool_calls(good, tools, "pythonic")
        assert [(each.name, json.loads(each.arguments)) for each in parsed.tool_calls] == calls
    for bad in ("[f(3)]", "[f(n=3.5)]", "[f(n=3,)]", "[now(n=3)]", "[f(n=3), f(n='x')]", "[f(n=3), g()]"):
        assert not fits("structural_tag", source, bad), bad
    for text in ("See [1] and [now].", "A list: [1, 2]"):
        assert fits("structural_tag", source, text) == (choice == "auto")
    single = msgspec.convert({**body, "parallel_tool_calls": False}, ChatRequest)
    assert fits("structural_tag", offer(single, "pythonic").structural_tag, "[now()]")
    assert not fits("structural_tag", offer(single, "pythonic").structural_tag, "[now(), now()]")


def test_arguments_that_python_cannot_name() -> None:
    for name in ("a-b", "class", "1st"):
        assert call_format("pythonic", [ToolSpec("f", {"type": "object", "properties": {name: {}}})]) is None


def test_arguments_that_markup_cannot_be_held_to() -> None:
    """Forced calls of such tools are asked for in another format; those the model starts are not constrained."""
    for value in ({"type": "string", "pattern": "^a+$"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {}):
        spec = ToolSpec("f", {"type": "object", "properties": {"x": value}})
        assert call_format("qwen3_coder", [spec]) is None
        assert call_format("hermes", [spec]) is not None
