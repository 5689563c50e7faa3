"""Arguments that a format carries as plain text, typed by the tool's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from bough.parsers.events import ToolSpec
from bough.parsers.json_stream import mend_json
from bough.parsers.literals import literal_to_json

JsonType = Literal["string", "integer", "number", "boolean", "null", "object", "array"]
ALL_TYPES: frozenset[JsonType] = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_MAX_HOPS = 16
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


class Schema(msgspec.Struct, frozen=True):
    """A place in a tool's schema, where nested values are read one by one. Empty: it says nothing about the value."""

    here: Any = {}
    root: Mapping[str, Any] = {}

    @property
    def types(self) -> frozenset[JsonType]:
        return _types(self.here, self.root, _MAX_HOPS)

    def child(self, key: str) -> Schema:
        """The schema of an object's member."""
        here = _follow(self.here, self.root)
        properties = here.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return Schema(properties[key], self.root)
        return Schema(here.get("additionalProperties"), self.root)

    def item(self) -> Schema:
        """The schema of a list's members (of an object's member called `item`, where it is one)."""
        here = _follow(self.here, self.root)
        return Schema(here["items"], self.root) if "items" in here else self.child("item")


class ArgumentTypes:
    """What the offered tools' schemas say about each argument."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def of(self, tool: str, argument: str) -> frozenset[JsonType]:
        """The types the schema allows; empty: it says nothing."""
        root = self._schemas.get(tool)
        if root is None:
            return frozenset()
        properties = _follow(root, root).get("properties")
        if not isinstance(properties, Mapping) or argument not in properties:
            return frozenset()
        return _types(properties[argument], root, _MAX_HOPS)

    def schema(self, tool: str) -> Schema:
        """What the tool's arguments, together, may be."""
        root = self._schemas.get(tool, {})
        return Schema(root, root)

    def names(self, tool: str) -> list[str]:
        """The tool's arguments in the order the schema lists them."""
        root = self._schemas.get(tool, {})
        properties = _follow(root, root).get("properties")
        return list(properties) if isinstance(properties, Mapping) else []


def encode_text(text: str) -> str:
    """The inside of a JSON string; pieces may be encoded one by one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]


def encode_typed(text: str, types: frozenset[JsonType]) -> str:
    """`text` as JSON of one of `types` (none: whatever it looks like); what fits none of them stays a string."""
    wanted = types or ALL_TYPES
    guess = not types
    bare = text.strip()
    if "null" in wanted and (bare == "null" or (bare == "None" and not guess)):
        return "null"
    if "boolean" in wanted and (bare if guess else bare.lower()) in ("true", "false"):
        return bare.lower()
    if "integer" in wanted and not guess and (integer := _as_integer(bare)) is not None:
        return integer
    if "number" in wanted and _NUMBER.fullmatch(bare):
        number = mend_json(bare) if guess else _as_number(bare)
        if number is not None:
            return number
    for kind, root in (("object", "{"), ("array", "[")):
        if kind in wanted and bare.startswith(root):
            mended = mend_json(bare, root=root)
            if mended is None:
                mended = literal_to_json(bare)
            if mended is not None and mended.startswith(root):
                return mended
    return f'"{encode_text(text)}"'


def _as_integer(text: str) -> str | None:
    """Digits, also written `+7`, `007` or `7.0`."""
    sign = "-" if text.startswith("-") else ""
    digits, point, fraction = text.removeprefix("-").removeprefix("+").partition(".")
    if not (digits.isascii() and digits.isdigit()) or fraction.strip("0") or (point and not digits):
        return None
    digits = digits.lstrip("0") or "0"
    return digits if digits == "0" else sign + digits


def _as_number(text: str) -> str | None:
    mended = mend_json(text)
    if mended is not None:
        return mended
    value = float(text)
    return json.dumps(value) if value - value == 0 else None


def _follow(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema behind local references."""
    for _ in range(_MAX_HOPS):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return {}


def _types(schema: Any, root: Mapping[str, Any], hops: int) -> frozenset[JsonType]:
    found: set[JsonType] = set()
    schema = _follow(schema, root)
    declared = schema.get("type")
    for name in [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []:
        if name in ALL_TYPES:
            found.add(name)
    if found:
        return frozenset(found)
    values = schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    if "const" in schema:
        return frozenset((_type_of(schema["const"]),))
    for combination in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(combination) or ():
            if hops > 0:
                found |= _types(option, root, hops - 1)
    if not found and "properties" in schema:
        found.add("object")
    if not found and "items" in schema:
        found.add("array")
    return frozenset(found)


def _type_of(value: Any) -> JsonType:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
