"""Gemma 4's calls: `<|tool_call>call:name{key:<|"|>text<|"|>,count:3,items:[1,2]}<tool_call|>`.

Objects and lists look like JSON's without quotes around keys; texts stand between quote tokens, as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from bough.parsers.header_calls import Headed
from bough.parsers.json_stream import JsonStream
from bough.parsers.machine import Body, Calls, Status, ToolParser, is_name
from bough.parsers.scan import SPACE, Cursor, markers_of
from bough.parsers.typing_by_schema import ArgumentTypes, encode_text, encode_typed

QUOTE = '<|"|>'
_START, _END = "<|tool_call>", "<tool_call|>"
_QUOTE = markers_of(QUOTE)
_NAME_ENDS = markers_of("{", _END)
_KEY_ENDS = markers_of(":", ",", "}", _END)
_VALUE_ENDS = markers_of(",", "}", "]", _END)
_MAX_KEY = 1024
_MAX_DEPTH = 64
_GAP = SPACE + ","


class GemmaCall:
    """A body of one object, written as JSON while it is read. Texts stream; bare values are typed when they are whole."""

    def __init__(self, calls: Calls, name: str, types: ArgumentTypes) -> None:
        self.status = Status.RUNNING
        self.spill = ""
        self._calls = calls
        self._name = name
        self._types = types
        self._stack: list[str] = []
        self._is_first = True
        self._key = ""
        self._bare: list[str] = []
        self._stream = JsonStream()
        self._state: Callable[[Cursor], bool] = self._begin

    def step(self, cursor: Cursor) -> bool:
        return self._state(cursor)

    def _begin(self, cursor: Cursor) -> bool:
        self._calls.begin(self._name)
        self._open("{")
        return True

    def _open(self, bracket: str) -> None:
        self._stack.append(bracket)
        self._calls.arguments(bracket)
        self._is_first = True
        self._state = self._next_key if bracket == "{" else self._next_item

    def _cut(self) -> bool:
        self._calls.cut()
        self.status = Status.DONE
        return True

    def _between(self) -> None:
        """After a value: continue with what follows in the enclosing object or list."""
        self._is_first = False
        self._state = self._next_key if self._stack[-1] == "{" else self._next_item

    def _close(self, cursor: Cursor) -> bool:
        cursor.pos += 1
        self._calls.arguments("}" if self._stack.pop() == "{" else "]")
        if self._stack:
            self._between()
        else:
            self._calls.end()
            self.status = Status.DONE
        return True

    def _skip_gap(self, cursor: Cursor) -> bool:
        """Whether something follows the white space and commas."""
        while not cursor.at_end() and cursor.text[cursor.pos] in _GAP:
            cursor.pos += 1
        return not cursor.at_end()

    def _next_key(self, cursor: Cursor) -> bool:
        if not self._skip_gap(cursor):
            return False
        if cursor.text[cursor.pos] == "}":
            return self._close(cursor)
        if _QUOTE.at(cursor.text, cursor.pos) is not None:
            cursor.pos += len(QUOTE)
            self._state = self._quoted_key
            return True
        if cursor.waits_for(_QUOTE):
            return False
        if cursor.text[cursor.pos] == '"':
            self._bare.clear()
            self._stream = JsonStream()
            self._state = self._json_key
            return True
        found = cursor.word(_KEY_ENDS, _MAX_KEY)
        if found is None:
            return cursor.no_word(_KEY_ENDS, _MAX_KEY, spaces=True) and self._cut()
        return self._begin_value(found[0].strip()) if found[1] == ":" else self._cut()

    def _quoted_key(self, cursor: Cursor) -> bool:
        found = cursor.word(_QUOTE, _MAX_KEY)
        if found is None:
            return cursor.no_word(_QUOTE, _MAX_KEY, spaces=True) and self._cut()
        self._key = found[0]
        self._state = self._colon
        return True

    def _json_key(self, cursor: Cursor) -> bool:
        cursor.pos = self._stream.consume(cursor.text, cursor.pos)
        self._bare.append(self._stream.take())
        if self._stream.failed:
            return self._cut()
        if self._stream.done:
            self._key = str(json.loads("".join(self._bare)))
            self._state = self._colon
        return self._stream.done

    def _colon(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        if cursor.text[cursor.pos] != ":":
            return self._cut()
        cursor.pos += 1
        return self._begin_value(self._key)

    def _begin_value(self, key: str) -> bool:
        self._key = key
        self._calls.arguments(("" if self._is_first else ", ") + f'"{encode_text(key)}": ')
        self._state = self._value
        return True

    def _next_item(self, cursor: Cursor) -> bool:
        if not self._skip_gap(cursor):
            return False
        if cursor.text[cursor.pos] == "]":
            return self._close(cursor)
        self._calls.arguments("" if self._is_first else ", ")
        self._state = self._value
        return True

    def _value(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        if _QUOTE.at(cursor.text, cursor.pos) is not None:
            cursor.pos += len(QUOTE)
            self._calls.arguments('"')
            self._state = self._text
            return True
        if cursor.waits_for(_QUOTE):
            return False
        char = cursor.text[cursor.pos]
        if char in "{[":
            if len(self._stack) >= _MAX_DEPTH:
                return self._cut()
            cursor.pos += 1
            self._open(char)
            return True
        self._bare.clear()
        self._stream = JsonStream()
        self._state = self._json_text if char == '"' else self._bare_value
        return True

    def _text(self, cursor: Cursor) -> bool:
        found = _QUOTE.find(cursor.text, cursor.pos)
        until = found[0] if found else _QUOTE.partial(cursor.text, cursor.pos)
        self._calls.arguments(encode_text(cursor.text[cursor.pos : until]))
        cursor.pos = until
        if found is None:
            return False
        cursor.pos += len(QUOTE)
        self._calls.arguments('"')
        self._between()
        return True

    def _json_text(self, cursor: Cursor) -> bool:
        """Between JSON's own quotes, which models write too."""
        cursor.pos = self._stream.consume(cursor.text, cursor.pos)
        self._calls.arguments(self._stream.take())
        if self._stream.failed:
            return self._cut()
        if self._stream.done:
            self._between()
        return self._stream.done

    def _bare_value(self, cursor: Cursor) -> bool:
        found = _VALUE_ENDS.find(cursor.text, cursor.pos)
        until = found[0] if found else _VALUE_ENDS.partial(cursor.text, cursor.pos)
        self._bare.append(cursor.text[cursor.pos : until])
        cursor.pos = until
        if found is None:
            return False
        if found[1] == _END:
            return self._cut()
        types = self._types.of(self._name, self._key) if self._stack == ["{"] else frozenset()
        self._calls.arguments(encode_typed("".join(self._bare).strip(), types))
        self._between()
        return True


class Gemma4Parser(ToolParser):
    """Gemma 4, each call between its own tokens."""

    needs_special_tokens = True
    starts = (_START,)
    closers = (_END,)

    def extra_markers(self) -> tuple[str, ...]:
        return (QUOTE, "call:")

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        return Headed(_NAME_ENDS, self._open_call, lead="call:")

    def _open_call(self, header: str, end: str) -> Body | Status:
        name = header.strip()
        return GemmaCall(self.calls, name, self.types) if end == "{" and is_name(name) else Status.BROKEN
