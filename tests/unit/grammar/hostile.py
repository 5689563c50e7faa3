"""A hundred sources that no server should choke on: bombs, loops, nonsense, and things that only look like constraints."""

from __future__ import annotations

import json
from string import ascii_letters
from typing import Any

from bough.core.sampling import GrammarKind

SLOW: tuple[GrammarKind, str] = (
    "ebnf",
    "root ::= " + " | ".join(f'[^{letter}]{{50}} "{letter}"' for letter in ascii_letters),
)
"""Thousands of states, in each of which nearly every token may follow."""


def _nested(depth: int, key: str) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {key: [schema]} if key in ("anyOf", "allOf", "oneOf") else {key: schema}
    return schema


def _doubling(levels: int) -> Any:
    """Every definition uses the one before twice, beside other keywords: merged, it doubles at every level."""
    definitions: dict[str, Any] = {"d0": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}
    for level in range(1, levels):
        reference = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"allOf": [reference, {"anyOf": [{"minLength": level}, {"maxLength": 99 - level}]}]}
    return {"$defs": definitions, "allOf": [{"$ref": f"#/$defs/d{levels - 1}"}, {"title": "x"}]}


_SCHEMAS: list[Any] = [
    _nested(40, "items"),
    _nested(200, "anyOf"),
    _nested(300, "not"),
    _nested(35, "additionalProperties"),
    _doubling(24),
    {"enum": ["x" * 66_000]},
    {"enum": list(range(25_000))},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"allOf": [{"$ref": "#"}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "http://169.254.169.254/latest/meta-data"},
    {"$ref": "#/../../etc"},
    {"$ref": "#/$defs/" + "a/" * 3000},
    {"$ref": 5},
    {"$dynamicRef": "#x"},
    {"$anchor": "x", "$ref": "#x"},
    {"not": {}},
    {"if": True, "then": False},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}, "minContains": 3},
    {"type": "number", "multipleOf": 1e-300},
    {"type": "integer", "multipleOf": 7},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": {"type": "string"}},
    {"type": "object", "requird": ["a"]},
    {"type": "text"},
    {"type": ["string", 5]},
    {"type": []},
    {"type": {"$ref": "#"}},
    {"properties": []},
    {"properties": {"a": 5}},
    {"required": "a"},
    {"enum": []},
    {"enum": "abc"},
    {"anyOf": {}},
    {"anyOf": []},
    {"allOf": [5]},
    {"minLength": "3"},
    {"minLength": -3},
    {"maxLength": 1.5},
    {"minimum": "0"},
    {"minimum": 1e308, "type": "integer"},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "integer", "minimum": 0.2, "maximum": 0.8},
    {"type": "string", "minLength": 9, "maxLength": 2},
    {"type": "string", "minLength": 60_000},
    {"type": "array", "minItems": 9, "maxItems": 2},
    {"type": "array", "items": False, "minItems": 1},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(4000)}, "minProperties": 2000},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"type": "string"}] * 50},
    {"patternProperties": {"^a": {"type": "string"}, "a$": {"type": "integer"}}},
    {"patternProperties": {"(": {}}},
    {"type": "string", "pattern": "(a{1,9000}){1,9000}"},
    {"type": "string", "pattern": "(?=.*[0-9])(?=.*[a-z]).{8,}"},
    {"type": "string", "pattern": "^(a|b)*\\1$"},
    {"type": "string", "pattern": "[z-a]"},
    {"type": "string", "pattern": "a{3,1}"},
    {"type": "string", "pattern": "^(ab|cde)+$", "maxLength": 1},
    {"type": "string", "format": "nonsense"},
    {"type": "string", "format": "date", "maxLength": 3},
    {"const": "\ud800"},
    {"enum": ["a"], "minLength": 5},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"enum": [1]}, {"enum": [2]}]},
    [],
    "string",
    7,
    None,
    False,
]

_PATTERNS = [
    "(((a{1,100}){1,100}){1,100}){1,100}",
    "(" * 3000 + "a" + ")" * 3000,
    "(a|b|c|d){70000}",
    "x{2000}{2000}",
    "(?=a)b",
    "(?<!a)b",
    "(a+)\\1",
    "\\bword\\b",
    "a++b",
    "(?i)abc",
    "(?R)",
    "[",
    "(",
    "\\",
    "*",
    "a" * 70_000,
    "|".join(f"[^{letter}]{{60}}{letter}" for letter in ascii_letters),
]

_GRAMMARS = [
    "",
    "root",
    "root ::=" * 50,
    'root ::= a\na ::= "x" a',
    "root ::= a b\na ::= b\nb ::= a",
    'root ::= "a" nowhere',
    'root ::= "unclosed',
    "root ::= " + "(" * 500 + '"a"' + ")" * 500,
    'root ::= (("a"{1,999}){1,999}){1,999}',
    "start:" * 50,
    "start: " + "(" * 500 + '"a"' + ")" * 500,
    'start: ("a"~1..60000)~1..60000',
    "start: A\nA: B\nB: A",
    'start: start "x"',
    "start: /(a{1,999}){1,999}/",
    "%import common.NOPE\nstart: NOPE",
    "%ignore /x/\n" * 200 + "start: missing",
    SLOW[1],
]

_TAGS: list[Any] = [
    {},
    [],
    {"format": {"type": "nonsense"}},
    {
        "format": {
            "type": "tag",
            "begin": "<",
            "content": {"type": "json_schema", "json_schema": {"not": {}}},
            "end": ">",
        }
    },
    {"format": {"type": "tag", "begin": 5, "content": {"type": "any_text"}, "end": ">"}},
    {"structures": [], "triggers": []},
]

HOSTILE: list[tuple[GrammarKind, str]] = [
    *(("json_schema", json.dumps(schema)) for schema in _SCHEMAS),
    *(("regex", pattern) for pattern in _PATTERNS),
    *(("ebnf", grammar) for grammar in _GRAMMARS),
    *(("structural_tag", json.dumps(tag)) for tag in _TAGS),
    ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    ("json_schema", "{" * 30_000),
    ("json_schema", '{"minimum": NaN}'),
    ("json_schema", "not json"),
]

LAZY_ONLY = [source for _, source in HOSTILE if source in (SLOW[1], _PATTERNS[-1]) or '"minLength": 60000' in source]
"""Sources that are too much for a backend that works everything out ahead, and nothing to one that does not."""
