"""Calls written as markup: a tool's name, then its arguments one by one as text, typed by the tool's schema."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import ClassVar

import msgspec

from bough.parsers.machine import MAX_NAME, Body, Calls, Status, ToolParser, is_name
from bough.parsers.scan import Cursor, markers_of
from bough.parsers.typing_by_schema import ArgumentTypes, JsonType, encode_text, encode_typed
from bough.parsers.value_text import ValueText

_MAX_KEY = 1024
_CDATA, _CDATA_END = markers_of("<![CDATA["), markers_of("]]>")
_JSON_ONLY: frozenset[JsonType] = frozenset(("integer", "number", "boolean", "null", "object", "array"))


class Markup(msgspec.Struct, frozen=True, kw_only=True):
    """The tags of a format."""

    call_open: str
    """Before the name; empty where the section's marker is."""
    name_ends: tuple[str, ...]
    """Ends the name and is consumed, unless it is one of `param_open`, `call_close` or a line break."""
    param_open: str
    key_end: str
    value_open: str = ""
    """Between key and value, where they are separate elements."""
    value_ends: tuple[str, ...]
    value_ends_before: tuple[str, ...] = ()
    """Where the value ends although its own end is missing; left to what follows."""
    call_close: str
    call_closes_before: tuple[str, ...] = ()
    """Where the call ends although its own end is missing; left to what follows."""
    attributes: bool = False
    """Names and keys are quoted attributes: the quote ends them, more attributes may follow."""
    trim_line_break: bool = False
    """A value starts behind the line break that follows its opening tag."""
    written_breaks: bool = False
    """Between tags, models write line breaks as a backslash and an n, too."""
    quoted_values: bool = False
    """Some write texts as JSON strings: a value that is one stands for what it says."""
    strip_values: bool = False
    """White space around a value is none of it."""
    escaped_attributes: bool = False
    """Names and keys are escaped as in XML (`&quot;`)."""
    escaped_values: bool = False
    """Values are escaped as in XML (`&lt;`)."""
    cdata: bool = False
    """A value may be a CDATA section, in which nothing is escaped."""


class MarkupCalls:
    """A body of one call. Strings stream through; other values are typed when they are whole."""

    def __init__(
        self,
        calls: Calls,
        markup: Markup,
        types: ArgumentTypes,
        *,
        named: Callable[[str], str] = lambda name: name,
    ) -> None:
        """`named`: the tool that a written name stands for."""
        self.status = Status.RUNNING
        self.spill = ""
        self._calls = calls
        self._markup = markup
        self._types = types
        self._named = named
        self._name = ""
        self._key = ""
        self._num_arguments = 0
        self._value_types: frozenset[JsonType] = frozenset()
        self._streams = False
        self._unquotes = False
        self._value: list[str] = []
        self._text = ValueText()
        self._ends = markers_of(*markup.value_ends, *markup.value_ends_before)
        self._name_ends = markers_of(*markup.name_ends)
        self._key_end = markers_of(markup.key_end)
        self._next = markers_of(markup.param_open, markup.call_close, *markup.call_closes_before)
        self._state: Callable[[Cursor], bool] = self._open

    def step(self, cursor: Cursor) -> bool:
        return self._state(cursor)

    def _broken(self) -> bool:
        if self._calls.active:
            self._calls.cut()
            self.status = Status.DONE
        else:
            self.status = Status.BROKEN
        return True

    def _open(self, cursor: Cursor) -> bool:
        call_open = self._markup.call_open
        if call_open and not cursor.text.startswith(call_open, cursor.pos):
            return self._broken() if not cursor.waits_for(markers_of(call_open)) else False
        cursor.pos += len(call_open)
        self._state = self._read_name
        return True

    def _read_name(self, cursor: Cursor) -> bool:
        begin = cursor.pos
        found = cursor.word(self._name_ends, MAX_NAME)
        if found is None:
            spaces = self._markup.attributes
            return cursor.no_word(self._name_ends, MAX_NAME, spaces=spaces) and self._broken()
        word, end = found
        if end in (self._markup.param_open, self._markup.call_close):
            cursor.pos -= len(end)
        self._name = (self._attribute(word)[0] if self._markup.attributes else word).strip()
        if not is_name(self._name):
            cursor.pos = begin
            return self._broken()
        self._name = self._named(self._name)
        self._state = self._between
        return True

    def _between(self, cursor: Cursor) -> bool:
        """Between arguments: the next one, or the end of the call."""
        if self._skip_gap(cursor):
            return False
        marker = self._next.at(cursor.text, cursor.pos)
        if marker is None:
            return not cursor.waits_for(self._next) and self._broken()
        if not self._calls.active:
            self._calls.begin(self._name)
        if marker == self._markup.param_open:
            cursor.pos += len(marker)
            self._state = self._read_key
            return True
        if marker == self._markup.call_close:
            cursor.pos += len(marker)
        self._calls.arguments("}" if self._num_arguments else "{}")
        self._calls.end()
        self.status = Status.DONE
        return True

    def _read_key(self, cursor: Cursor) -> bool:
        found = cursor.word(self._key_end, _MAX_KEY)
        if found is None:
            return cursor.no_word(self._key_end, _MAX_KEY, spaces=True) and self._broken()
        says_string: bool | None = None
        self._key = found[0].strip()
        if self._markup.attributes:
            self._key, rest = self._attribute(found[0])
            says_string = _says_string(rest)
        self._value_types = _decide(self._types.of(self._name, self._key), says_string)
        self._streams = self._value_types == {"string"}
        self._unquotes = False
        self._value.clear()
        self._state = self._open_value if self._markup.value_open else self._first_of_value
        return True

    def _skip_gap(self, cursor: Cursor) -> bool:
        """Skips what separates tags. Returns whether more text is needed to know where that ends."""
        cursor.skip_space()
        while self._markup.written_breaks and cursor.text.startswith("\\n", cursor.pos):
            cursor.pos += 2
            cursor.skip_space()
        return self._markup.written_breaks and cursor.text[cursor.pos :] == "\\"

    def _open_value(self, cursor: Cursor) -> bool:
        if self._skip_gap(cursor):
            return False
        value_open = markers_of(self._markup.value_open)
        if value_open.at(cursor.text, cursor.pos) is None:
            return not cursor.waits_for(value_open) and self._broken()
        cursor.pos += len(self._markup.value_open)
        self._state = self._first_of_value
        return True

    def _first_of_value(self, cursor: Cursor) -> bool:
        if cursor.at_end():
            return False
        if self._markup.strip_values:
            cursor.skip_space()
            if cursor.at_end():
                return False
        if self._markup.trim_line_break:
            if self._ends.at(cursor.text, cursor.pos) is None and cursor.waits_for(self._ends):
                return False
            if self._ends.at(cursor.text, cursor.pos) is None and cursor.text[cursor.pos] == "\n":
                cursor.pos += 1
        is_section = False
        if self._markup.cdata:
            is_section = _CDATA.at(cursor.text, cursor.pos) is not None
            if not is_section and cursor.waits_for(_CDATA):
                return False
            cursor.pos += len(_CDATA.all[0]) if is_section else 0
        self._begin_text(is_section)
        if self._markup.quoted_values and cursor.text[cursor.pos] == '"':
            self._streams, self._unquotes = False, True
        comma = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._calls.arguments(f'{comma}"{encode_text(self._key)}": ' + ('"' if self._streams else ""))
        self._state = self._read_value
        return True

    def _begin_text(self, is_section: bool) -> None:
        markup = self._markup
        ends = _CDATA_END if is_section else markers_of(*markup.value_ends, *markup.value_ends_before)
        self._ends = ends
        self._text = ValueText(strips=markup.strip_values, unescapes=markup.escaped_values and not is_section)

    def _read_value(self, cursor: Cursor) -> bool:
        found = self._ends.find(cursor.text, cursor.pos)
        until = found[0] if found else self._ends.partial(cursor.text, cursor.pos)
        piece = self._text.feed(cursor.text[cursor.pos : until])
        cursor.pos = until
        if found is not None:
            piece += self._text.end()
        if self._streams:
            self._calls.arguments(encode_text(piece))
        else:
            self._value.append(piece)
        if found is None:
            return False
        if found[1] not in self._markup.value_ends_before:
            cursor.pos += len(found[1])
        value = "".join(self._value)
        if self._unquotes:
            value = _unquoted(value)
        self._calls.arguments('"' if self._streams else encode_typed(value, self._value_types))
        self._state = self._between if self._ends is not _CDATA_END else self._close_section
        return True

    def _close_section(self, cursor: Cursor) -> bool:
        """Behind a CDATA section: the value's own end."""
        cursor.skip_space()
        ends = markers_of(*self._markup.value_ends)
        end = ends.at(cursor.text, cursor.pos)
        if end is None:
            return not cursor.waits_for(ends) and self._broken()
        cursor.pos += len(end)
        self._state = self._between
        return True

    def _attribute(self, text: str) -> tuple[str, str]:
        """`city" string="true"`: the quoted value whose opening quote was part of the tag, and the rest."""
        value, _, rest = text.partition('"')
        return (html.unescape(value) if self._markup.escaped_attributes else value), rest


def _unquoted(text: str) -> str:
    """What a JSON string says; any other text as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _says_string(attributes: str) -> bool | None:
    """Whether an argument's tag calls it a text (`string="true"`, `type="string"`); None: it does not say."""
    if 'string="true"' in attributes or 'type="string"' in attributes:
        return True
    return False if 'string="false"' in attributes or 'type="' in attributes else None


def _decide(by_schema: frozenset[JsonType], says_string: bool | None) -> frozenset[JsonType]:
    """The schema's types; where it has no say, the format's own word."""
    if says_string is None or (by_schema and "string" not in by_schema):
        return by_schema
    if says_string:
        return frozenset(("string",))
    return (by_schema - {"string"}) or _JSON_ONLY


class MarkupToolParser(ToolParser):
    """Sections of markup calls."""

    markup: ClassVar[Markup]

    def extra_markers(self) -> tuple[str, ...]:
        markup = self.markup
        tags = (markup.call_open, markup.param_open, markup.key_end, markup.value_open, markup.call_close)
        return tuple(tag for tag in (*tags, *markup.value_ends) if len(tag) > 2 and not tag.startswith("\n"))

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        return MarkupCalls(self.calls, self.markup, self.types)

    def open_bare(self, cursor: Cursor) -> Body | None:
        """Behind a call of a section the next one may follow without another opening marker."""
        call_open = self.markup.call_open
        return self.open_body("", cursor) if call_open and self._expected and may_be(call_open, cursor) else None


def may_be(marker: str, cursor: Cursor) -> bool:
    """Whether the marker stands at the cursor, as far as the text goes."""
    return cursor.text.startswith(marker, cursor.pos) or cursor.waits_for(markers_of(marker))
