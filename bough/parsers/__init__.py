"""Reasoning and tool-call formats: one incremental parser each, without I/O.

in: text as it is generated. out: events (content, reasoning, tool calls). never: tokens, torch, I/O, exceptions over text.
"""

from bough.parsers.detect import detect_reasoning_parser, detect_tool_parser
from bough.parsers.events import Parsed, ToolCall, ToolSpec, assemble, tool_specs
from bough.parsers.names import UnknownParser
from bough.parsers.reasoning import (
    FORMATS as REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    chat_closed_reasoning,
    chat_opens_reasoning,
    prompt_opens_reasoning,
    reasoning_format,
    reasoning_parser,
)
from bough.parsers.response import ResponseParser, parse_tool_calls, separate_reasoning
from bough.parsers.scan import Parser
from bough.parsers.tools import (
    FORMATS as TOOL_FORMATS,
    CallTag,
    ToolCallFormat,
    ToolFormat,
    call_format,
    tool_format,
    tool_parser,
)

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "CallTag",
    "Parsed",
    "Parser",
    "ReasoningFormat",
    "ReasoningParser",
    "ResponseParser",
    "ToolCall",
    "ToolCallFormat",
    "ToolFormat",
    "ToolSpec",
    "UnknownParser",
    "assemble",
    "call_format",
    "chat_closed_reasoning",
    "chat_opens_reasoning",
    "detect_reasoning_parser",
    "detect_tool_parser",
    "parse_tool_calls",
    "prompt_opens_reasoning",
    "reasoning_format",
    "reasoning_parser",
    "separate_reasoning",
    "tool_format",
    "tool_parser",
    "tool_specs",
]
