"""gpt-oss's harmony format: messages with a channel and, for calls, a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`, and for a call
`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>` (the recipient may also stand in the
role, before the channel). One state machine serves both parsers; each passes on unchanged what it does not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from bough.core.messages import ParsedEvent
from bough.parsers.events import EventSink, ToolSpec
from bough.parsers.json_stream import JsonStream
from bough.parsers.machine import Calls, is_name, new_call_id
from bough.parsers.scan import SPACE, Cursor, IdFactory, markers_of

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_HEADS = markers_of(START, CHANNEL)
_TAILS = markers_of(START, CHANNEL, END, RETURN, CALL)
_HEAD_ENDS = markers_of(MESSAGE, START, END, RETURN, CALL)
_MAX_HEADER = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z_]+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_ROLE_RECIPIENT = "to="

Channel = Literal["reasoning", "content", "call", "raw"]


class HarmonyMachine:
    """Reads messages: the analysis channel as Reasoning if `reads_reasoning`, calls to functions if `calls` is given."""

    needs_special_tokens = True
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

    def __init__(self, *, sink: EventSink, reads_reasoning: bool, calls: Calls | None) -> None:
        self._sink = sink
        self._reads_reasoning = reads_reasoning
        self._calls = calls
        self._cursor = Cursor()
        self._held = ""
        self._name = ""
        self._stream = JsonStream()
        self._begun = False
        self._first = True
        self._seen_message = False
        self._edge = True
        self._space: list[str] = []
        self._kind: Channel = "content"
        self._state: Callable[[], bool] = self._between

    def feed(self, text: str) -> list[ParsedEvent]:
        self._cursor.feed(text)
        while self._state():
            pass
        return self._sink.take()

    def finish(self) -> list[ParsedEvent]:
        rest = self._held + self._cursor.take_rest()
        self._held = ""
        if self._begun and self._calls is not None and self._calls.active:
            self._calls.cut()
        elif self._state == self._message and self._kind == "reasoning":
            self._sink.reasoning(rest)
        else:
            self._plain(rest)
            if not self._seen_message:
                self._sink.content("".join(self._space))
        self._space.clear()
        self._sink.reasoning_ends()
        return self._sink.take()

    # -- states ----------------------------------------------------------------------------------------------------

    def _between(self) -> bool:
        """Outside of messages: a header, or text that came without one."""
        cursor = self._cursor
        found = _HEADS.find(cursor.text, cursor.pos)
        until = found[0] if found else _HEADS.partial(cursor.text, cursor.pos)
        text = cursor.text[cursor.pos : until]
        if self._first and self._may_be_recipient(text):
            if found is None:
                return False
            self._held = text
        else:
            self._plain(text)
        cursor.pos = until
        if found is None:
            return False
        self._first = False
        self._held += found[1]
        cursor.pos += len(found[1])
        self._state = self._header
        return True

    def _may_be_recipient(self, text: str) -> bool:
        """The prompt ended in the role: ` to=functions.name` may come before the first channel."""
        stripped = text.lstrip()
        return len(text) <= _MAX_HEADER and (
            _ROLE_RECIPIENT.startswith(stripped) or stripped.startswith(_ROLE_RECIPIENT)
        )

    def _plain(self, text: str) -> None:
        """Text outside of messages is content; white space between messages is dropped."""
        if self._edge:
            bare = text.lstrip(SPACE)
            self._space.append(text[: len(text) - len(bare)])
            if not bare:
                return
            self._edge = False
            text = "".join(self._space) + bare
            self._space.clear()
        if text:
            self._first = False
        self._sink.content(text)

    def _header(self) -> bool:
        cursor = self._cursor
        found = cursor.word(_HEAD_ENDS, _MAX_HEADER)
        if found is None:
            if not cursor.no_word(_HEAD_ENDS, _MAX_HEADER, spaces=True):
                return False
        elif found[1] == MESSAGE:
            self._held += found[0] + MESSAGE
            self._open_message()
            return True
        else:
            cursor.pos -= len(found[1])
            self._held += found[0]
            if found[1] != START:
                self._held += found[1]
                cursor.pos += len(found[1])
        self._plain(self._held)
        self._held = ""
        self._state = self._between
        return True

    def _open_message(self) -> None:
        channel = _CHANNEL.search(self._held)
        recipient = _RECIPIENT.search(self._held)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        self._state = self._message
        if recipient and recipient[1].startswith("functions.") and is_name(name):
            self._kind, self._name = ("call", name) if self._calls is not None else ("raw", "")
        elif channel and channel[1] == "analysis":
            self._kind = "reasoning" if self._reads_reasoning else "raw"
        else:
            self._kind = "content"
        self._seen_message = True
        self._space.clear()
        if self._kind == "raw":
            self._sink.content(self._held)
        if self._kind == "call":
            self._stream = JsonStream()
            self._begun = False
            self._state = self._call
        else:
            self._held = ""

    def _message(self) -> bool:
        cursor = self._cursor
        found = _TAILS.find(cursor.text, cursor.pos)
        until = found[0] if found else _TAILS.partial(cursor.text, cursor.pos)
        text = cursor.text[cursor.pos : until]
        cursor.pos = until
        if self._kind == "reasoning":
            self._sink.reasoning(text)
        else:
            self._sink.content(text)
        if found is None:
            return False
        if found[1] not in (START, CHANNEL):
            cursor.pos += len(found[1])
            if self._kind == "raw":
                self._sink.content(found[1])
        self._sink.reasoning_ends()
        self._edge = True
        self._state = self._between
        return True

    def _call(self) -> bool:
        cursor, calls = self._cursor, self._calls
        assert calls is not None
        if not self._begun:
            before = cursor.pos
            cursor.skip_space()
            self._held += cursor.text[before : cursor.pos]
            if cursor.at_end() or cursor.waits_for(_TAILS):
                return False
            if _TAILS.at(cursor.text, cursor.pos) in (CALL, END, RETURN):
                calls.whole(self._name, "{}")
                return self._close_call()
            if cursor.text[cursor.pos] != "{":
                self._kind, self._state = "raw", self._message
                self._sink.content(self._held)
                self._held = ""
                return True
            calls.begin(self._name)
            self._begun = True
        cursor.pos = self._stream.consume(cursor.text, cursor.pos)
        calls.arguments(self._stream.take())
        if self._stream.failed:
            calls.cut()
            self._held = ""
            self._sink.content(self._stream.pending())
            self._kind, self._state = "content", self._message
            return True
        if not self._stream.done:
            return False
        calls.end()
        return self._close_call()

    def _close_call(self) -> bool:
        self._held = ""
        self._begun = False
        self._edge = True
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        """The token that ends a call is dropped."""
        cursor = self._cursor
        cursor.skip_space()
        if cursor.at_end() or cursor.waits_for(_TAILS):
            return False
        marker = _TAILS.at(cursor.text, cursor.pos)
        if marker in (END, RETURN, CALL):
            cursor.pos += len(marker)
        self._state = self._between
        return True


class HarmonyReasoningParser(HarmonyMachine):
    """Analysis becomes Reasoning, final and preambles become Content; calls are passed on unchanged for a tool
    parser."""

    def __init__(self, *, force_reasoning: bool = False, stream_reasoning: bool = True) -> None:
        super().__init__(sink=EventSink(hold_reasoning=not stream_reasoning), reads_reasoning=True, calls=None)
        if force_reasoning:
            self._kind = "reasoning"
            self._first = False
            self._seen_message = True
            self._state = self._message

    @property
    def in_reasoning(self) -> bool:
        return self._state == self._message and self._kind == "reasoning"


class HarmonyToolParser(HarmonyMachine):
    """Reads calls to functions; analysis is passed on unchanged, final and preambles lose their headers."""

    def __init__(self, tools: Sequence[ToolSpec] = (), new_id: IdFactory | None = None) -> None:
        sink = EventSink()
        super().__init__(sink=sink, reads_reasoning=False, calls=Calls(sink, new_call_id if new_id is None else new_id))
