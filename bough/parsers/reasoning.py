"""Reasoning formats: a section between delimiters, before the answer. The formats are a table; one machine reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from bough.core.messages import ParsedEvent
from bough.parsers.events import EventSink
from bough.parsers.harmony import HarmonyReasoningParser
from bough.parsers.names import lookup
from bough.parsers.scan import SPACE, Cursor, Parser, markers_of


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a family marks its reasoning. `starts[0]` and `ends[0]` are what it writes today; the others are understood."""

    name: str
    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    starts_inside: bool = False
    """The prompt ends inside the section: its start is not part of the answer (and is dropped if the model repeats it)."""
    ended_by: tuple[str, ...] = ()
    """Markers of tool calls that end the section although its own end is missing; they stay part of the answer."""
    label: str = ""
    """A word the format writes behind the start."""
    again: bool = False
    """Further sections may follow inside the answer (where the delimiters are special tokens, nothing else looks so)."""
    answer: tuple[tuple[str, str], ...] = ()
    """Wrappers of the answer that are not part of it."""
    answer_prefix: str = ""
    """What the model writes between the end and the answer; a grammar for the answer starts behind it."""
    trim: str = "\r\n"
    """Characters next to the delimiters that belong to them."""
    needs_special_tokens: bool = False
    harmony: bool = False

    @property
    def start(self) -> str:
        return self.starts[0]

    @property
    def end(self) -> str:
        return self.ends[0]

    @property
    def forced_end(self) -> str:
        """What to append when the thinking budget is spent, so that the answer begins."""
        return self.end + self.answer_prefix


class ReasoningParser(Parser, Protocol):
    @property
    def in_reasoning(self) -> bool:
        """Whether the text fed so far ends inside the reasoning."""
        ...


def _format(name: str, **fields: object) -> ReasoningFormat:
    return msgspec.convert({"name": name, **fields}, ReasoningFormat)


_QWEN_TOOL = ("<tool_call>",)
FORMATS: dict[str, ReasoningFormat] = {
    entry.name: entry
    for entry in (
        _format("deepseek-r1", starts_inside=True),
        _format("deepseek-v3", ended_by=("<｜tool▁calls▁begin｜>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")),
        _format("qwen3", ended_by=_QWEN_TOOL),
        _format("qwen3-thinking", starts_inside=True, ended_by=_QWEN_TOOL),
        _format("glm45", ended_by=_QWEN_TOOL),
        _format(
            "gpt-oss",
            starts=("<|channel|>analysis<|message|>",),
            ends=("<|end|>",),
            answer_prefix="<|start|>assistant<|channel|>final<|message|>",
            harmony=True,
            needs_special_tokens=True,
        ),
        _format("kimi", starts=("◁think▷",), ends=("◁/think▷",), needs_special_tokens=True),
        _format("kimi_k2", ended_by=("<|tool_calls_section_begin|>",)),
        _format("step3", starts_inside=True, ended_by=("<｜tool_calls_begin｜>",)),
        _format("minimax", starts_inside=True, ended_by=("<minimax:tool_call>",)),
        _format(
            "mistral",
            starts=("[THINK]", "<think>"),
            ends=("[/THINK]", "</think>"),
            ended_by=("[TOOL_CALLS]",),
            needs_special_tokens=True,
        ),
        _format("nemotron_3", ended_by=_QWEN_TOOL),
        _format(
            "granite",
            starts=("<think>", "Here is my thought process:", "Here's my thought process:"),
            ends=("</think>", "Here is my response:", "Here's my response:"),
            answer=(("<response>", "</response>"),),
            trim=SPACE,
        ),
        _format(
            "gemma",
            starts=("<|channel>",),
            ends=("<channel|>",),
            label="thought\n",
            again=True,
            needs_special_tokens=True,
        ),
        _format("hunyuan", ended_by=("<tool_calls>",), answer=(("<answer>", "</answer>"),)),
        _format(
            "hunyuan-opensource",
            starts=("<think:opensource>",),
            ends=("</think:opensource>",),
            ended_by=("<tool_calls:opensource>",),
            needs_special_tokens=True,
        ),
        _format("interns1", ended_by=("<|action_start|>",)),
        _format("ernie", starts_inside=True, ended_by=_QWEN_TOOL, answer=(("<response>", "</response>"),)),
        _format(
            "command-r",
            starts=("<|START_THINKING|>",),
            ends=("<|END_THINKING|>",),
            ended_by=("<|START_ACTION|>",),
            answer=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
            needs_special_tokens=True,
        ),
    )
}
ALIASES = {
    "deepseek-v31": "deepseek-v3",
    "deepseek-v32": "deepseek-v3",
    "gemma4": "gemma",
    "glm47": "glm45",
    "granite-thinking-parser": "granite",
    "minimax-m2": "minimax",
    "ernie45": "ernie",
    "hunyuan-a13b": "hunyuan",
    "cohere-command4": "command-r",
    "openai": "gpt-oss",
}


class DelimitedReasoningParser:
    """Reasoning between a format's delimiters becomes Reasoning, the rest Content.

    Line breaks next to the delimiters belong to them and are dropped. Only at the start of the answer (behind white
    space) is a start a start, unless the format says `again`.
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
        self._answer_opens = markers_of(*(opening for opening, _ in format.answer))
        self._answer_closes = dict(format.answer)
        self._closer = ""
        self._trim = format.trim
        self._at_delimiter = False
        self._state: Callable[[], bool] = self._begin

    @property
    def needs_special_tokens(self) -> bool:
        return self._format.needs_special_tokens

    @property
    def markers(self) -> tuple[str, ...]:
        format = self._format
        wrappers = tuple(marker for pair in format.answer for marker in pair)
        return (*format.starts, *format.ends, *format.ended_by, *wrappers)

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
        if cursor.waits_for(self._starts):
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
        if found[1] in self._format.ends:
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

    def _answer(self) -> bool:
        cursor, format = self._cursor, self._format
        closers = (self._closer, *(c + self._closer for c in format.trim)) if self._closer else ()
        markers = markers_of(*closers, *(format.starts if format.again else ()))
        found = markers.find(cursor.text, cursor.pos)
        until = found[0] if found else markers.partial(cursor.text, cursor.pos)
        self._sink.content(cursor.text[cursor.pos : until])
        cursor.pos = until
        if found is None:
            return False
        if found[1] in closers:
            cursor.pos += len(found[1])
            self._closer = ""
            self._at_delimiter = True
            self._state = self._answer_begin
        else:
            self._open_section(found[1])
        return True


def reasoning_format(name: str) -> ReasoningFormat:
    """The format called `name` (or an alias); underscores, dots and hyphens are the same."""
    return lookup(FORMATS, ALIASES, name, kind="reasoning parser", flag="--reasoning-parser")


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
