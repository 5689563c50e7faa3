"""Calls written as a header that names the tool, then bare JSON arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from bough.parsers.json_stream import JsonStream
from bough.parsers.machine import MAX_NAME, Body, Calls, Status, ToolParser, is_name
from bough.parsers.scan import Cursor, Markers, markers_of


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the header after the call's opening marker."""

    kind: tuple[str, str] | None = None
    """A word and the marker behind it, before the name (`function<sep>`)."""
    name_ends: tuple[str, ...]
    """The text that ends the name. A `{`, a line break or a fence is not consumed."""
    id_marker: str = ""
    """Between name and arguments may stand this marker and an id."""
    fence: bool = False
    """The arguments stand in a fenced block."""
    empty_before: tuple[str, ...] = ()
    """Texts in place of the arguments that mean empty arguments."""
    read_name: Callable[[str], tuple[str, str | None]] = lambda text: (text, None)
    """Name and id from the header's text."""
    id_again: str = ""
    """The id of a call whose own was used before, with NAME and INDEX."""


def _kimi_name(text: str) -> tuple[str, str | None]:
    """`functions.get_weather:0`: the whole is the id."""
    name, colon, index = text.removeprefix("functions.").rpartition(":")
    return (name, text) if colon and index.isdigit() else (text.removeprefix("functions."), text)


MISTRAL_HEADER = Header(name_ends=("[ARGS]", "[CALL_ID]", "{"), id_marker="[CALL_ID]")
DEEPSEEK_V3_HEADER = Header(
    kind=("function", "<｜tool▁sep｜>"),
    name_ends=("\n", "```", "{"),
    fence=True,
    empty_before=("<｜tool▁call▁end｜>",),
)
DEEPSEEK_V31_HEADER = Header(name_ends=("<｜tool▁sep｜>",), empty_before=("<｜tool▁call▁end｜>",))
KIMI_K2_HEADER = Header(
    name_ends=("<|tool_call_argument_begin|>",),
    empty_before=("<|tool_call_end|>",),
    read_name=_kimi_name,
    id_again="functions.NAME:INDEX",
)
_KEPT_ENDS = ("{", "\n", "```")
_FENCES = Markers("```json\n", "```json\r", "```json ", "```json{", "```\n", "```{")
_FENCE_END = "```"


class HeaderCalls:
    """A body of one call: header, then one JSON object."""

    def __init__(self, calls: Calls, header: Header) -> None:
        self.status = Status.RUNNING
        self.spill = ""
        self._calls = calls
        self._header = header
        self._name = ""
        self._id: str | None = None
        self._name_ends = markers_of(*header.name_ends)
        self._id_ends = markers_of("[ARGS]", "{")
        self._empty = markers_of(*header.empty_before)
        self._stream = JsonStream()
        self._state = self._kind if header.kind else self._read_name

    def step(self, cursor: Cursor) -> bool:
        return self._state(cursor)

    def _broken(self) -> bool:
        self.status = Status.BROKEN
        return True

    def _word(self, cursor: Cursor, ends: Markers) -> tuple[str, str] | None:
        """The text before the next of `ends`, and which; None: not there yet, or broken."""
        found = cursor.word(ends, MAX_NAME)
        if found is None:
            if cursor.no_word(ends, MAX_NAME):
                self._broken()
            return None
        if found[1] in _KEPT_ENDS:
            cursor.pos -= len(found[1])
        return found[0].strip(), found[1]

    def _kind(self, cursor: Cursor) -> bool:
        assert self._header.kind is not None
        word, marker = self._header.kind
        begin = cursor.pos
        found = self._word(cursor, markers_of(marker))
        if found is None:
            return self.status is not Status.RUNNING
        if found[0] != word:
            cursor.pos = begin
            return self._broken()
        self._state = self._read_name
        return True

    def _read_name(self, cursor: Cursor) -> bool:
        begin = cursor.pos
        found = self._word(cursor, self._name_ends)
        if found is None:
            return self.status is not Status.RUNNING
        self._name, self._id = self._header.read_name(found[0])
        if not is_name(self._name):
            cursor.pos = begin
            return self._broken()
        if self._header.id_again and self._id is not None and self._calls.used(self._id):
            self._id = self._header.id_again.replace("INDEX", str(self._calls.count)).replace("NAME", self._name)
        self._state = self._read_id if found[1] == self._header.id_marker else self._open
        return True

    def _read_id(self, cursor: Cursor) -> bool:
        begin = cursor.pos
        found = self._word(cursor, self._id_ends)
        if found is None:
            return self.status is not Status.RUNNING
        if len(found[0].split()) > 1:
            cursor.pos = begin
            return self._broken()
        self._id = found[0] or None
        self._state = self._open
        return True

    def _open(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        if self._header.fence:
            if (fence := _FENCES.at(cursor.text, cursor.pos)) is not None:
                cursor.pos += len(fence.rstrip("{"))
                self._empty = markers_of(*self._header.empty_before, _FENCE_END)
                self._state = self._arguments_open
                return True
            if cursor.waits_for(_FENCES):
                return False
        self._state = self._arguments_open
        return True

    def _arguments_open(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end() or cursor.waits_for(self._empty):
            return False
        if cursor.text[cursor.pos] == "{":
            self._calls.begin(self._name, self._id)
            self._state = self._arguments
            return True
        if self._empty.at(cursor.text, cursor.pos) is not None:
            self._calls.whole(self._name, "{}", self._id)
            self.status = Status.DONE
            return True
        return self._broken()

    def _arguments(self, cursor: Cursor) -> bool:
        cursor.pos = self._stream.consume(cursor.text, cursor.pos)
        self._calls.arguments(self._stream.take())
        if self._stream.failed:
            self._calls.cut()
            self.spill = self._stream.pending()
            self.status = Status.DONE
            return True
        if self._stream.done:
            self._calls.end()
            self.status = Status.DONE
        return self._stream.done


class Headed:
    """A body behind a header: reads up to one of `ends`; `then` is given the header and its end, and opens what follows.

    `then` may return a status instead: BROKEN (there is no call) or DONE (there is none, and the header is no content).
    `lead`: what the header begins with. `skipped`: may stand between the header and the body, behind white space.
    """

    def __init__(
        self,
        ends: Markers,
        then: Callable[[str, str], Body | Status],
        *,
        lead: str = "",
        skipped: tuple[str, ...] = (),
    ) -> None:
        self.status = Status.RUNNING
        self.spill = ""
        self._ends = ends
        self._then = then
        self._lead = lead
        self._skipped = markers_of(*skipped)
        self._body: Body | None = None
        self._state: Callable[[Cursor], bool] = self._read_lead if lead else self._read_header

    def step(self, cursor: Cursor) -> bool:
        return self._state(cursor)

    def _broken(self) -> bool:
        self.status = Status.BROKEN
        return True

    def _read_lead(self, cursor: Cursor) -> bool:
        if not cursor.text.startswith(self._lead, cursor.pos):
            return not cursor.waits_for(markers_of(self._lead)) and self._broken()
        cursor.pos += len(self._lead)
        self._state = self._read_header
        return True

    def _read_header(self, cursor: Cursor) -> bool:
        begin = cursor.pos
        found = cursor.word(self._ends, MAX_NAME)
        if found is None:
            return cursor.no_word(self._ends, MAX_NAME) and self._broken()
        if len(found[0].split()) > 1:
            cursor.pos = begin
            return self._broken()
        body = self._then(*found)
        if isinstance(body, Status):
            self.status = body
            return True
        self._body = body
        self._state = self._open
        return True

    def _open(self, cursor: Cursor) -> bool:
        cursor.skip_space()
        if cursor.at_end():
            return False
        if (skipped := self._skipped.at(cursor.text, cursor.pos)) is not None:
            cursor.pos += len(skipped)
            return True
        if cursor.waits_for(self._skipped):
            return False
        self._state = self._inside
        return True

    def _inside(self, cursor: Cursor) -> bool:
        assert self._body is not None
        more = self._body.step(cursor)
        self.status, self.spill = self._body.status, self._body.spill
        return more


class HeaderToolParser(ToolParser):
    """Sections of calls: `<section> (<call> header arguments </call>)* </section>`."""

    needs_special_tokens = True
    header: ClassVar[Header]

    def open_body(self, marker: str, cursor: Cursor) -> HeaderCalls | None:
        return HeaderCalls(self.calls, self.header) if marker == self.leads[0] else None


class DeepseekV3Parser(HeaderToolParser):
    """DeepSeek V3 and R1-0528: `<call begin>function<sep>name`, then the arguments in a fenced JSON block."""

    starts = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    leads = ("<｜tool▁call▁begin｜>",)
    closers = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    weak_closers: ClassVar[tuple[str, ...]] = ("```",)
    header = DEEPSEEK_V3_HEADER

    def extra_markers(self) -> tuple[str, ...]:
        return ("<｜tool▁sep｜>",)


class DeepseekV31Parser(DeepseekV3Parser):
    """DeepSeek V3.1: `<call begin>name<sep>{...}<call end>`."""

    weak_closers = ()
    header = DEEPSEEK_V31_HEADER


class KimiK2Parser(HeaderToolParser):
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section; the
    model writes the id, and it is kept."""

    starts = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    leads = ("<|tool_call_begin|>",)
    closers = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    never_content: ClassVar[tuple[str, ...]] = (*starts, *closers, "<|tool_call_argument_begin|>")
    header = KIMI_K2_HEADER

    def extra_markers(self) -> tuple[str, ...]:
        return ("<|tool_call_argument_begin|>",)
