"""The state machine of all tool-call parsers: content, an opening marker, a body that reads calls, closing markers. A
format is a set of markers plus a body; the machine keeps the text since the opening marker until a call is certain, and
emits it as content if there is none. No text is read twice, so the time is linear.
"""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar, Protocol

from bough.core.messages import ParsedEvent, ToolCallBegin, ToolCallEnd
from bough.parsers.events import EventSink, ToolSpec
from bough.parsers.scan import SPACE, Cursor, IdFactory, Markers, markers_of
from bough.parsers.typing_by_schema import ArgumentTypes

MAX_NAME = 256
_ALPHANUMERIC = string.ascii_letters + string.digits


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_short_id() -> str:
    """Ids have nine alphanumeric characters, because Mistral's templates accept no others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def is_name(text: str) -> bool:
    """Whether `text` can be a tool's name: not empty, no white space, no markup."""
    return 0 < len(text) <= MAX_NAME and not any(c.isspace() or c in "<>{}[]()\"'`," for c in text)


class Status(Enum):
    RUNNING = 0
    DONE = 1
    """The body is complete: its calls were read, or it was empty. Content, closing markers or the next call follow."""
    BROKEN = 2
    """The text turned out not to be a call."""


class Calls:
    """Emits the events of calls and numbers them."""

    def __init__(self, sink: EventSink, new_id: IdFactory) -> None:
        self._sink = sink
        self._new_id = new_id
        self._ids: set[str] = set()
        self.count = 0
        self.active = False
        self.settled = False
        """Set when everything consumed so far belongs to calls already sent: none of it may become content."""

    def used(self, id: str) -> bool:
        return id in self._ids

    def begin(self, name: str, id: str | None = None) -> None:
        if id is None or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self._sink.add(ToolCallBegin(self.count, id, name))
        self.active = True
        self.settled = True
        self.count += 1

    def arguments(self, json_delta: str) -> None:
        self._sink.arguments(self.count - 1, json_delta)

    def end(self) -> None:
        self._sink.add(ToolCallEnd(self.count - 1))
        self.active = False
        self.settled = True

    def cut(self) -> None:
        """The call is incomplete: it gets no end event."""
        self.active = False
        self.settled = True

    def whole(self, name: str, arguments: str, id: str | None = None) -> None:
        self.begin(name, id)
        self.arguments(arguments)
        self.end()


class Body(Protocol):
    """Reads the calls after an opening marker."""

    status: Status
    spill: str
    """Text consumed but part of no event, when the status turns to DONE after a broken call: content."""

    def step(self, cursor: Cursor) -> bool:
        """Consume and emit; False: nothing more can be done before more text comes."""
        ...


class ToolParser(ABC):
    """One answer's tool calls. `feed` and `finish` never raise, whatever the text."""

    needs_special_tokens: ClassVar[bool] = False
    starts: ClassVar[tuple[str, ...]] = ()
    """Markers that may open calls."""
    leads: ClassVar[tuple[str, ...]] = ()
    """Markers that may stand between the opening one and the body."""
    closers: ClassVar[tuple[str, ...]] = ()
    """Markers that may follow calls; each is dropped once, wherever it comes."""
    weak_closers: ClassVar[tuple[str, ...]] = ()
    """Dropped only directly after a call, because they have a meaning in content."""
    never_content: ClassVar[tuple[str, ...]] = ()
    """Special tokens of the format that are dropped wherever they stray into content."""
    separators: ClassVar[str] = ""
    """Characters between two calls that count as white space."""
    new_id_default: ClassVar[IdFactory] = staticmethod(new_call_id)

    def __init__(self, tools: Sequence[ToolSpec] = (), new_id: IdFactory | None = None) -> None:
        self.tools = tools
        self.names = frozenset(tool.name for tool in tools)
        self.types = ArgumentTypes(tools)
        self._sink = EventSink()
        self.calls = Calls(self._sink, type(self).new_id_default if new_id is None else new_id)
        self._cursor = Cursor()
        self._raw: list[str] = []
        self._space: list[str] = []
        self._space_is_content = False
        self._expected: frozenset[str] = frozenset()
        self._body: Body | None = None
        self._marker = ""
        self._state: Callable[[], bool] = self._edge
        self._lead_markers = markers_of(*self.leads)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, *self.leads, *self.closers, *self.extra_markers())

    def extra_markers(self) -> tuple[str, ...]:
        """Markers the bodies look for."""
        return ()

    @abstractmethod
    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        """The body that starts at the cursor (never at the text's end), behind `marker`; None: no call starts here."""

    def open_bare(self, cursor: Cursor) -> Body | None:
        """The body of a call without opening marker, at the start of the answer or behind a call."""
        return None

    def feed(self, text: str) -> list[ParsedEvent]:
        self._cursor.feed(text)
        while self._state():
            pass
        return self._sink.take()

    def finish(self) -> list[ParsedEvent]:
        rest = self._cursor.take_rest()
        if self._body is not None and self.calls.active:
            self.calls.cut()
        else:
            if not self._is_cut_marker(rest):
                self._raw.append(rest)
            if self.never_content and self._state in (self._lead, self._inside):
                self._raw.clear()  # a call that was cut before it could be sent
            if self.calls.count == 0 or not "".join(self._raw).isspace():
                self._give_up()
            if self.calls.count == 0 or self._space_is_content:
                self._flush_space()
        self._body = None
        self._raw.clear()
        self._space.clear()
        return self._sink.take()

    # -- states ----------------------------------------------------------------------------------------------------

    def _edge(self) -> bool:
        """At the start of the answer or behind a call: white space belongs to whatever follows it."""
        cursor, begin = self._cursor, self._cursor.pos
        blank = SPACE + (self.separators if self.calls.count else "")
        while not cursor.at_end() and cursor.text[cursor.pos] in blank:
            cursor.pos += 1
        self._space.append(cursor.text[begin : cursor.pos])
        self._space_is_content = False
        if cursor.at_end():
            return False
        markers = self._markers(self._expected | (frozenset(self.weak_closers) if self._expected else frozenset()))
        if (marker := markers.at(cursor.text, cursor.pos)) is not None:
            self._at_marker(marker)
            return True
        if cursor.waits_for(markers):
            return False
        body = self.open_bare(cursor)
        if body is not None:
            self._enter(body)
        else:
            self._state = self._content
        return True

    def _content(self) -> bool:
        cursor = self._cursor
        markers = self._markers(self._expected)
        found = markers.find(cursor.text, cursor.pos)
        until = found[0] if found else markers.partial(cursor.text, cursor.pos)
        text = cursor.text[cursor.pos : until]
        cursor.pos = until
        if body := text.rstrip(SPACE):
            self._say(body)
        self._space.append(text[len(body) :])  # belongs to a call that may follow
        self._space_is_content = True
        if found is None:
            return False
        self._at_marker(found[1])
        return True

    def _at_marker(self, marker: str) -> None:
        self._cursor.pos += len(marker)
        if marker in self.starts:
            self._raw.append(marker)
            self._state = self._lead
            self._marker = marker
            return
        self._expected -= {marker}
        if self._state != self._content:
            self._space.clear()
            self._state = self._edge

    def _lead(self) -> bool:
        """Behind an opening marker: white space, further markers, then the body."""
        cursor, begin = self._cursor, self._cursor.pos
        cursor.skip_space()
        self._raw.append(cursor.text[begin : cursor.pos])
        if cursor.at_end():
            return False
        if (marker := self._lead_markers.at(cursor.text, cursor.pos)) is not None:
            self._raw.append(marker)
            cursor.pos += len(marker)
            self._marker = marker
            return True
        if cursor.waits_for(self._lead_markers):
            return False
        body = self.open_body(self._marker, cursor)
        if body is None:
            self._give_up()
        else:
            self._enter(body)
        return True

    def _enter(self, body: Body) -> None:
        self._body = body
        self.calls.settled = False
        self._state = self._inside

    def _inside(self) -> bool:
        body, cursor, begin = self._body, self._cursor, self._cursor.pos
        assert body is not None
        more = body.step(cursor)
        if self.calls.active or self.calls.settled:
            self.calls.settled = False
            self._raw.clear()
            self._space.clear()
            self._expected = frozenset(self.closers)
        else:
            self._raw.append(cursor.text[begin : cursor.pos])
        if body.status is Status.DONE:
            self._body = None
            self._raw.clear()
            self._space.clear()
            self._state = self._edge
            if body.spill:
                self._say(body.spill)
                self._state = self._content
            return True
        if body.status is Status.BROKEN:
            self._give_up()
            return True
        return more

    def _give_up(self) -> None:
        """The text was not a call: held text becomes content, and parsing continues where it stopped."""
        self._body = None
        raw = "".join(self._raw)
        self._raw.clear()
        for marker in self.never_content:
            raw = raw.replace(marker, "")
        if raw:
            self._say(raw)
        self._state = self._content

    def _say(self, text: str) -> None:
        self._flush_space()
        self._sink.content(text)

    def _flush_space(self) -> None:
        self._sink.content("".join(self._space))
        self._space.clear()

    def _markers(self, closing: frozenset[str]) -> Markers:
        return markers_of(*self.starts, *sorted(closing.union(self.never_content).difference(self.starts)))

    def _is_cut_marker(self, rest: str) -> bool:
        """Whether the text ended inside a marker that would not have become content."""
        if self._state == self._edge and rest and markers_of(*sorted(self._expected)).may_start_with(rest):
            return True
        is_between = self._state in (self._edge, self._content)
        return is_between and len(rest) > 1 and markers_of(*self.never_content).may_start_with(rest)
