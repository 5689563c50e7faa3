"""MiniMax M3's calls: tags named after the arguments, nested as deep as their values, each behind a token of its own.

`N<tool_call>N<invoke name="f">N<city>OsloN</city>N<days>N<item>1N</item>N</days>N</invoke>N</tool_call>`, where `N` is
`]<]minimax[>[`. Inside a call white space may stand between the token and its tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from bough.parsers.literals import dump
from bough.parsers.machine import MAX_NAME, Body, Calls, Status, ToolParser, is_name
from bough.parsers.scan import SPACE, Cursor, markers_of
from bough.parsers.typing_by_schema import ArgumentTypes, Schema, encode_text, encode_typed

TOKEN = "]<]minimax[>["
_TOKEN = markers_of(TOKEN)
_TAG_END = markers_of(">")
_MAX_TAG = 1024
_MAX_DEPTH = 64
_START, _END = f"{TOKEN}<tool_call>", f"{TOKEN}</tool_call>"
_INVOKE = 'invoke name="'


class Element(msgspec.Struct):
    """An open tag: the text directly inside it, and its children if there are any."""

    tag: str
    schema: Schema
    text: str = ""
    children: list[tuple[str, Any]] | None = None

    def value(self) -> Any:
        if self.children is None:
            if self.text.strip(SPACE) or self.schema.types - {"array", "object"}:
                return json.loads(encode_typed(self.text, self.schema.types))
            return [] if "array" in self.schema.types else {}
        if all(tag == "item" for tag, _ in self.children) and "object" not in self.schema.types:
            return [value for _, value in self.children]
        together: dict[str, list[Any]] = {}
        for tag, value in self.children:
            together.setdefault(tag, []).append(value)
        return {tag: values[0] if len(values) == 1 else values for tag, values in together.items()}


class NestedCall:
    """A body of one `invoke`. Texts stream; numbers, lists and objects are sent when they are complete."""

    def __init__(self, calls: Calls, types: ArgumentTypes) -> None:
        self.status = Status.RUNNING
        self.spill = ""
        self._calls = calls
        self._types = types
        self._schema = Schema()
        self._num_arguments = 0
        self._open: list[Element] = []
        self._text_end = ""
        self._state: Callable[[Cursor], bool] = self._invoke

    def step(self, cursor: Cursor) -> bool:
        return self._state(cursor)

    def _broken(self) -> bool:
        if self._calls.active:
            self._calls.cut()
            self.status = Status.DONE
        else:
            self.status = Status.BROKEN
        return True

    def _tag(self, cursor: Cursor) -> str | None:
        """The text of the tag at the cursor, behind its token; None: not whole yet, or there is none (see `status`).
        The cursor moves only if it is."""
        begin = cursor.pos
        if _TOKEN.at(cursor.text, cursor.pos) is None:
            if not cursor.waits_for(_TOKEN):
                self._broken()
            return None
        cursor.pos += len(TOKEN)
        cursor.skip_space()
        if not cursor.at_end() and cursor.text[cursor.pos] != "<":
            cursor.pos = begin
            self._broken()
            return None
        cursor.pos += 1
        found = cursor.word(_TAG_END, _MAX_TAG)
        if found is not None:
            return found[0].strip(SPACE)
        if cursor.no_word(_TAG_END, _MAX_TAG, spaces=True):
            self._broken()
        cursor.pos = begin
        return None

    def _invoke(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        begin = cursor.pos
        tag = self._tag(cursor)
        if tag is None:
            return self.status is not Status.RUNNING
        name = tag.removeprefix(_INVOKE).removesuffix('"')
        if not tag.startswith(_INVOKE) or not is_name(name) or len(name) > MAX_NAME:
            cursor.pos = begin
            return self._broken()
        self._calls.begin(name)
        self._schema = self._types.schema(name)
        self._state = self._between
        return True

    def _between(self, cursor: Cursor) -> bool:
        """Between arguments: the next one, or the end of the call."""
        cursor.skip_space()
        if cursor.at_end():
            return False
        begin = cursor.pos
        tag = self._tag(cursor)
        if tag is None:
            return self.status is not Status.RUNNING
        if tag == "/invoke":
            self._calls.arguments("}" if self._num_arguments else "{}")
            self._calls.end()
            self.status = Status.DONE
            return True
        if not tag or tag.startswith("/"):
            cursor.pos = begin
            return self._broken()
        comma = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        schema = self._schema.child(tag)
        is_text = schema.types == {"string"}
        self._calls.arguments(f'{comma}"{encode_text(tag)}": ' + ('"' if is_text else ""))
        if is_text:
            self._text_end = f"{TOKEN}</{tag}>"
            self._state = self._text
        else:
            self._open = [Element(tag, schema)]
            self._state = self._inside
        return True

    def _text(self, cursor: Cursor) -> bool:
        ends = markers_of(self._text_end)
        found = ends.find(cursor.text, cursor.pos)
        until = found[0] if found else ends.partial(cursor.text, cursor.pos)
        self._calls.arguments(encode_text(cursor.text[cursor.pos : until]))
        cursor.pos = until
        if found is None:
            return False
        cursor.pos += len(self._text_end)
        self._calls.arguments('"')
        self._state = self._between
        return True

    def _inside(self, cursor: Cursor) -> bool:
        """Inside an argument that is no plain text: text, children, and the ends of what is open."""
        element = self._open[-1]
        found = _TOKEN.find(cursor.text, cursor.pos)
        until = found[0] if found else _TOKEN.partial(cursor.text, cursor.pos)
        element.text += cursor.text[cursor.pos : until]
        cursor.pos = until
        if found is None:
            return False
        tag = self._tag(cursor)
        if tag is None:
            return self.status is not Status.RUNNING
        if not tag.startswith("/"):
            if len(self._open) >= _MAX_DEPTH:
                return self._broken()
            element.children = element.children or []
            schema = element.schema.item() if tag == "item" else element.schema.child(tag)
            self._open.append(Element(tag, schema))
            return True
        if tag[1:].strip(SPACE) != element.tag:
            return self._broken()
        self._open.pop()
        value = element.value()
        if self._open:
            children = self._open[-1].children
            assert children is not None
            children.append((element.tag, value))
        else:
            self._calls.arguments(dump(value))
            self._state = self._between
        return True


class MinimaxM3Parser(ToolParser):
    """MiniMax M3: sections of nested calls."""

    needs_special_tokens = True
    starts = (_START,)
    closers = (_END,)

    def extra_markers(self) -> tuple[str, ...]:
        return (TOKEN, f"{TOKEN}<{_INVOKE}", f"{TOKEN}</invoke>", f"{TOKEN}<item>")

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        return NestedCall(self.calls, self.types)

    def open_bare(self, cursor: Cursor) -> Body | None:
        """Behind a call of a section the next one may follow."""
        if not self._expected:
            return None
        opening = markers_of(TOKEN)
        return self.open_body("", cursor) if opening.at(cursor.text, cursor.pos) or cursor.waits_for(opening) else None
