"""Calls written as JSON objects: `{"name": ..., "arguments": {...}}`, alone or in a list."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from bough.parsers.json_stream import JsonStream, mend_json
from bough.parsers.machine import MAX_NAME, Calls, Status
from bough.parsers.scan import Cursor

_MAX_KEY = 1024


class CallKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the call object."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()
    nested: tuple[str, ...] = ("function",)
    """Keys under which the call may be nested."""
    is_name_the_key: bool = False
    """The object is `{"<tool's name>": {<arguments>}}`."""
    arguments_required: bool = False
    """An object without arguments is no call."""


DEFAULT_KEYS = CallKeys()


class JsonCalls:
    """A body of one object, or a list of them, streamed.

    A call begins once its name is whole and its arguments have opened; arguments that come before the name wait for it.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        keys: CallKeys = DEFAULT_KEYS,
        accept: Callable[[str], bool] = lambda name: True,
        in_list: bool = False,
    ) -> None:
        self.status = Status.RUNNING
        self.spill = ""
        self._calls = calls
        self._keys = keys
        self._accept = accept
        self._in_list = in_list
        self._state: Callable[[Cursor], bool] = self._element if in_list else self._start
        self._new_value()
        self._reset()

    def step(self, cursor: Cursor) -> bool:
        more = self._state(cursor)
        if self._sent:  # the rest of the object of a call that was sent is never content
            self._calls.settled = True
        return more

    def _reset(self) -> None:
        self._name: str | None = None
        self._id: str | None = None
        self._early: str | None = None
        self._sent = False
        self._depth = 0
        self._key = ""

    def _new_value(self) -> None:
        self._stream = JsonStream()
        self._pieces: list[str] = []
        self._length = 0

    def _broken(self) -> bool:
        """After a call that was sent, text that does not fit ends the body; before one, there was no body."""
        self.status = Status.DONE if self._sent else Status.BROKEN
        return True

    # -- the list --------------------------------------------------------------------------------------------------

    def _start(self, cursor: Cursor) -> bool:
        if cursor.at_end():
            return False
        if cursor.text[cursor.pos] == "[":
            cursor.pos += 1
            self._in_list = True
            self._state = self._element
            return True
        return self._element(cursor)

    def _element(self, cursor: Cursor) -> bool:
        before = cursor.pos
        cursor.skip_space()
        if cursor.at_end():
            return False
        if cursor.pos > before:  # a step of its own: it belongs to the list, not to the element
            return True
        char = cursor.text[cursor.pos]
        if char == "{":
            cursor.pos += 1
            self._reset()
            self._state = self._pair
        elif char == "]" and self._sent:  # behind a trailing comma
            cursor.pos += 1
            self.status = Status.DONE
        else:
            self.status = Status.BROKEN
        return True

    def _between(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        char = cursor.text[cursor.pos]
        if char == ",":
            cursor.pos += 1
            self._calls.settled = True
            self._state = self._element
        elif char == "]":
            cursor.pos += 1
            self.status = Status.DONE
        else:
            self.status = Status.DONE
        return True

    # -- one object ------------------------------------------------------------------------------------------------

    def _pair(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        char = cursor.text[cursor.pos]
        if char == '"':
            self._new_value()
            self._state = self._read_key
            return True
        if char == "}":
            return self._close(cursor)
        return self._broken()

    def _read_key(self, cursor: Cursor) -> bool:
        text = self._read_string(cursor, _MAX_KEY)
        if text is not None:
            self._key = text
            self._state = self._colon
        return text is not None or self.status is not Status.RUNNING

    def _colon(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        if cursor.text[cursor.pos] != ":":
            return self._broken()
        cursor.pos += 1
        self._state = self._value
        return True

    def _value(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        char, key, keys = cursor.text[cursor.pos], self._key, self._keys
        self._new_value()
        self._state = self._skip
        if keys.is_name_the_key and not self._sent:
            if not key.strip() or len(key) > MAX_NAME or char not in "{n":
                return self._broken()
            self._name, key = key.strip(), keys.arguments[0]
        if key in keys.nested and char == "{" and self._depth == 0:
            cursor.pos += 1
            self._depth = 1
            self._state = self._pair
        elif key in keys.arguments and not self._sent and self._early is None:
            if char == "{":
                self._state = self._arguments
                if self._name is not None:
                    self._calls.begin(self._name, self._id)
                    self._sent = True
                else:
                    self._early = ""
            elif char in '"nN':
                self._state = self._wrapped_arguments
            else:
                return self._broken()
        elif char == '"' and self._name is None and (key in keys.name or key in keys.nested):
            self._state = self._read_name
        elif char == '"' and key in keys.id and not self._sent:
            self._state = self._read_id
        return True

    def _read_name(self, cursor: Cursor) -> bool:
        text = self._read_string(cursor, MAX_NAME)
        if text is None:
            return self.status is not Status.RUNNING
        if not text.strip() or not self._accept(text):
            return self._broken()
        self._name = text.strip()
        if self._early is not None:
            self._calls.whole(self._name, self._early, self._id)
            self._sent = True
        self._state = self._comma
        return True

    def _read_id(self, cursor: Cursor) -> bool:
        text = self._read_string(cursor, MAX_NAME)
        if text is not None:
            self._id = text or None
            self._state = self._comma
        return text is not None or self.status is not Status.RUNNING

    def _arguments(self, cursor: Cursor) -> bool:
        cursor.pos = self._stream.consume(cursor.text, cursor.pos)
        delta = self._stream.take()
        if self._sent:
            self._calls.arguments(delta)
        else:
            self._pieces.append(delta)
        if self._stream.failed:
            if self._sent:
                self._calls.cut()
                self.spill = self._stream.pending()
            return self._broken()
        if not self._stream.done:
            return False
        if self._sent:
            self._calls.end()
        else:
            self._early = "".join(self._pieces)
        self._state = self._comma
        return True

    def _wrapped_arguments(self, cursor: Cursor) -> bool:
        """Arguments as a string that holds JSON, or null."""
        cursor.pos = self._stream.consume(cursor.text, cursor.pos)
        self._pieces.append(self._stream.take())
        if self._stream.failed:
            return self._broken()
        if not self._stream.done:
            return False
        value = json.loads("".join(self._pieces))
        arguments = "{}" if value is None or not str(value).strip() else mend_json(str(value), root="{")
        if arguments is None:
            return self._broken()
        self._early = arguments
        if self._name is not None:
            self._calls.whole(self._name, arguments, self._id)
            self._sent = True
        self._state = self._comma
        return True

    def _skip(self, cursor: Cursor) -> bool:
        cursor.pos = self._stream.consume(cursor.text, cursor.pos)
        self._stream.take()
        if self._stream.failed:
            return self._broken()
        if self._stream.done:
            self._state = self._comma
        return self._stream.done

    def _comma(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        char = cursor.text[cursor.pos]
        if char == ",":
            cursor.pos += 1
            self._state = self._pair
            return True
        if char == "}":
            return self._close(cursor)
        return self._broken()

    def _close(self, cursor: Cursor) -> bool:
        cursor.pos += 1
        if self._depth:
            self._depth = 0
            self._state = self._comma
            return True
        if not self._sent:
            if self._name is None or self._keys.arguments_required:
                return self._broken()
            self._calls.whole(self._name, "{}", self._id)
            self._sent = True
        self._calls.settled = True
        if self._in_list:
            self._state = self._between
        else:
            self.status = Status.DONE
        return True

    def _read_string(self, cursor: Cursor, longest: int) -> str | None:
        """The string once it is whole; None while it is not, or when it broke."""
        piece = cursor.text[cursor.pos : cursor.pos + longest + 1 - self._length]
        used = self._stream.consume(piece, 0)
        cursor.pos += used
        self._length += used
        self._pieces.append(self._stream.take())
        if self._stream.failed or self._length > longest:
            self._broken()
            return None
        return str(json.loads("".join(self._pieces))) if self._stream.done else None
