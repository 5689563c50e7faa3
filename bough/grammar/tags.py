"""Structural tags: text that is free outside its tags and follows a schema, a pattern or a grammar inside them.

The formats are those of xgrammar's structural tags, plus the older form with `structures` and `triggers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bough.grammar.errors import BadGrammar, shorten
from bough.grammar.keywords import MAX_BYTES, check_limits
from bough.grammar.notation import to_ebnf
from bough.grammar.rules import Grammar
from bough.grammar.sources import of_ebnf, of_pattern, of_schema

Format = dict[str, Any]

_INSIDE: dict[str, tuple[str, ...]] = {
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("content",),
    "triggered_tags": ("tags",),
    "token_triggered_tags": ("tags",),
    "tags_with_separator": ("tags",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("content",),
}
_LEAVES = ("const_string", "any_text", "any_tokens", "token", "exclude_token", "grammar", "regex", "json_schema")


def load_tag(source: str) -> Format:
    """The `format` of a structural tag. Raises `BadGrammar` if it is invalid."""
    if len(source.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise BadGrammar(f"the structural tag is larger than {MAX_BYTES} bytes", at="")
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the structural tag is not JSON: {shorten(str(error))}", at="") from None
    check_limits(tag)
    if not isinstance(tag, dict):
        raise BadGrammar("a structural tag is an object", at="")
    if "structures" in tag:
        return _from_structures(tag)
    inner = tag.get("format")
    if not isinstance(inner, dict):
        raise BadGrammar("a structural tag has a format", at="/format")
    return inner


def _from_structures(tag: Format) -> Format:
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or not structures or not _are_texts(triggers):
        raise BadGrammar(
            "structures is a list of begin, schema and end, and triggers is a list of texts", at="/structures"
        )
    tags = []
    for index, each in enumerate(structures):
        if not isinstance(each, dict) or not _are_texts([each.get("begin"), each.get("end")]):
            raise BadGrammar("a structure has a begin, a schema and an end", at=f"/structures/{index}")
        content = {"type": "json_schema", "json_schema": each.get("schema", {"type": "object"})}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(each, str) for each in values)


def native_tag(source: str, max_whitespace: int) -> tuple[str, list[str]]:
    """The tag for xgrammar, its schemas and patterns written as grammars of ours; and the texts it spells out."""
    spelled: list[str] = []

    def leaf(format: Format, at: str) -> Format:
        match format["type"]:
            case "json_schema" if format.get("style", "json") == "json":
                return {"type": "grammar", "grammar": to_ebnf(_schema_of(format, at, max_whitespace))}
            case "json_schema":
                raise BadGrammar("only the style json is supported", at=f"{at}/style")
            case "regex" | "grammar":
                return {"type": "grammar", "grammar": to_ebnf(_grammar_of(format, at))}
        return format

    inner = rewrite(load_tag(source), "/format", leaf, spelled.append)
    return json.dumps({"type": "structural_tag", "format": inner}), spelled


def grammars_in(source: str, max_whitespace: int) -> list[Grammar]:
    """The grammars of a tag's schemas, patterns and grammars. Raises `BadGrammar`."""
    found: list[Grammar] = []

    def leaf(format: Format, at: str) -> Format:
        match format["type"]:
            case "json_schema":
                found.append(_schema_of(format, at, max_whitespace))
            case "regex" | "grammar":
                found.append(_grammar_of(format, at))
        return format

    rewrite(load_tag(source), "/format", leaf, lambda _: None)
    return found


def _schema_of(format: Format, at: str, max_whitespace: int) -> Grammar:
    schema = format.get("json_schema")
    if not isinstance(schema, dict | bool):
        raise BadGrammar("json_schema is a schema", at=f"{at}/json_schema")
    try:
        return of_schema(schema, max_whitespace)
    except BadGrammar as error:
        # The schema's own pointers start at the schema.
        raise BadGrammar(str(error).removeprefix("at /: ").removeprefix("at "), at=f"{at}/json_schema") from None


def _grammar_of(format: Format, at: str) -> Grammar:
    key = "pattern" if format["type"] == "regex" else "grammar"
    source = format.get(key)
    if not isinstance(source, str):
        raise BadGrammar(f"{key} is a text", at=f"{at}/{key}")
    try:
        return of_pattern(source) if key == "pattern" else of_ebnf(source)
    except BadGrammar as error:
        raise BadGrammar(str(error), at=f"{at}/{key}") from None


def rewrite(format: Any, at: str, leaf: Callable[[Format, str], Format], spell: Callable[[str], None]) -> Format:
    """The same format with its leaves replaced. `spell` is called with every literal text."""
    if not isinstance(format, dict) or format.get("type") not in (*_INSIDE, *_LEAVES):
        kind = format.get("type") if isinstance(format, dict) else format
        raise BadGrammar(f"there is no format {shorten(kind)!r}; known are {', '.join((*_LEAVES, *_INSIDE))}", at=at)
    for key in ("begin", "end", "value", "separator", "triggers", "token", "exclude_tokens", "trigger_tokens"):
        value = format.get(key)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                spell(text)
    kind = format["type"]
    if kind in _LEAVES:
        return leaf(format, at)
    changed = dict(format)
    for key in _INSIDE[kind]:
        inner = format.get(key)
        if isinstance(inner, list):
            changed[key] = [rewrite(each, f"{at}/{key}/{index}", leaf, spell) for index, each in enumerate(inner)]
        else:
            changed[key] = rewrite(inner, f"{at}/{key}", leaf, spell)
    return changed
