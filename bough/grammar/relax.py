"""Removes from clients' schemas what can't be enforced while generating, and lists what was removed. The structure is
never changed: types, `required`, properties and `enum` are enforced, or the schema is refused.
"""

from __future__ import annotations

from typing import Any, Final

from bough.grammar.errors import BadGrammar
from bough.grammar.formats import FORMATS, OF_NUMBERS
from bough.grammar.keywords import REFUSED, Schema, escape, is_harmless
from bough.grammar.regex import parse_search
from bough.grammar.rules import EMPTY
from bough.grammar.sources import of_ebnf

RELAXED: Final = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "multipleOf", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
"""Keywords that are left out, unless the client asks for strictness."""

ALWAYS_RELAXED: Final = frozenset({"uniqueItems"})
"""Keywords that are left out even then: pydantic writes them for sets, which it makes of any array."""

_SUBSCHEMAS: Final = ("items", "additionalProperties", "additionalItems", "propertyNames")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")


def relax(schema: Any, *, strict: bool, at: str = "") -> tuple[Any, list[str]]:
    """The schema without what can't be enforced, and JSON pointers to what was left out. `strict`: removes only unknown
    formats and unique items; the rest stays and is refused when it is compiled. Values that are not schemas are
    returned unchanged."""
    if not isinstance(schema, dict):
        return schema, []
    made: Schema = {}
    dropped: list[str] = []
    for keyword, value in schema.items():
        place = f"{at}/{escape(str(keyword))}"
        if _is_dropped(keyword, value, schema, strict=strict):
            dropped.append(place)
            continue
        inner: list[str] = []
        if keyword in _MAPS and isinstance(value, dict):
            pairs = {
                name: relax(each, strict=strict, at=f"{place}/{escape(str(name))}") for name, each in value.items()
            }
            value = {name: each for name, (each, _) in pairs.items()}
            inner = [each for _, more in pairs.values() for each in more]
        elif keyword in _LISTS and isinstance(value, list):
            rows = [relax(each, strict=strict, at=f"{place}/{index}") for index, each in enumerate(value)]
            value = [each for each, _ in rows]
            inner = [each for _, more in rows for each in more]
        elif keyword in _SUBSCHEMAS:
            value, inner = relax(value, strict=strict, at=place)
        made[keyword] = value
        dropped += inner
    return made, dropped


def _is_dropped(keyword: str, value: Any, schema: Schema, *, strict: bool) -> bool:
    if keyword in ALWAYS_RELAXED or (keyword in RELAXED and not strict):
        return keyword in REFUSED and not is_harmless(keyword, value)
    if keyword == "format" and isinstance(value, str):
        return (value not in FORMATS and value not in OF_NUMBERS) or ("pattern" in schema and not strict)
    if strict or not isinstance(value, str):
        return False
    return (keyword == "pattern" and not _is_readable(value)) or (keyword == "x-grammar" and not _is_grammar(value))


def _is_readable(pattern: str) -> bool:
    try:
        parse_search(pattern, EMPTY)
    except (BadGrammar, RecursionError):
        return False
    return True


def _is_grammar(source: str) -> bool:
    try:
        of_ebnf(source)
    except (BadGrammar, RecursionError):
        return False
    return True
