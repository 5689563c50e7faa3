"""Reasoning: a section between delimiters, before the answer. Formats are in a table; one state machine reads all of
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bough.core.messages import Content, ParsedEvent
from bough.parsers.events import EventSink
from bough.parsers.harmony import HarmonyReasoningParser
from bough.parsers.reasoning_formats import FORMATS, ReasoningFormat, reasoning_format
from bough.parsers.scan import SPACE, Cursor, Markers, Parser, markers_of

__all__ = [
    "FORMATS",
    "DelimitedReasoningParser",
    "ReasoningFormat",
    "ReasoningParser",
    "chat_closed_reasoning",
    "chat_opens_reasoning",
    "prompt_opens_reasoning",
    "reasoning_format",
    "reasoning_parser",
]


class ReasoningParser(Parser, Protocol):
    @property
    def in_reasoning(self) -> bool:
        """Whether the text fed so far ends inside the reasoning."""
        ...


class DelimitedReasoningParser:
    """Reasoning between a format's delimiters becomes Reasoning, the rest Content.

    White space is kept as the model wrote it, but for what the format says belongs to the delimiters. Only at the start of
    the answer (behind white space) is a start a start, unless the format says `again`. A delimiter that the text's end
    cuts is left out.
    """

    def __init__(
        self, format: ReasoningFormat, *, force_reasoning: bool | None = None, stream_reasoning: bool = True
    ) -> None:
        self._format = format
        self._sink = EventSink(hold_reasoning=not stream_reasoning)
        self._cursor = Cursor()
        self._space: list[str] = []
        self._inside = format.starts_inside if force_reasoning is None else force_reasoning
        self._starts = markers_of(*format.starts)
        self._ends = markers_of(*format.ends, *format.ended_by)
        self._dropped = markers_of(*format.dropped)
        self._answer_opens = markers_of(*(opening for opening, _ in format.answer))
        self._answer_closes = dict(format.answer)
        self._closer = ""
        self._trim = format.trim
        self._at_delimiter = False
        self._interrupted = False
        self._state: Callable[[], bool] = self._begin

    @property
    def needs_special_tokens(self) -> bool:
        return self._format.needs_special_tokens

    @property
    def markers(self) -> tuple[str, ...]:
        format = self._format
        wrappers = tuple(marker for pair in format.answer for marker in pair)
        resumes = (format.resumes_after,) if format.resumes_after else ()
        return tuple(
            dict.fromkeys((*format.starts, *format.ends, *format.ended_by, *wrappers, *format.dropped, *resumes))
        )

    @property
    def in_reasoning(self) -> bool:
        return self._inside

    def feed(self, text: str) -> list[ParsedEvent]:
        self._cursor.feed(text)
        while self._state():
            pass
        return self._sink.take()

    def finish(self) -> list[ParsedEvent]:
        rest = self._cursor.take_rest()
        cut = self._ends if self._inside else self._answer_markers()
        if len(rest) > 1 and self._state != self._begin and cut.may_start_with(rest):
            rest = ""
        if rest or not self._at_delimiter:
            rest = "".join(self._space) + rest
        self._space.clear()
        if self._inside:
            self._sink.reasoning(rest)
        else:
            self._sink.content(rest)
        self._sink.reasoning_ends()
        return self._sink.take()

    def _hold(self, chars: str) -> None:
        """Move leading `chars` aside; directly behind a delimiter they are part of it."""
        cursor, begin = self._cursor, self._cursor.pos
        while not cursor.at_end() and cursor.text[cursor.pos] in chars:
            cursor.pos += 1
        if not self._at_delimiter:
            self._space.append(cursor.text[begin : cursor.pos])

    # -- states ----------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """At the very start: white space, then perhaps the start of the section."""
        cursor = self._cursor
        self._hold(SPACE)
        if cursor.at_end():
            return False
        if (start := self._starts.at(cursor.text, cursor.pos)) is not None:
            self._open_section(start)
            return True
        if not self._inside and (marker := self._dropped.at(cursor.text, cursor.pos)) is not None:
            cursor.pos += len(marker)
            self._space.clear()
            self._state = self._answer_begin
            return True
        if cursor.waits_for(self._starts) or (not self._inside and cursor.waits_for(self._dropped)):
            return False
        if self._inside:
            self._space = ["".join(self._space).lstrip(self._trim)]
            self._state = self._reasoning
        else:
            self._state = self._answer_begin
        return True

    def _open_section(self, start: str) -> None:
        self._cursor.pos += len(start)
        self._space.clear()
        self._inside = True
        self._at_delimiter = True
        self._state = self._label if self._format.label else self._section_begin

    def _label(self) -> bool:
        label = markers_of(self._format.label)
        if label.at(self._cursor.text, self._cursor.pos) is not None:
            self._cursor.pos += len(self._format.label)
        elif self._cursor.waits_for(label):
            return False
        self._state = self._section_begin
        return True

    def _section_begin(self) -> bool:
        self._hold(self._trim)
        if self._cursor.at_end():
            return False
        self._at_delimiter = False
        self._state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        """Inside: white space of the delimiters waits, for it may belong to the end."""
        cursor = self._cursor
        found = self._ends.find(cursor.text, cursor.pos)
        until = found[0] if found else self._ends.partial(cursor.text, cursor.pos)
        text = cursor.text[cursor.pos : until]
        cursor.pos = until
        body = text.rstrip(self._trim)
        if body:
            self._sink.reasoning("".join(self._space) + body)
            self._space.clear()
        self._space.append(text[len(body) :])
        if found is None:
            return False
        self._space.clear()
        self._inside = False
        self._sink.reasoning_ends()
        self._interrupted = found[1] not in self._format.ends
        if not self._interrupted:
            cursor.pos += len(found[1])
            self._at_delimiter = True
            self._state = self._answer_begin
        else:
            self._state = self._answer
        return True

    def _answer_begin(self) -> bool:
        """Before the answer: white space, perhaps the opening of a wrapper, perhaps another section."""
        cursor = self._cursor
        self._hold(self._trim)
        if cursor.at_end():
            return False
        if (opening := self._answer_opens.at(cursor.text, cursor.pos)) is not None:
            cursor.pos += len(opening)
            self._space.clear()
            self._at_delimiter = True
            self._closer = self._answer_closes[opening]
            return True
        if cursor.waits_for(self._answer_opens):
            return False
        self._at_delimiter = False
        self._sink.content("".join(self._space))
        self._space.clear()
        self._state = self._answer
        return True

    def _answer_markers(self) -> Markers:
        """What may stand inside the answer without being part of it."""
        format = self._format
        closers = (self._closer, *(c + self._closer for c in format.trim)) if self._closer else ()
        resumes = (format.resumes_after,) if self._interrupted and format.resumes_after else ()
        return markers_of(*closers, *format.dropped, *resumes, *(format.starts if format.again else ()))

    def _answer(self) -> bool:
        cursor, format = self._cursor, self._format
        markers = self._answer_markers()
        found = markers.find(cursor.text, cursor.pos)
        until = found[0] if found else markers.partial(cursor.text, cursor.pos)
        self._sink.content(cursor.text[cursor.pos : until])
        cursor.pos = until
        if found is None:
            return False
        if found[1] in format.starts:
            self._open_section(found[1])
            return True
        cursor.pos += len(found[1])
        if found[1] == format.resumes_after:
            self._sink.content(found[1])
            self._interrupted, self._inside = False, True
            self._state = self._reasoning
        elif found[1] not in format.dropped:
            self._closer = ""
            self._at_delimiter = True
            self._state = self._answer_begin
        return True


class UnseparatedReasoningParser:
    """Everything is Content, preceded by the start of the section if the prompt ended with it."""

    in_reasoning = False

    def __init__(self, format: ReasoningFormat, *, is_open: bool) -> None:
        self._before = format.start if is_open else ""
        self.needs_special_tokens = format.needs_special_tokens
        self.markers = (format.start, format.end)

    def feed(self, text: str) -> list[ParsedEvent]:
        if not text:
            return []
        before, self._before = self._before, ""
        return [Content(before + text)]

    def finish(self) -> list[ParsedEvent]:
        return []


def reasoning_parser(
    name: str, *, force_reasoning: bool | None = None, stream_reasoning: bool = True
) -> ReasoningParser:
    """A parser for one answer.

    force_reasoning: whether the prompt ends inside the section (None: as usual for the format, see
    `prompt_opens_reasoning`). stream_reasoning: False delivers each section as one event, when it ends.
    """
    format = reasoning_format(name)
    if format.harmony:
        return HarmonyReasoningParser(force_reasoning=bool(force_reasoning), stream_reasoning=stream_reasoning)
    if format.stays_content:
        return UnseparatedReasoningParser(format, is_open=force_reasoning is not False)
    return DelimitedReasoningParser(format, force_reasoning=force_reasoning, stream_reasoning=stream_reasoning)


def prompt_opens_reasoning(prompt: str, name: str, *, continued: str = "") -> bool:
    """Whether the answer to a rendered prompt begins inside the reasoning: the template ended it with the start.

    `continued`: the beginning of the answer, where the client wrote one and the prompt ends with it. Text of earlier
    turns never counts.
    """
    format = reasoning_format(name)
    if continued:
        opened = max(continued.rfind(start) for start in format.starts)
        return opened >= 0 and opened > max(continued.rfind(end) for end in format.ends)
    tail = prompt.rstrip(SPACE)
    return any(tail.endswith((start, (start + format.label).rstrip(SPACE))) for start in format.starts)


def chat_opens_reasoning(prompt: str, name: str, *, continued: str = "", switched_off: bool = False) -> bool:
    """Like `prompt_opens_reasoning`, for a prompt that the model's template rendered: where it says neither that the
    section is open nor that it is over, the format decides, unless the client has `switched_off` the reasoning."""
    if prompt_opens_reasoning(prompt, name, continued=continued):
        return True
    over = switched_off or chat_closed_reasoning(prompt, name, continued=continued)
    return reasoning_format(name).starts_inside and not over


def chat_closed_reasoning(prompt: str, name: str, *, continued: str = "") -> bool:
    """Whether a chat's answer, which does not begin inside a section, begins behind one: the prompt ends with its end, or
    with the answer's own beginning (`continued`)."""
    return bool(continued) or prompt.rstrip(SPACE).endswith(reasoning_format(name).ends)
