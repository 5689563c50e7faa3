"""Keywords of JSON schemas: enforced, purely descriptive, or refused; and limits of size."""

from __future__ import annotations

import difflib
import json
from typing import Any

from bough.core.bounds import BOUNDS
from bough.grammar.errors import BadGrammar, shorten, unsupported

MAX_DEPTH = BOUNDS["schema_depth"].most
MAX_BYTES = BOUNDS["grammar_bytes"].most
MAX_VALUES = 20_000

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")

ENFORCED = {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "nullable",
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "x-grammar",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip
"""Keywords that every answer obeys."""

DESCRIBING = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "id", "$comment", "$defs", "definitions", "$vocabulary", "discriminator", "xml", "externalDocs",
    "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
"""Keywords that do not restrict values."""

REFUSED = {
    "not": "say what is allowed instead",
    "if": "use anyOf with the cases written out",
    "then": "use anyOf with the cases written out",
    "else": "use anyOf with the cases written out",
    "contains": "it looks at the array as a whole",
    "minContains": "it looks at the array as a whole",
    "maxContains": "it looks at the array as a whole",
    "uniqueItems": "it looks at the array as a whole",
    "multipleOf": "only 1 is taken",
    "dependencies": "use anyOf with the cases written out",
    "dependentRequired": "use anyOf with the cases written out",
    "dependentSchemas": "use anyOf with the cases written out",
    "unevaluatedProperties": "only false is taken",
    "unevaluatedItems": "only false is taken",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $ref with a JSON pointer",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "$anchor": "use $ref with a JSON pointer",
}
"""Keywords that can't be enforced token by token, and why or what to do."""

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "multipleOf": (1,),
    "unevaluatedProperties": (False,),
    "unevaluatedItems": (False,),
    "$recursiveAnchor": (False,),
}
"""Values of refused keywords that change nothing."""

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")

Schema = dict[str, Any]
JsonSchema = Schema | bool


def load(source: str) -> JsonSchema:
    """The schema in a text, within the limits of size and depth."""
    if len(source.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise BadGrammar(f"the schema is larger than {MAX_BYTES} bytes", at="")
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the schema is not JSON: {shorten(str(error))}", at="") from None
    check_limits(schema)
    if not isinstance(schema, dict | bool):
        raise BadGrammar("a schema is an object, true or false", at="")
    return schema


def check_limits(value: Any) -> None:
    """Raises `BadGrammar` for schemas that are nested too deeply or too large."""
    stack: list[tuple[Any, int, str]] = [(value, 1, "")]
    seen = 0
    while stack:
        each, depth, at = stack.pop()
        seen += 1
        if depth > MAX_DEPTH and isinstance(each, dict | list) and each:
            raise BadGrammar(f"the schema is nested more than {MAX_DEPTH} deep", at=at)
        if seen > MAX_VALUES:
            raise BadGrammar(f"the schema has more than {MAX_VALUES} values", at="")
        if isinstance(each, dict):
            stack.extend((inner, depth + 1, f"{at}/{escape(key)}") for key, inner in each.items())
        elif isinstance(each, list):
            stack.extend((inner, depth + 1, f"{at}/{index}") for index, inner in enumerate(each))
        elif isinstance(each, str) and not _encodable(each):
            raise BadGrammar("a text has half a surrogate pair", at=at)


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def escape(key: str) -> str:
    """A key as one step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def unescape(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")


def constraints(schema: Schema, at: str) -> Schema:
    """The keywords that restrict values, well formed. Raises `BadGrammar` for those that can't be enforced."""
    found: Schema = {}
    for keyword, value in schema.items():
        if keyword in ENFORCED:
            _check_value(keyword, value, at)
            if not (keyword == "nullable" and value is False):
                found[keyword] = value
        elif keyword in REFUSED:
            if not is_harmless(keyword, value):
                raise unsupported(keyword, at, REFUSED[keyword])
        elif keyword not in DESCRIBING:
            _check_unknown(keyword, at)
    if schema.get("multipleOf") == 1:
        types = found.get("type", "integer")
        listed = types if isinstance(types, list) else [types]
        found["type"] = ["integer" if each == "number" else each for each in listed]
    return found


def is_harmless(keyword: str, value: Any) -> bool:
    """Whether a refused keyword's value changes nothing."""
    return any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS.get(keyword, ()))


def _check_unknown(keyword: str, at: str) -> None:
    """Raises `BadGrammar` for unknown keywords that look like a misspelt one. By the standard, other unknown keywords
    are descriptive."""
    near = difflib.get_close_matches(keyword, [*ENFORCED, *REFUSED], n=1, cutoff=0.86)
    if near:
        raise BadGrammar(
            f"there is no keyword {shorten(keyword)!r}: did you mean {near[0]!r}?", at=f"{at}/{escape(keyword)}"
        )


def _check_value(keyword: str, value: Any, at: str) -> None:
    if not _is_well_formed(keyword, value):
        raise BadGrammar(f"{keyword!r} has a value that it can't have: {shorten(value)}", at=f"{at}/{keyword}")


def _is_well_formed(keyword: str, value: Any) -> bool:
    if keyword in _COUNTS:
        return _is_number(value) and value >= 0 and value == int(value)
    if keyword in _NUMBERS:
        return _is_number(value) or (keyword.startswith("exclusive") and isinstance(value, bool))
    if keyword in _LISTS:
        return isinstance(value, list) and bool(value) and all(_is_schema(each) for each in value)
    if keyword in _MAPS:
        return isinstance(value, dict) and all(_is_schema(each) for each in value.values())
    match keyword:
        case "type":
            named = value if isinstance(value, list) else [value]
            return bool(named) and all(isinstance(each, str) and each in TYPES for each in named)
        case "enum":
            return isinstance(value, list) and bool(value)
        case "required":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "items":
            return _is_schema(value) or (isinstance(value, list) and all(_is_schema(each) for each in value))
        case "additionalProperties" | "additionalItems" | "propertyNames":
            return _is_schema(value)
        case "pattern" | "format" | "x-grammar" | "$ref":
            return isinstance(value, str)
        case "nullable":
            return isinstance(value, bool)
        case _:
            return True


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e300
