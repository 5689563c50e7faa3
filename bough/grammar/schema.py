"""JSON schemas as grammar trees. Every text that matches the tree is valid for the schema; schemas that can't be
guaranteed are refused. Properties are generated in the schema's order, unnamed ones only if `additionalProperties` says
so, and white space only after brackets, commas and colons, and before closing brackets.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from bough.grammar.errors import BadGrammar, shorten, unsupported
from bough.grammar.formats import FORMATS, OF_NUMBERS
from bough.grammar.keywords import JsonSchema, Schema, constraints, escape, unescape
from bough.grammar.lark import read_grammar
from bough.grammar.merge import COMBINING, check_apart, expand, implied_types, keywords_of, plain_types, type_of
from bough.grammar.numbers import NumberBounds, integers, numbers
from bough.grammar.regex import in_json, parse_search
from bough.grammar.rules import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Grammar,
    LiteralText,
    Node,
    Ref,
    Repeat,
    Seq,
    alt,
    chars,
    complement,
    length_range,
    optional,
    prefixed,
    repeat,
    seq,
    text,
)

MAX_WHITESPACE = 8
_BARE = complement(((0, 31), (34, 34), (92, 92)))
_HEX = Chars(((48, 57), (65, 70), (97, 102)))
_MAX_NODES = 20_000


def schema_grammar(schema: JsonSchema, *, max_whitespace: int = MAX_WHITESPACE) -> Grammar:
    """The grammar of a schema's values. Raises `BadGrammar` with the JSON pointer of what can't be enforced."""
    return SchemaRules(max_whitespace).whole(schema)


def any_object(*, max_whitespace: int = MAX_WHITESPACE) -> Grammar:
    """The grammar of JSON objects."""
    return SchemaRules(max_whitespace).whole({"type": "object", "additionalProperties": True})


class SchemaRules:
    """Collects the rules of one schema."""

    def __init__(self, max_whitespace: int) -> None:
        self._rules: dict[str, Node] = {}
        self._root: JsonSchema = True
        self._by_pointer: dict[str, str] = {}
        self._num_nodes = 0
        space = Chars(((9, 10), (32, 32)))
        self._space = self._shared("space", repeat(space, 0, max_whitespace)) if max_whitespace else EMPTY

    def whole(self, schema: JsonSchema) -> Grammar:
        self._root = schema
        self._rules["root"] = Ref(self._rule_of("", schema))
        return Grammar(self._rules)

    # -- rules ------------------------------------------------------------------------------------

    def _shared(self, name: str, node: Node) -> Node:
        """A rule that many places use."""
        self._rules.setdefault(name, node)
        return Ref(name)

    def _new_rule(self, kind: str, node: Node) -> Node:
        name = f"{kind}_{len(self._rules)}"
        self._rules[name] = node
        return Ref(name)

    def _rule_of(self, pointer: str, schema: JsonSchema) -> str:
        """The rule of the schema at a pointer: made once, so that references may lead back to it."""
        if pointer not in self._by_pointer:
            name = self._by_pointer[pointer] = f"value_{len(self._by_pointer)}"
            self._rules[name] = NOTHING
            self._rules[name] = self.node(schema, pointer)
        return self._by_pointer[pointer]

    def _resolve(self, reference: str, at: str) -> tuple[JsonSchema, str]:
        pointer, found = self._find(reference, at)
        hops = 0
        while isinstance(found, dict) and set(constraints(found, pointer)) == {"$ref"}:
            hops += 1
            if hops > 64:
                raise unsupported("$ref", at, "it leads round in a circle")
            pointer, found = self._find(found["$ref"], pointer)
        return found, pointer

    def _find(self, reference: str, at: str) -> tuple[str, JsonSchema]:
        if reference not in ("#", "") and not reference.startswith("#/"):
            raise unsupported("$ref", at, f"{shorten(reference)!r} is outside this schema or names an anchor")
        found: Any = self._root
        steps = reference.split("/")[1:]
        for step in steps:
            key = unescape(step)
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise BadGrammar(f"the reference {shorten(reference)!r} leads nowhere", at=f"{at}/$ref")
        if not isinstance(found, dict | bool):
            raise BadGrammar(
                f"the reference {shorten(reference)!r} leads to something that is no schema", at=f"{at}/$ref"
            )
        return "".join(f"/{step}" for step in steps), found

    # -- any schema -------------------------------------------------------------------------------

    def node(self, schema: JsonSchema, at: str) -> Node:
        """The values of a schema."""
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise BadGrammar(f"the schema comes to more than {_MAX_NODES} parts", at=at)
        if schema is True:
            return self._any_value()
        if schema is False:
            return NOTHING
        given = constraints(schema, at)
        combining = [keyword for keyword in COMBINING if keyword in given]
        if not combining:
            return self._plain(plain_types(given), at)
        if len(given) == 1:
            return self._alone(combining[0], given, at)
        return alt(*(self._plain(each, at) for each in expand(schema, at, self._resolve)))

    def _alone(self, keyword: str, given: Schema, at: str) -> Node:
        """A combining keyword without other keywords beside it, whose parts need no merging."""
        if keyword == "$ref":
            target, pointer = self._resolve(given["$ref"], at)
            return Ref(self._rule_of(pointer, target))
        parts = given[keyword]
        if keyword == "allOf" and len(parts) > 1:
            return alt(*(self._plain(each, at) for each in expand(given, at, self._resolve)))
        if keyword == "oneOf":
            check_apart([expand(each, f"{at}/oneOf/{i}", self._resolve) for i, each in enumerate(parts)], at)
        return alt(*(self.node(each, f"{at}/{keyword}/{index}") for index, each in enumerate(parts)))

    def _plain(self, schema: Schema, at: str) -> Node:
        """The values of a schema without combining keywords, by type."""
        if "enum" in schema:
            return self._listed(schema, at)
        types = schema["type"] if "type" in schema else implied_types(schema)
        if "number" in types:
            types = [each for each in types if each != "integer"]
        return alt(*(self._of_type(each, schema, at) for each in dict.fromkeys(types)))

    def _listed(self, schema: Schema, at: str) -> Node:
        """Values of an enum. Keywords beside it are refused if they would have to be checked for each value."""
        types = schema.get("type", ["integer", "number", "string", "boolean", "null", "array", "object"])
        values = [v for v in schema["enum"] if type_of(v) in types or (type_of(v) == "integer" and "number" in types)]
        for keyword in schema:
            if keyword not in ("enum", "type") and any(keyword in keywords_of(type_of(value)) for value in values):
                raise unsupported(keyword, at, "it stands beside enum or const: leave out the values it forbids")
        return alt(*(text(_dump(value)) for value in values))

    def _of_type(self, name: str, schema: Schema, at: str) -> Node:
        match name:
            case "null":
                return LiteralText("null")
            case "boolean":
                return alt(LiteralText("true"), LiteralText("false"))
            case "integer":
                return self._new_rule("integer", integers(_bounds(schema, at)))
            case "number":
                return self._new_rule("number", numbers(_bounds(schema, at)))
            case "string":
                return self._string(schema, at)
            case "array":
                return self._array(schema, at)
            case _:
                return self._object(schema, at)

    def _any_value(self) -> Node:
        """Any JSON value."""
        if "any_value" not in self._rules:
            self._rules["any_value"] = NOTHING
            kinds = ("object", "array", "string", "number", "boolean", "null")
            open_schema = {"additionalProperties": True}
            self._rules["any_value"] = alt(*(self._of_type(kind, open_schema, "") for kind in kinds))
        return Ref("any_value")

    # -- strings ----------------------------------------------------------------------------------

    def _character(self) -> Node:
        """One character of a JSON string, as it is or escaped."""
        hexes = alt(
            seq(Chars(((48, 57), (65, 67), (69, 70), (97, 99), (101, 102))), repeat(_HEX, 3, 3)),
            seq(Chars(((68, 68), (100, 100))), Chars(((48, 55),)), repeat(_HEX, 2, 2)),
        )
        escapes = alt(chars((ord(c), ord(c)) for c in '"\\/bfnrt'), seq(LiteralText("u"), hexes))
        return self._shared("character", alt(chars(_BARE), seq(LiteralText("\\"), escapes)))

    def _string(self, schema: Schema, at: str) -> Node:
        if not any(keyword in schema for keyword in keywords_of("string")):
            return self._shared("string", seq(LiteralText('"'), repeat(self._character(), 0, None), LiteralText('"')))
        return self._new_rule("string", seq(LiteralText('"'), self._string_body(schema, at), LiteralText('"')))

    def _string_body(self, schema: Schema, at: str) -> Node:
        low = int(schema.get("minLength", 0))
        high = int(schema["maxLength"]) if "maxLength" in schema else None
        if high is not None and low > high:
            return NOTHING
        if "x-grammar" in schema:
            return self._in_grammar(schema, at)
        if "pattern" in schema and "format" in schema:
            raise unsupported("format", at, "it stands beside pattern")
        if "format" in schema and schema["format"] not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise BadGrammar(
                f"the format {shorten(schema['format'])!r} can't be enforced while generating; known are {known}",
                at=f"{at}/format",
            )
        if "pattern" not in schema and "format" not in schema:
            return repeat(self._character(), low, high)
        keyword = "pattern" if "pattern" in schema else "format"
        pattern = schema["pattern"] if keyword == "pattern" else FORMATS[schema["format"]]
        any_character = chars(complement(()))
        try:
            node = parse_search(pattern, repeat(any_character, 0, None))
        except BadGrammar as error:
            raise BadGrammar(str(error), at=f"{at}/{keyword}") from None
        fitted = _fit_length(node, low, high)
        if fitted is None:
            raise unsupported(
                "maxLength" if high is not None else "minLength", at, f"it stands beside a {keyword} of another length"
            )
        return in_json(fitted)

    def _in_grammar(self, schema: Schema, at: str) -> Node:
        """A text in the language of a grammar of its own, as a JSON string writes it."""
        beside = [keyword for keyword in keywords_of("string") if keyword in schema and keyword != "x-grammar"]
        if beside:
            raise unsupported(beside[0], at, "it stands beside x-grammar")
        try:
            inner = read_grammar(schema["x-grammar"])
        except BadGrammar as error:
            raise BadGrammar(str(error), at=f"{at}/x-grammar") from None
        prefix = f"lang{len(self._rules)}"
        for name, node in inner.rules.items():
            self._rules[f"{prefix}_{name}"] = in_json(prefixed(node, f"{prefix}_"))
        return Ref(f"{prefix}_{inner.root}")

    # -- arrays -----------------------------------------------------------------------------------

    def _array(self, schema: Schema, at: str) -> Node:
        first, first_at = schema.get("prefixItems"), "prefixItems"
        rest: JsonSchema = schema.get("items", True)
        if isinstance(rest, list):
            first, first_at, rest = rest, "items", schema.get("additionalItems", False)
        elif first is not None and "items" not in schema:
            rest = False
        low = int(schema.get("minItems", 0))
        high = int(schema["maxItems"]) if "maxItems" in schema else None
        if high is not None and low > high:
            return NOTHING
        fixed = [self.node(each, f"{at}/{first_at}/{i}") for i, each in enumerate(first or ())]
        other = self.node(rest, f"{at}/items") if rest is not False and (high is None or high > len(fixed)) else NOTHING
        if other != NOTHING and not isinstance(other, Ref):
            other = self._new_rule("item", other)
        body = self._items(fixed, other, low, high)
        return self._new_rule("array", seq(LiteralText("["), body, LiteralText("]"))) if body != NOTHING else NOTHING

    def _items(self, fixed: list[Node], other: Node, low: int, high: int | None) -> Node:
        """Items between the brackets. A tuple may end early, but not before `low` items."""
        if not fixed:
            if other == NOTHING or high == 0:
                return EMPTY if low == 0 else NOTHING
            following = seq(LiteralText(","), self._space, other)
            most = None if high is None else high - 1
            some = seq(self._space, other, self._repeated(following, max(low - 1, 0), most), self._space)
            return optional(some) if low == 0 else some
        if high is not None:
            fixed = fixed[:high]
        more = high is None or high > len(fixed)
        tail: Node = EMPTY if low <= len(fixed) else NOTHING
        if other != NOTHING and more:
            following = seq(LiteralText(","), self._space, other)
            most = None if high is None else high - len(fixed)
            tail = self._repeated(following, max(low - len(fixed), 0), most)
        for index in range(len(fixed) - 1, -1, -1):
            here = seq(*((LiteralText(","), self._space) if index else (self._space,)), fixed[index], tail)
            tail = optional(here) if index >= low and here != NOTHING else here
            if here == NOTHING and index >= low:
                tail = EMPTY
        return seq(tail, self._space) if tail not in (EMPTY, NOTHING) else tail

    def _repeated(self, node: Node, low: int, high: int | None) -> Node:
        """For large counts a rule is repeated, because backends count rules instead of copying them."""
        if max(low, high or 0) > 8 and not isinstance(node, Ref):
            node = self._new_rule("more", node)
        return repeat(node, low, high)

    # -- objects ----------------------------------------------------------------------------------

    def _object(self, schema: Schema, at: str) -> Node:
        named: dict[str, JsonSchema] = dict(schema.get("properties", {}))
        required = list(dict.fromkeys(schema.get("required", ())))
        extra: JsonSchema = schema.get("additionalProperties", False)
        for name in required:
            if name not in named:
                # Without a say in `properties` it may be anything that `additionalProperties` allows.
                named[name] = extra if "additionalProperties" in schema else True
        patterns: dict[str, JsonSchema] = schema.get("patternProperties", {})
        others = self._other_members(schema, named, patterns, extra, at)
        members = self._named_members(named, required, at)
        if members is None:
            return NOTHING
        low, high = self._count_bounds(schema, members, others, at)
        body = self._members(members, others, low, high)
        return self._new_rule("object", seq(LiteralText("{"), body, LiteralText("}")))

    def _named_members(
        self, named: dict[str, JsonSchema], required: list[str], at: str
    ) -> list[tuple[Node, bool]] | None:
        """(member, required) in the schema's order. None: a required one has no value."""
        members: list[tuple[Node, bool]] = []
        for name, each in named.items():
            value = self.node(each, f"{at}/properties/{escape(name)}")
            if value == NOTHING:
                if name in required:
                    return None
                continue
            member = seq(text(f"{_dump(name)}:"), self._space, value)
            members.append((self._new_rule("member", member), name in required))
        return members

    def _other_members(
        self, schema: Schema, named: dict[str, JsonSchema], patterns: dict[str, JsonSchema], extra: JsonSchema, at: str
    ) -> Node:
        """A member that is not named."""
        if patterns:
            if named or len(patterns) > 1 or extra is not False:
                raise unsupported("patternProperties", at, "only one pattern, and nothing else, can name properties")
            ((pattern, value),) = patterns.items()
            names = self._string({"pattern": pattern}, f"{at}/patternProperties")
            return self._member(names, value, f"{at}/patternProperties/{escape(pattern)}")
        if extra is False:
            return NOTHING
        names = self._other_names(list(named))
        if "propertyNames" in schema:
            if named:
                raise unsupported("propertyNames", at, "it stands beside properties")
            names = self._names(schema["propertyNames"], f"{at}/propertyNames")
        return self._member(names, extra, f"{at}/additionalProperties")

    def _member(self, names: Node, value: JsonSchema, at: str) -> Node:
        node = self.node(value, at)
        return self._new_rule("member", seq(names, LiteralText(":"), self._space, node)) if node != NOTHING else NOTHING

    def _names(self, schema: JsonSchema, at: str) -> Node:
        if isinstance(schema, bool):
            return self._string({}, at) if schema else NOTHING
        parts = []
        for each in expand(schema, at, self._resolve):
            if "enum" in each:
                each = {**each, "enum": [value for value in each["enum"] if isinstance(value, str)]}
            if "string" in each.get("type", ["string"]):
                parts.append(self._plain({**each, "type": ["string"]}, at))
        return alt(*parts)

    def _other_names(self, taken: list[str]) -> Node:
        """Strings other than the taken ones."""
        if not taken:
            return self._string({}, "")
        letters: dict[str, Any] = {}
        for name in taken:
            inner = letters
            for letter in name:
                inner = inner.setdefault(letter, {})
            inner[""] = True
        return self._new_rule("name", seq(LiteralText('"'), self._differing(letters), LiteralText('"')))

    def _differing(self, taken: dict[str, Any]) -> Node:
        """Strings of plain characters that differ from all taken names (given as a tree)."""
        plain = chars(_BARE)
        first = [(ord(letter), ord(letter)) for letter in taken if letter]
        outside = chars(complement(tuple(sorted([*first, (0, 31), (34, 34), (92, 92)]))))
        branches: list[Node] = [seq(outside, repeat(plain, 0, None))]
        if "" not in taken:
            branches.append(EMPTY)
        for letter, inner in taken.items():
            if letter and letter >= " " and letter not in '"\\':
                branches.append(seq(LiteralText(letter), self._differing(inner)))
        return self._new_rule("name_rest", alt(*branches))

    def _count_bounds(
        self, schema: Schema, members: list[tuple[Node, bool]], others: Node, at: str
    ) -> tuple[int, int | None]:
        """How many members that are not named an object may have."""
        low = int(schema.get("minProperties", 0))
        high = int(schema["maxProperties"]) if "maxProperties" in schema else None
        num_required = sum(required for _, required in members)
        if others == NOTHING:
            if low <= num_required and (high is None or high >= len(members)):
                return 0, 0
        elif not members and low <= 1:
            return low, high
        elif low <= num_required and high is None:
            return 0, None
        keyword = "minProperties" if low > num_required else "maxProperties"
        raise unsupported(keyword, at, "which properties there are decides how many")

    def _members(self, members: list[tuple[Node, bool]], others: Node, low: int, high: int | None) -> Node:
        """Members between the braces, in order: `some` before any is written, `later` after one."""
        later: Node = EMPTY
        some: Node = NOTHING
        may_be_empty = low == 0
        if others != NOTHING and high != 0:
            following = seq(LiteralText(","), self._space, others)
            later = self._repeated(following, 0, None if high is None or members else high - 1)
            some = seq(others, later)
        for member, required in reversed(members):
            if later != EMPTY and not isinstance(later, Ref):
                later = self._new_rule("members", later)
            if some != NOTHING and not isinstance(some, Ref):
                some = self._new_rule("members", some)
            written = seq(member, later)
            some = written if required else alt(written, some)
            comma = seq(LiteralText(","), self._space, written)
            later = comma if required else alt(comma, later)
            may_be_empty = may_be_empty and not required
        if some == NOTHING:
            return EMPTY if may_be_empty else NOTHING
        padded = seq(self._space, some, self._space)
        return alt(EMPTY, padded) if may_be_empty else padded


def _fit_length(node: Node, low: int, high: int | None) -> Node | None:
    """A part of the node's language, with texts of `low` to `high` characters only. None: narrowing repetitions won't do."""
    parts: list[Node] = list(node.parts) if isinstance(node, Seq) else [node]
    least = length_range(node)[0]
    for index, part in enumerate(parts):
        shortest = length_range(part.node)[0] if isinstance(part, Repeat) else 0
        if isinstance(part, Repeat) and shortest and least < low:
            times = part.low + -(-(low - least) // shortest)
            times = times if part.high is None else min(times, part.high)
            parts[index] = Repeat(part.node, times, part.high)
            least += (times - part.low) * shortest
    if high is not None:
        _shorten_repeats(parts, high)
    fitted = seq(*parts)
    least, most = length_range(fitted)
    if least >= low and high is not None and (most is None or most > high) and least <= high:
        fitted = _capped_to(fitted, high)
        most = length_range(fitted)[1]
    return fitted if least >= low and (high is None or (most is not None and most <= high)) else None


def _capped_to(node: Node, high: int) -> Node:
    """A part of the node's language with at most `high` characters: repetitions everywhere in it, optional parts among them,
    are capped at the largest number above their least that is short enough. It may still be too long, where none is."""
    low_cap, high_cap = 0, high
    while low_cap < high_cap:  # the largest cap that fits
        middle = (low_cap + high_cap + 1) // 2
        most = length_range(_capped(node, middle))[1]
        if most is not None and most <= high:
            low_cap = middle
        else:
            high_cap = middle - 1
    return _capped(node, low_cap)


def _capped(node: Node, cap: int) -> Node:
    match node:
        case Seq():
            return seq(*(_capped(part, cap) for part in node.parts))
        case Alt():
            return alt(*(_capped(part, cap) for part in node.parts))
        case Repeat():
            most = node.low + cap
            return repeat(_capped(node.node, cap), node.low, most if node.high is None else min(most, node.high))
        case _:
            return node


def _shorten_repeats(parts: list[Node], high: int) -> None:
    """Shares what `high` characters leave room for among the repetitions."""
    if (length_range(seq(*parts))[1] or high + 1) <= high:
        return
    stretchy = [i for i, part in enumerate(parts) if isinstance(part, Repeat) and length_range(part.node)[1]]
    others = length_range(seq(*(part for i, part in enumerate(parts) if i not in stretchy)))[1]
    if others is None or not stretchy:
        return
    needed = sum(part.low * (length_range(part.node)[1] or 0) for part in parts if isinstance(part, Repeat))
    share = max(0, high - others - needed) // len(stretchy)
    for index in stretchy:
        part = parts[index]
        assert isinstance(part, Repeat), "only repetitions stretch"
        most = part.low + share // (length_range(part.node)[1] or 1)
        parts[index] = repeat(part.node, part.low, most if part.high is None else min(most, part.high))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))


def _bounds(schema: Schema, at: str) -> NumberBounds:
    low, low_open = _edge(schema, "minimum", "exclusiveMinimum", at, max)
    high, high_open = _edge(schema, "maximum", "exclusiveMaximum", at, min)
    kind = schema.get("format")
    if kind is not None and kind not in OF_NUMBERS and kind not in FORMATS:
        raise BadGrammar(f"the format {shorten(kind)!r} can't be enforced while generating", at=f"{at}/format")
    if kind in ("int32", "int64"):
        edge = Decimal(2) ** (31 if kind == "int32" else 63)
        low, low_open = (low, low_open) if low is not None and low >= -edge else (-edge, False)
        high, high_open = (high, high_open) if high is not None and high < edge else (edge - 1, False)
    return NumberBounds(low, high, low_open, high_open)


def _edge(schema: Schema, closed: str, exclusive: str, at: str, pick: Any) -> tuple[Decimal | None, bool]:
    """One bound, and whether it is exclusive. In old drafts the exclusive keyword is true or false."""
    edge = _decimal(schema[closed]) if closed in schema else None
    strict = schema.get(exclusive)
    if isinstance(strict, bool) or strict is None:
        return edge, bool(strict) and edge is not None
    other = _decimal(strict)
    if edge is None or pick(edge, other) == other:
        return other, True
    return edge, False


def _decimal(value: float) -> Decimal:
    return Decimal(str(value)) if isinstance(value, float) else Decimal(value)
