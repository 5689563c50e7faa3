"""Turns schemas that combine others (`allOf`, keywords beside `$ref` or `anyOf`) into alternatives without
combinations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bough.grammar.errors import BadGrammar, unsupported
from bough.grammar.keywords import JsonSchema, Schema, constraints

MAX_ALTERNATIVES = 128
COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
Resolve = Callable[[str, str], tuple[JsonSchema, str]]
"""(reference, pointer of its place) -> the schema it names and that one's pointer."""

_HIGHEST = ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum")
_LOWEST = ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum")


def expand(schema: JsonSchema, at: str, resolve: Resolve, seen: frozenset[str] = frozenset()) -> list[Schema]:
    """The alternatives of a schema, each without combining keywords. Empty: no value fits."""
    if schema is False:
        return []
    given = {} if schema is True else constraints(schema, at)
    found = [plain_types({k: v for k, v in given.items() if k not in COMBINING})]
    if "$ref" in given:
        target, place = resolve(given["$ref"], at)
        if place in seen:
            raise unsupported("$ref", at, "it refers to itself beside other keywords")
        found = _product(found, expand(target, place, resolve, seen | {place}), at)
    for index, each in enumerate(given.get("allOf", ())):
        found = _product(found, expand(each, f"{at}/allOf/{index}", resolve, seen), at)
    if "anyOf" in given:
        parts = [expand(each, f"{at}/anyOf/{index}", resolve, seen) for index, each in enumerate(given["anyOf"])]
        found = _product(found, [each for part in parts for each in part], at)
    if "oneOf" in given:
        parts = [expand(each, f"{at}/oneOf/{index}", resolve, seen) for index, each in enumerate(given["oneOf"])]
        merged = [_product(found, part, at) for part in parts]
        check_apart(merged, at)
        found = [each for part in merged for each in part]
    return found


def plain_types(schema: Schema) -> Schema:
    """The same schema with `type` as a list, `const` as `enum`, and without `nullable`."""
    plain = dict(schema)
    if "const" in plain:
        value = plain.pop("const")
        plain["enum"] = _common(plain["enum"], [value]) if "enum" in plain else [value]
    if isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"]]
    if plain.pop("nullable", False):
        if "type" in plain and "null" not in plain["type"]:
            plain["type"] = [*plain["type"], "null"]
        if "enum" in plain and None not in plain["enum"]:
            plain["enum"] = [*plain["enum"], None]
    return plain


def _product(left: list[Schema], right: list[Schema], at: str) -> list[Schema]:
    if len(left) * len(right) > MAX_ALTERNATIVES:
        raise BadGrammar(f"the combinations have more than {MAX_ALTERNATIVES} cases", at=at)
    merged = (merge(a, b, at) for a in left for b in right)
    return [each for each in merged if each is not None]


def merge(a: Schema, b: Schema, at: str) -> Schema | None:
    """The intersection of two schemas. None: it is empty."""
    merged = {**a, **b}
    if "type" in a and "type" in b:
        merged["type"] = _common_types(a["type"], b["type"])
        if not merged["type"]:
            return None
    if "enum" in a and "enum" in b:
        merged["enum"] = _common(a["enum"], b["enum"])
        if not merged["enum"]:
            return None
    for keyword in _HIGHEST:
        if keyword in a and keyword in b:
            merged[keyword] = _of_two(keyword, a, b, at, max)
    for keyword in _LOWEST:
        if keyword in a and keyword in b:
            merged[keyword] = _of_two(keyword, a, b, at, min)
    if "required" in a and "required" in b:
        merged["required"] = list(dict.fromkeys(a["required"] + b["required"]))
    for keyword in ("pattern", "format", "x-grammar", "patternProperties", "prefixItems", "additionalItems"):
        if keyword in a and keyword in b and a[keyword] != b[keyword]:
            raise unsupported(keyword, at, "two different ones apply at the same place")
    if "items" in a and "items" in b:
        merged["items"] = _both(a["items"], b["items"], at, "items")
    if "propertyNames" in a and "propertyNames" in b:
        merged["propertyNames"] = _both(a["propertyNames"], b["propertyNames"], at, "propertyNames")
    _merge_properties(a, b, merged, at)
    return merged


def _merge_properties(a: Schema, b: Schema, merged: Schema, at: str) -> None:
    names = list(dict.fromkeys([*a.get("properties", {}), *b.get("properties", {})]))
    if "patternProperties" in merged and names and not ("patternProperties" in a and "properties" in a):
        raise unsupported("patternProperties", at, "it meets the properties of another schema")
    if names:
        merged["properties"] = {name: _both(_property(a, name), _property(b, name), at, "properties") for name in names}
    if "additionalProperties" in a and "additionalProperties" in b:
        merged["additionalProperties"] = _both(
            a["additionalProperties"], b["additionalProperties"], at, "additionalProperties"
        )


def _property(schema: Schema, name: str) -> JsonSchema:
    """The schema of one property."""
    named: JsonSchema = schema.get("properties", {}).get(name)
    if named is not None:
        return named
    other: JsonSchema = schema.get("additionalProperties", True)
    return other


def _both(a: Any, b: Any, at: str, keyword: str) -> JsonSchema:
    if a is True or a == b:
        return b  # type: ignore[no-any-return]
    if b is True:
        return a  # type: ignore[no-any-return]
    if a is False or b is False:
        return False
    if isinstance(a, list) or isinstance(b, list):
        raise unsupported(keyword, at, "two different ones apply at the same place")
    return {"allOf": [a, b]}


def _of_two(keyword: str, a: Schema, b: Schema, at: str, pick: Callable[[Any, Any], Any]) -> Any:
    if isinstance(a[keyword], bool) or isinstance(b[keyword], bool):
        raise unsupported(keyword, at, "it is true or false here: write the bound itself")
    return pick(a[keyword], b[keyword])


def _common_types(a: list[str], b: list[str]) -> list[str]:
    common = [each for each in a if each in b]
    if ("number" in a and "integer" in b) or ("integer" in a and "number" in b):
        common.append("integer")
    return list(dict.fromkeys(each for each in common if each != "integer" or "number" not in common))


def _common(a: list[Any], b: list[Any]) -> list[Any]:
    known = {json_key(each) for each in b}
    return [each for each in a if json_key(each) in known]


def json_key(value: Any) -> str:
    """Equal for equal JSON values: 1 and 1.0 are, true and 1 are not."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(json_key(each) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{json_key(value[key])}" for key in sorted(value)) + "}"
    return json.dumps(value)


# -- exactly one ----------------------------------------------------------------------------------


def check_apart(branches: list[list[Schema]], at: str) -> None:
    """Checks that no value fits two branches: then `oneOf` is `anyOf`; otherwise it cannot be enforced."""
    for index, mine in enumerate(branches):
        for other in branches[index + 1 :]:
            if not all(_apart(a, b) for a in mine for b in other):
                raise unsupported(
                    "oneOf", at, "a value may fit two of its branches; use anyOf, or a property with a const in each"
                )


def _apart(a: Schema, b: Schema) -> bool:
    """Whether no value generated for one of them is valid for the other. Generated objects have only named
    properties."""
    if "enum" in a and "enum" in b:
        return not _common(a["enum"], b["enum"])
    types = _common_types(_types(a), _types(b))
    if "enum" in a or "enum" in b:
        listed, free = (a, b) if "enum" in a else (b, a)
        return not any(type_of(value) in _types(free) or _fits_number(value, free) for value in listed["enum"])
    return not types or (types == ["object"] and _objects_apart(a, b)) or (_bounded_apart(a, b, types))


def _types(schema: Schema) -> list[str]:
    if "type" in schema:
        found: list[str] = schema["type"]
        return found
    if "enum" in schema:
        return list(dict.fromkeys(type_of(value) for value in schema["enum"]))
    return implied_types(schema)


def _fits_number(value: Any, schema: Schema) -> bool:
    return type_of(value) == "integer" and "number" in _types(schema)


def _bounded_apart(a: Schema, b: Schema, types: list[str]) -> bool:
    """Whether ranges of numbers, or lengths of strings and arrays, do not overlap."""
    low, high = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}.get(
        types[0], ("minimum", "maximum")
    )
    if len(types) > 1 or types[0] not in ("string", "array", "number", "integer"):
        return False
    return any(high in x and low in y and x[high] < y[low] for x, y in ((a, b), (b, a)))


def _objects_apart(a: Schema, b: Schema) -> bool:
    return _differ_in_a_property(a, b) or (_lacks(a, b) and _lacks(b, a))


def _lacks(a: Schema, b: Schema) -> bool:
    """Objects generated for `a` never have a property that `b` requires."""
    if a.get("additionalProperties", False) is not False or "patternProperties" in a:
        return False
    return any(name not in a.get("properties", {}) for name in b.get("required", ()))


def _differ_in_a_property(a: Schema, b: Schema) -> bool:
    """A property that both require has values of different lists."""
    for name in set(a.get("required", ())) & set(b.get("required", ())):
        mine, other = a.get("properties", {}).get(name), b.get("properties", {}).get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            x, y = plain_types(mine), plain_types(other)
            if "enum" in x and "enum" in y and not _common(x["enum"], y["enum"]):
                return True
    return False


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


_IMPLIES = {
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    ),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format", "x-grammar"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}  # fmt: skip


def implied_types(schema: Schema) -> list[str]:
    """The type whose keywords a schema without `type` uses; all types if it has none."""
    for name, keywords in _IMPLIES.items():
        if any(keyword in schema for keyword in keywords):
            return [name]
    return ["object", "array", "string", "number", "boolean", "null"]


def keywords_of(type_name: str) -> tuple[str, ...]:
    return _IMPLIES.get("number" if type_name == "integer" else type_name, ())
