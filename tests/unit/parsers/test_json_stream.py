"""The JSON stream against Python's own decoder."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from bough.parsers.events import ToolSpec
from bough.parsers.json_stream import MAX_DEPTH, JsonStream, mend_json
from bough.parsers.literals import literal_to_json
from bough.parsers.typing_by_schema import ArgumentTypes, encode_text, encode_typed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(value=VALUES, ascii=st.booleans(), indent=st.sampled_from([None, 2]), data=st.data())
def test_valid_json_passes_unchanged(value: object, ascii: bool, indent: int | None, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert mend_json(text) == text
    stream, out = JsonStream(), ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
        assert stream.consume(text[a:b], 0) == b - a
        out += stream.take()
    stream.close()
    assert stream.done
    assert out + stream.take() == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="{}[]\",:\\u0019-+.eE truefalsnNoéT\n\t'x", max_size=30))
def test_output_is_json_or_nothing(text: str) -> None:
    mended = mend_json(text)
    try:
        expected = json.loads(text)
    except ValueError:
        if mended is not None:
            json.loads(mended)
    else:
        if expected == expected and "Infinity" not in text:
            assert mended is not None
            assert json.loads(mended) == expected


@settings(max_examples=200, deadline=None)
@given(value=VALUES, rest=st.text(max_size=10))
def test_stops_right_behind_the_value(value: object, rest: str) -> None:
    text = json.dumps({"value": value})
    stream = JsonStream()
    assert stream.consume(text + rest, 0) == len(text)
    assert stream.done


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"a\nb"', "a\nb"),
        ('"tab\there\x01"', "tab\there\x01"),
        (r'"it\'s"', "it's"),
        (r'"\d+ \$5"', r"\d+ \$5"),
        (r'"\u00g0"', r"\u00g0"),
        (r'"C:\Users\new"', "C:\\Users\new"),
        ("[1, 2,]", [1, 2]),
        ('{"a": True, "b": None, "c": False,}', {"a": True, "b": None, "c": False}),
    ],
)
def test_mends(text: str, value: object) -> None:
    mended = mend_json(text)
    assert mended is not None
    assert json.loads(mended) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", '{"a"}', '{"a": }', "{a: 1}", "[1 2]", "01", "1.", "-", "nul", "'a'", "[,]", "{,}", '"a', "1 2"],
)
def test_does_not_mend(text: str) -> None:
    assert mend_json(text) is None


def test_depth_is_limited() -> None:
    assert mend_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert mend_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None


@given(value=VALUES)
def test_python_literals(value: object) -> None:
    text = literal_to_json(repr(value))
    assert text is not None
    assert json.loads(text) == value


@pytest.mark.parametrize(
    "text", ["f()", "a + b", "x", "[i for i in y]", "f'{x}'", "lambda: 0", "1e999", "b'a'", "{**a}", "("]
)
def test_more_than_literals_is_refused(text: str) -> None:
    assert literal_to_json(text) is None


@pytest.mark.parametrize("text", ["(" * 50_000, "-" * 50_000 + "1", "[" * 300 + "]" * 300, "1" * 50_000])
def test_monsters_are_refused_or_read(text: str) -> None:
    found = literal_to_json(text)
    assert found is None or json.loads(found) == json.loads(text)


@given(text=st.text())
def test_encoded_text_is_a_json_string(text: str) -> None:
    assert json.loads(f'"{encode_text(text)}"') == text


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", ("integer",), 5),
        (" 5\n", ("integer",), 5),
        ("-007", ("integer",), -7),
        ("+5", ("integer",), 5),
        ("5.0", ("integer",), 5),
        ("5.5", ("integer",), "5.5"),
        ("5.5", ("number",), 5.5),
        (".5", ("number",), 0.5),
        ("1e3", ("number",), 1000.0),
        ("+1e999", ("number",), "+1e999"),
        ("many", ("integer",), "many"),
        ("TRUE", ("boolean",), True),
        ("false", ("boolean",), False),
        ("yes", ("boolean",), "yes"),
        ("null", ("string",), "null"),
        ("null", ("string", "null"), None),
        ("x", ("string", "null"), "x"),
        ("5", ("string",), "5"),
        ("5", ("string", "integer"), 5),
        ('{"a": 1}', ("object",), {"a": 1}),
        ("{'a': [1, None]}", ("object",), {"a": [1, None]}),
        ("{not json", ("object",), "{not json"),
        ("[1, 2]", ("array",), [1, 2]),
        ("[1, 2]", ("object",), "[1, 2]"),
        ("[1, 2]", (), [1, 2]),
        ("007", (), "007"),
        ("7", (), 7),
        ("True", (), "True"),
        ("true", (), True),
        ("hello", (), "hello"),
        ("", ("integer",), ""),
    ],
)
def test_typed_by_schema(text: str, types: tuple[str, ...], value: object) -> None:
    encoded = json.loads(encode_typed(text, frozenset(types)))  # type: ignore[arg-type]
    assert encoded == value
    assert type(encoded) is type(value)


def test_types_of_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "plain": {"type": "integer"},
            "several": {"type": ["string", "null"]},
            "choice": {"enum": ["a", 1]},
            "fixed": {"const": True},
            "either": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/Thing"}]},
            "deep": {"$ref": "#/$defs/a~1b"},
            "loop": {"$ref": "#/$defs/loop"},
            "shape": {"properties": {}},
            "anything": {},
            "boolean schema": True,
        },
        "$defs": {"Thing": {"type": "object"}, "a/b": {"items": {}}, "loop": {"$ref": "#/$defs/loop"}},
    }
    types = ArgumentTypes([ToolSpec("t", schema)])
    assert types.of("t", "plain") == {"integer"}
    assert types.of("t", "several") == {"string", "null"}
    assert types.of("t", "choice") == {"string", "integer"}
    assert types.of("t", "fixed") == {"boolean"}
    assert types.of("t", "either") == {"number", "object"}
    assert types.of("t", "deep") == {"array"}
    assert types.of("t", "shape") == {"object"}
    for silent in ("loop", "anything", "boolean schema", "missing"):
        assert types.of("t", silent) == frozenset()
    assert types.of("other", "plain") == frozenset()
    assert types.names("t")[:2] == ["plain", "several"]
