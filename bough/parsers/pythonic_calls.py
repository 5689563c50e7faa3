"""Calls written as a Python list of function calls: `[get_weather(city="Paris"), get_time()]`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import ClassVar

from bough.parsers.json_calls import JsonCalls
from bough.parsers.literals import NotLiteral, dump, parse_expression, value_of
from bough.parsers.machine import MAX_NAME, Body, Calls, Status, ToolParser
from bough.parsers.scan import Cursor
from bough.parsers.typing_by_schema import ArgumentTypes

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_PLAIN = re.compile(r"""[^"'()\[\]{}\\\r\n]+""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 100


class PythonicCalls:
    """A body of one list. A call is sent when its parenthesis closes; a malformed one becomes content as a whole."""

    def __init__(
        self,
        calls: Calls,
        types: ArgumentTypes,
        *,
        accept: Callable[[str], bool] = lambda name: True,
        in_list: bool = False,
    ) -> None:
        """`in_list`: the list's bracket was read already."""
        self.status = Status.RUNNING
        self.spill = ""
        self._calls = calls
        self._types = types
        self._accept = accept
        self._name = ""
        self._sent = False
        self._arguments: list[str] = []
        self._stack: list[str] = []
        self._quote = ""
        self._num_quotes = 0
        self._run = 0
        self._escaped = False
        self._state: Callable[[Cursor], bool] = self._read_name if in_list else self._open

    def step(self, cursor: Cursor) -> bool:
        return self._state(cursor)

    def _broken(self) -> bool:
        self.status = Status.BROKEN
        return True

    def _open(self, cursor: Cursor) -> bool:
        if cursor.text[cursor.pos] != "[":
            return self._broken()
        cursor.pos += 1
        self._state = self._read_name
        return True

    def _read_name(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        found = _NAME.match(cursor.text, cursor.pos, cursor.pos + MAX_NAME)
        assert found is not None
        if found.end() == len(cursor.text):
            return False
        if cursor.text[found.end()] != "(" or not found.group() or not self._accept(found.group()):
            return self._broken()
        self._name = found.group()
        cursor.pos = found.end() + 1
        self._arguments = []
        self._stack = ["("]
        self._state = self._read_arguments
        return True

    def _read_arguments(self, cursor: Cursor) -> bool:
        """Find the parenthesis that closes the call."""
        text = cursor.text
        while cursor.pos < len(text):
            if plain := _PLAIN.match(text, cursor.pos):
                self._arguments.append(plain.group())
                cursor.pos = plain.end()
                continue
            char = text[cursor.pos]
            cursor.pos += 1
            if char in "\"'":
                self._arguments.append(char)
                self._quote, self._num_quotes = char, 1
                self._state = self._open_string
                return True
            if char in _CLOSING:
                self._stack.append(char)
                if len(self._stack) > _MAX_DEPTH:
                    return self._broken()
            elif char in ")]}":
                if _CLOSING[self._stack.pop()] != char:
                    return self._broken()
                if not self._stack:
                    return self._tell()
            self._arguments.append(" " if char in "\r\n" else char)
        return False

    def _open_string(self, cursor: Cursor) -> bool:
        """One quote opens a string, two are an empty one, three open a long one."""
        if cursor.at_end():
            return False
        if cursor.text[cursor.pos] == self._quote and self._num_quotes < 3:
            self._arguments.append(self._quote)
            self._num_quotes += 1
            cursor.pos += 1
        elif self._num_quotes == 2:
            self._state = self._read_arguments
        else:
            self._run = 0
            self._escaped = False
            self._state = self._read_string
        return True

    def _read_string(self, cursor: Cursor) -> bool:
        text, long = cursor.text, self._num_quotes == 3
        while cursor.pos < len(text):
            char = text[cursor.pos]
            if not self._escaped and char not in "\"'\\\r\n" and (plain := _PLAIN.match(text, cursor.pos)):
                self._arguments.append(plain.group())
                self._run = 0
                cursor.pos = plain.end()
                continue
            cursor.pos += 1
            if char in "\r\n" and not long:  # a line break the model forgot to escape
                self._arguments.append(("" if self._escaped else "\\") + ("n" if char == "\n" else "r"))
            else:
                self._arguments.append(char)
            if not self._escaped and char == self._quote:
                self._run += 1
                if self._run == self._num_quotes:
                    self._state = self._read_arguments
                    return True
            else:
                self._run = 0
            self._escaped = char == "\\" and not self._escaped
        return False

    def _tell(self) -> bool:
        try:
            arguments = self._read_call("".join(self._arguments))
        except NotLiteral:
            return self._broken()
        self._calls.whole(self._name, arguments)
        self._sent = True
        self._state = self._between
        return True

    def _read_call(self, text: str) -> str:
        node = parse_expression(f"call({text})")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise NotLiteral("not one call")
        names = self._types.names(self._name)
        if len(node.args) > len(names):
            raise NotLiteral("more positional arguments than the tool has")
        try:
            values = {name: value_of(argument) for name, argument in zip(names, node.args, strict=False)}
            for keyword in node.keywords:
                if keyword.arg is None:
                    raise NotLiteral("dict unpacking")
                values[keyword.arg] = value_of(keyword.value)
        except RecursionError as error:
            raise NotLiteral("nested too deeply") from error
        return dump(values)

    def _between(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        self._calls.settled = True
        if cursor.at_end():
            return False
        char = cursor.text[cursor.pos]
        if char == ",":
            cursor.pos += 1
            self._state = self._next_or_end
        else:
            cursor.pos += char == "]"
            self.status = Status.DONE
        return True

    def _next_or_end(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        self._calls.settled = True
        if cursor.at_end():
            return False
        if cursor.text[cursor.pos] == "]":
            cursor.pos += 1
            self.status = Status.DONE
        else:
            self._state = self._read_name
        return True


class PythonicOrJsonCalls(PythonicCalls):
    """A list of JSON objects or of Python calls, decided by its first element."""

    def __init__(self, calls: Calls, types: ArgumentTypes) -> None:
        super().__init__(calls, types)
        self._json: JsonCalls | None = None

    def step(self, cursor: Cursor) -> bool:
        if self._json is None:
            return super().step(cursor)
        more = self._json.step(cursor)
        self.status, self.spill = self._json.status, self._json.spill
        return more

    def _read_name(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if not self._sent and not cursor.at_end() and cursor.text[cursor.pos] == "{":
            self._json = JsonCalls(self._calls, in_list=True)
            return True
        return super()._read_name(cursor)


class PythonicParser(ToolParser):
    """Llama 4 and others without markers: the list is the whole answer or stands behind text, optionally between
    `<|python_start|>` and `<|python_end|>`. Without them a list counts only if it calls an offered tool; where none is
    known, only at the start of the answer."""

    needs_special_tokens = True
    starts: ClassVar[tuple[str, ...]] = ("<|python_start|>", "[")
    closers = ("<|python_end|>",)

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if marker == "[":
            if self._space_is_content and not self.names:
                return None
            accept = self.names.__contains__ if self.names else (lambda name: True)
            return PythonicCalls(self.calls, self.types, accept=accept, in_list=True)
        return PythonicCalls(self.calls, self.types) if cursor.text[cursor.pos] == "[" else None


class Lfm2Parser(PythonicParser):
    """LFM2: the list between `<|tool_call_start|>` and `<|tool_call_end|>`; a JSON list there is understood too."""

    starts = ("<|tool_call_start|>",)
    closers = ("<|tool_call_end|>",)

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        char = cursor.text[cursor.pos]
        if char == "{":
            return JsonCalls(self.calls)
        return PythonicOrJsonCalls(self.calls, self.types) if char == "[" else None
