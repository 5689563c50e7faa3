"""Structural tags in Lark, for llguidance."""

from __future__ import annotations

from typing import Any

from bough.grammar.errors import BadGrammar
from bough.grammar.notation import lark_text, to_lark
from bough.grammar.rules import Grammar
from bough.grammar.sources import of_ebnf, of_pattern, of_schema
from bough.grammar.tags import Format, load_tag, rewrite

_ANY_TEXT = r"/(?s:.*)/"


def lark_tag(source: str, max_whitespace: int) -> tuple[str, list[str]]:
    """The tag as a Lark grammar, and the texts it spells out."""
    spelled: list[str] = []
    format = rewrite(load_tag(source), "/format", lambda leaf, _: leaf, spelled.append)
    writer = _Writer(max_whitespace)
    lines = ["%llguidance {}", f"start: {writer.show(format, '/format')}", *writer.lines]
    return "\n".join(lines) + "\n", spelled


class _Writer:
    def __init__(self, max_whitespace: int) -> None:
        self.lines: list[str] = []
        self._max_whitespace = max_whitespace
        self._count = 0

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _rule(self, kind: str, body: str, *, lazy: bool = False) -> str:
        name = self._name(kind)
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _grammar(self, grammar: Grammar) -> str:
        prefix = self._name("g")
        self.lines += to_lark(grammar, prefix)
        return f"{prefix}_{grammar.root}"

    def show(self, format: Format, at: str) -> str:
        """A format as one expression, in parentheses where it has several parts."""
        match format["type"]:
            case "const_string":
                return lark_text(_text(format, "value", at)) if format.get("value") else '""'
            case "json_schema" if format.get("style", "json") == "json":
                return self._leaf(format, "json_schema", at)
            case "regex":
                return self._leaf(format, "pattern", at)
            case "grammar":
                return self._leaf(format, "grammar", at)
            case "any_text" if (
                not format.get("excludes") and not format.get("max_tokens") and not format.get("max_chars")
            ):
                return self._rule("any", _ANY_TEXT)
            case "sequence":
                parts = [self.show(each, f"{at}/elements/{i}") for i, each in enumerate(format["elements"])]
                return f"({' '.join(parts)})"
            case "or":
                parts = [self.show(each, f"{at}/elements/{i}") for i, each in enumerate(format["elements"])]
                return f"({' | '.join(parts)})"
            case "optional" | "star" | "plus":
                sign = {"optional": "?", "star": "*", "plus": "+"}[format["type"]]
                return f"({self.show(format['content'], f'{at}/content')}){sign}"
            case "tag":
                return self._tag(format, at)
            case "tags_with_separator":
                return self._separated(format, at)
            case "triggered_tags":
                return self._triggered(format, at)
            case kind:
                raise BadGrammar(f"the format {kind!r} is not supported by llguidance here; xgrammar has it", at=at)

    def _leaf(self, format: Format, key: str, at: str) -> str:
        source: Any = format.get(key)
        try:
            match key:
                case "json_schema":
                    return self._grammar(of_schema(source, self._max_whitespace))
                case "pattern":
                    return self._grammar(of_pattern(source))
                case _:
                    return self._grammar(of_ebnf(source))
        except BadGrammar as error:
            raise BadGrammar(str(error), at=f"{at}/{key}") from None

    def _tag(self, format: Format, at: str, *, skip: int = 0) -> str:
        """`begin content end`, without the first `skip` characters of `begin`. Free text ends at the first `end`."""
        begin, content = _text(format, "begin", at)[skip:], format["content"]
        ends = format["end"] if isinstance(format["end"], list) else [_text(format, "end", at)]
        end = " | ".join(lark_text(each) if each else '""' for each in ends)
        opening = lark_text(begin) if begin else ""
        if content["type"] == "any_text" and not content.get("max_tokens") and not content.get("max_chars"):
            return f"({opening} {self._rule('until', f'{_ANY_TEXT} ({end})', lazy=True)})"
        return f"({opening} {self.show(content, f'{at}/content')} ({end}))"

    def _separated(self, format: Format, at: str) -> str:
        tags = [self._tag(each, f"{at}/tags/{i}") for i, each in enumerate(format["tags"])]
        one = self._rule("call", " | ".join(tags))
        separator = _text(format, "separator", at)
        more = "" if format.get("stop_after_first") else f" ({lark_text(separator) if separator else ''} {one})*"
        return f"({one}{more})" if format.get("at_least_one") else f"({one}{more})?"

    def _triggered(self, format: Format, at: str) -> str:
        """Free text up to a trigger, then what the tags that begin with it have after it."""
        segments = []
        for trigger in format.get("triggers") or ():
            matching = [
                self._tag(each, f"{at}/tags/{i}", skip=len(trigger))
                for i, each in enumerate(format["tags"])
                if _text(each, "begin", at).startswith(trigger)
            ]
            if not trigger or not matching:
                raise BadGrammar("every trigger is a text that a tag begins with", at=f"{at}/triggers")
            opening = self._rule("until", f"{_ANY_TEXT} {lark_text(trigger)}", lazy=True)
            segments.append(f"{opening} ({' | '.join(matching)})")
        if not segments:
            raise BadGrammar("there are no triggers", at=f"{at}/triggers")
        one = self._rule("segment", " | ".join(segments))
        if format.get("stop_after_first"):
            return one if format.get("at_least_one") else f"({one} | {_ANY_TEXT})"
        return f"({one}{'+' if format.get('at_least_one') else '*'} {_ANY_TEXT})"


def _text(format: Format, key: str, at: str) -> str:
    value = format.get(key)
    if not isinstance(value, str):
        raise BadGrammar(f"{key} is a text", at=f"{at}/{key}")
    return value
