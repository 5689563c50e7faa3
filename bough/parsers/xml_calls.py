"""Calls written as markup: a tool's name, then its arguments one by one as text, typed by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import ClassVar

import msgspec

from bough.parsers.json_calls import JsonCalls
from bough.parsers.machine import MAX_NAME, Body, Calls, Status, ToolParser, is_name
from bough.parsers.scan import Cursor, markers_of
from bough.parsers.typing_by_schema import ArgumentTypes, JsonType, encode_text, encode_typed

_MAX_KEY = 1024
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


class MarkupCalls:
    """A body of one call. Strings stream through; other values are typed when they are whole."""

    def __init__(self, calls: Calls, markup: Markup, types: ArgumentTypes) -> None:
        self.status = Status.RUNNING
        self.spill = ""
        self._calls = calls
        self._markup = markup
        self._types = types
        self._name = ""
        self._key = ""
        self._num_arguments = 0
        self._value_types: frozenset[JsonType] = frozenset()
        self._streams = False
        self._unquotes = False
        self._value: list[str] = []
        self._name_ends = markers_of(*markup.name_ends)
        self._key_end = markers_of(markup.key_end)
        self._next = markers_of(markup.param_open, markup.call_close, *markup.call_closes_before)
        self._value_end = markers_of(*markup.value_ends, *markup.value_ends_before)
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
        self._name = (_attribute(word)[0] if self._markup.attributes else word).strip()
        if not is_name(self._name):
            cursor.pos = begin
            return self._broken()
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
            self._key, rest = _attribute(found[0])
            says_string = True if 'string="true"' in rest else False if 'string="false"' in rest else None
        self._value_types = _decide(self._types.of(self._name, self._key), says_string)
        self._streams = self._value_types == {"string"}
        self._unquotes = False
        self._value.clear()
        self._state = self._open_value if self._markup.value_open else self._first_of_value
        return True

    def _skip_gap(self, cursor: Cursor) -> bool:
        """Skips what separates tags. Whether it can't be told yet where that ends."""
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
        if self._markup.trim_line_break:
            if self._value_end.at(cursor.text, cursor.pos) is None and cursor.waits_for(self._value_end):
                return False
            if self._value_end.at(cursor.text, cursor.pos) is None and cursor.text[cursor.pos] == "\n":
                cursor.pos += 1
        if self._markup.quoted_values and cursor.text[cursor.pos] == '"':
            self._streams, self._unquotes = False, True
        comma = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._calls.arguments(f'{comma}"{encode_text(self._key)}": ' + ('"' if self._streams else ""))
        self._state = self._read_value
        return True

    def _read_value(self, cursor: Cursor) -> bool:
        found = self._value_end.find(cursor.text, cursor.pos)
        until = found[0] if found else self._value_end.partial(cursor.text, cursor.pos)
        piece = cursor.text[cursor.pos : until]
        cursor.pos = until
        if self._streams:
            self._calls.arguments(encode_text(piece))
        else:
            self._value.append(piece)
        if found is None:
            return False
        if found[1] in self._markup.value_ends:
            cursor.pos += len(found[1])
        value = "".join(self._value)
        if self._unquotes:
            value = _unquoted(value)
        self._calls.arguments('"' if self._streams else encode_typed(value, self._value_types))
        self._state = self._between
        return True


def _unquoted(text: str) -> str:
    """What a JSON string says; any other text as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _attribute(text: str) -> tuple[str, str]:
    """`city" string="true"`: the quoted value whose opening quote was part of the tag, and the rest."""
    value, _, rest = text.partition('"')
    return value, rest


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
        return self.open_body("", cursor) if call_open and self._expected and _may_be(call_open, cursor) else None


def _may_be(marker: str, cursor: Cursor) -> bool:
    return cursor.text.startswith(marker, cursor.pos) or cursor.waits_for(markers_of(marker))


class Qwen3CoderParser(MarkupToolParser):
    """Qwen3-Coder, Qwen 3.5, Nemotron 3: `<function=name><parameter=key>value</parameter></function>` in `<tool_call>` tags.
    These may be missing; Hermes' JSON between them is understood too."""

    starts = ("<tool_call>", "<function=")
    closers = ("</tool_call>",)
    markup = Markup(
        call_open="<function=",
        name_ends=(">",),
        param_open="<parameter=",
        key_end=">",
        value_ends=("\n</parameter>", "</parameter>"),
        value_ends_before=("\n<parameter=", "\n</function>"),
        call_close="</function>",
        call_closes_before=("</tool_call>",),
        trim_line_break=True,
    )

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if marker == "<function=":
            return MarkupCalls(self.calls, _WITHOUT_OPEN, self.types)
        if cursor.text[cursor.pos] == "{":
            return JsonCalls(self.calls)
        return super().open_body(marker, cursor)

    def open_bare(self, cursor: Cursor) -> Body | None:
        return None


_WITHOUT_OPEN = msgspec.structs.replace(Qwen3CoderParser.markup, call_open="")


class MinimaxM2Parser(MarkupToolParser):
    """MiniMax M2: `<minimax:tool_call><invoke name="..."><parameter name="key">value</parameter></invoke>...`."""

    needs_special_tokens = True
    starts = ("<minimax:tool_call>",)
    closers = ("</minimax:tool_call>",)
    markup = Markup(
        call_open='<invoke name="',
        name_ends=(">",),
        param_open='<parameter name="',
        key_end=">",
        value_ends=("</parameter>",),
        call_close="</invoke>",
        attributes=True,
    )


class Step3Parser(MarkupToolParser):
    """Step3: `<steptml:invoke name="..."><steptml:parameter name="key">value</steptml:parameter></steptml:invoke>`, each
    call between its own tokens, all of them in a section."""

    needs_special_tokens = True
    starts = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<steptml:invoke ")
    leads = ("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<steptml:invoke ")
    closers = ("<｜tool_call_end｜>", "<｜tool_calls_end｜>")
    markup = Markup(
        call_open='name="',
        name_ends=(">",),
        param_open='<steptml:parameter name="',
        key_end=">",
        value_ends=("</steptml:parameter>",),
        call_close="</steptml:invoke>",
        call_closes_before=("<｜tool_call_end｜>",),
        attributes=True,
    )

    def extra_markers(self) -> tuple[str, ...]:
        return (*super().extra_markers(), "<｜tool_sep｜>")

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        return super().open_body(marker, cursor) if marker == "<steptml:invoke " else None

    def open_bare(self, cursor: Cursor) -> Body | None:
        return None


class DeepseekV32Parser(MarkupToolParser):
    """DeepSeek V3.2 (and V4, whose section is called `tool_calls`): DSML, whose parameters say whether they are strings."""

    needs_special_tokens = True
    starts = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    closers = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    markup = Markup(
        call_open='<｜DSML｜invoke name="',
        name_ends=(">",),
        param_open='<｜DSML｜parameter name="',
        key_end=">",
        value_ends=("</｜DSML｜parameter>",),
        call_close="</｜DSML｜invoke>",
        attributes=True,
    )

    def extra_markers(self) -> tuple[str, ...]:
        return (*super().extra_markers(), "｜DSML｜")


class Glm45Parser(MarkupToolParser):
    """GLM 4.5 to 4.7: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with or without
    line breaks between, which some write as a backslash and an n."""

    needs_special_tokens = True
    starts = ("<tool_call>",)
    closers = ()
    markup = Markup(
        call_open="",
        name_ends=("\n", "\\n", "<arg_key>", "</tool_call>"),
        param_open="<arg_key>",
        key_end="</arg_key>",
        value_open="<arg_value>",
        value_ends=("</arg_value>",),
        call_close="</tool_call>",
        written_breaks=True,
        quoted_values=True,
    )


def _hunyuan_markup(suffix: str) -> Markup:
    return Markup(
        call_open="",
        name_ends=(f"<tool_sep{suffix}>", f"<arg_key{suffix}>", f"</tool_call{suffix}>"),
        param_open=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>",
        value_ends=(f"</arg_value{suffix}>",),
        call_close=f"</tool_call{suffix}>",
    )


class HunyuanParser(MarkupToolParser):
    """Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`; Hunyuan 3: markup like GLM's, with
    `<tool_sep>` behind the name."""

    starts = ("<tool_calls>", "<tool_call>")
    leads = ("<tool_call>",)
    closers = ("</tool_calls>",)
    markup = _hunyuan_markup("")

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if cursor.text[cursor.pos] in "[{":
            return JsonCalls(self.calls)
        return super().open_body(marker, cursor) if marker == self.leads[0] else None


class HunyuanOpensourceParser(HunyuanParser):
    """Hunyuan 3 as released: every tag carries the suffix `:opensource`."""

    starts = ("<tool_calls:opensource>", "<tool_call:opensource>")
    leads = ("<tool_call:opensource>",)
    closers = ("</tool_calls:opensource>",)
    markup = _hunyuan_markup(":opensource")
