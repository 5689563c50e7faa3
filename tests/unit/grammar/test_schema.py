"""Schemas: what a grammar allows is valid, by an independent validator; what can't be promised is refused, and where."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bough.grammar.errors import BadGrammar
from bough.grammar.keywords import DESCRIBING, ENFORCED, REFUSED
from bough.grammar.sources import grammar_of
from tests.unit.grammar.random_texts import Sampler

SCHEMAS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text())


@cache
def validator(source: str) -> Any:
    schema = json.loads(source)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    if "additionalItems" in source or isinstance(schema.get("items"), list) or '"exclusiveMinimum": true' in source:
        kind = jsonschema.Draft4Validator if '"exclusiveMinimum": true' in source else jsonschema.Draft7Validator
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def test_there_are_two_hundred_of_them() -> None:
    assert len({entry["name"] for entry in SCHEMAS}) == 200


@pytest.mark.parametrize("spaces", [0, 8])
@pytest.mark.parametrize("entry", SCHEMAS, ids=lambda entry: entry["name"])
def test_whatever_fits_the_grammar_fits_the_schema(entry: dict[str, Any], spaces: int) -> None:
    source = json.dumps(entry["schema"])
    sampler = Sampler(grammar_of("json_schema", source, spaces), random.Random(entry["name"]))
    check = validator(source)
    for _ in range(25):
        text = sampler.text()
        value = json.loads(text)
        if "nullable" not in source:
            check.validate(value)
        if not spaces:
            assert not any(letter in text for letter in "\n\t")


ORDERED = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a"]}
OPEN = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}}
ONE = {"type": "object", "properties": {"a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-7", "9" * 32], ["01", "-0", "1.5", "9" * 33]),
        ({"type": "number"}, ["0.5", "-1e-9", "9" * 16 + "." + "9" * 16], ["9" * 17, "1e999", ".5", "1."]),
        (ONE, ["{}", '{"a":null}', '{\n  "a": null\n}'], ['{"a" : null}', "{ }"]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true, false]"], ["[true,]", f"[{' ' * 9}true]"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"abc"'], ['"a"', '"abcd"', "ab"]),
        ({"enum": ["x", 1, None]}, ['"x"', "1", "null"], ["x", "true"]),
        (ORDERED, ['{"b": 1, "a": 2}', '{"a": 2}'], ['{"a": 2, "b": 1}', "{}"]),
        (OPEN, ['{"a":1,"b":2}', '{"aa":2}', '{"b":2,"c":2}'], ['{"a":2}', '{"b":1}', '{"a":1,"a":2}']),
        ({}, ["{}", "[1, {}]", '"x"', "null"], ["", "nul"]),
    ],
)
def test_texts_in_and_out(schema: Any, good: list[str], bad: list[str], fits: Any) -> None:
    for text in good:
        assert fits("json_schema", json.dumps(schema), text), text
    for text in bad:
        assert not fits("json_schema", json.dumps(schema), text), text


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "/not"),
        ({"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}, "/properties/a/items/uniqueItems"),
        ({"type": "number", "multipleOf": 0.5}, "/multipleOf"),
        ({"if": {}, "then": {}}, "/if"),
        ({"$ref": "#/$defs/nowhere"}, "/$ref"),
        ({"$ref": "https://example.com/schema"}, "/$ref"),
        ({"properties": {"a/b": {"contains": {}}}}, "/properties/a~1b/contains"),
        ({"type": "strng"}, "/type"),
        ({"type": "object", "requred": ["a"]}, "/requred"),
        ({"type": "string", "format": "credit-card"}, "/format"),
        ({"type": "string", "pattern": "(?=a)b"}, "/pattern"),
        ({"type": "string", "pattern": "^(ab|c)*$", "maxLength": 3, "minLength": 9}, ""),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
        ({"minLength": -1}, "/minLength"),
        ({"anyOf": []}, "/anyOf"),
        ({"enum": ["ab"], "maxLength": 1}, "/maxLength"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "/minProperties"),
        ({"patternProperties": {"a": {}, "b": {}}}, "/patternProperties"),
        ({"items": {"anyOf": [{"dependentRequired": {}}]}}, "/items/anyOf/0/dependentRequired"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(BadGrammar) as error:
        grammar_of("json_schema", json.dumps(schema), 8)
    if place:
        assert f"at {place}: " in str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "string", "enum": [1]},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)
def test_schemas_that_nothing_fits(schema: Any) -> None:
    with pytest.raises(BadGrammar):
        grammar_of("json_schema", json.dumps(schema), 8)


@pytest.mark.parametrize("place", range(5))
def test_white_space_is_bounded_everywhere(place: int, fits: Any) -> None:
    """Eight in a row, of any kind, between any two parts."""
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}}, "required": ["a"]}
    )
    parts = ["{", '"a":', "[", "1,", "1", "]}"]
    for spaces, good in ((" " * 8, True), ("\n\t " * 2 + "\n\n", True), (" " * 9, False), ("\n" * 9, False)):
        text = "".join(parts[: place + 1]) + spaces + "".join(parts[place + 1 :])
        assert fits("json_schema", schema, text) == good, text


@pytest.mark.parametrize("sign", ["", "-"])
def test_numbers_have_at_most_32_digits(sign: str, fits: Any) -> None:
    """Half of them before the point, where there may be one."""
    assert fits("json_schema", '{"type": "integer"}', sign + "9" * 32)
    assert not fits("json_schema", '{"type": "integer"}', sign + "9" * 33, whole=False)
    assert fits("json_schema", '{"type": "number"}', sign + "9" * 16 + "." + "9" * 16)
    assert not fits("json_schema", '{"type": "number"}', sign + "9" * 17, whole=False)
    assert not fits("json_schema", '{"type": "number"}', sign + "0." + "9" * 17, whole=False)


def test_branches_that_never_end_are_left_out(fits: Any) -> None:
    schema = {"$defs": {"e": {"type": "object", "properties": {"e": {"$ref": "#/$defs/e"}}, "required": ["e"]}}}
    source = json.dumps({**schema, "anyOf": [{"const": 1}, {"$ref": "#/$defs/e"}]})
    assert fits("json_schema", source, "1")
    assert not fits("json_schema", source, "{", whole=False)


def test_limits_of_size_and_depth() -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"items": deep}
    for schema in (deep, {"enum": ["x" * 70_000]}, {"enum": list(range(30_000))}):
        with pytest.raises(BadGrammar):
            grammar_of("json_schema", json.dumps(schema, separators=(",", ":")), 8)


def test_every_keyword_has_one_place_and_the_documents_list_them() -> None:
    assert not ENFORCED & DESCRIBING
    assert not (ENFORCED | DESCRIBING) & set(REFUSED)
    page = (Path(__file__).parents[3] / "docs" / "structured_output.md").read_text()
    missing = [keyword for keyword in [*ENFORCED, *REFUSED] if f"`{keyword}`" not in page]
    assert not missing
