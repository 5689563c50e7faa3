"""Every sample of every format: whole, by characters, and cut once, at every place of the samples with most marks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from bough.core.messages import Reasoning
from bough.parsers import REASONING_FORMATS, TOOL_FORMATS


def test_tool_sample(tool_sample: dict[str, Any], new_tool_parser: Any, parse_pieces: Any) -> None:
    parsed = parse_pieces(new_tool_parser(tool_sample["parser"]), [tool_sample["text"]])
    whole = [call for call in parsed.tool_calls if call.complete]
    assert [{"name": c.name, "arguments": json.loads(c.arguments)} for c in whole] == [
        {"name": c["name"], "arguments": c["arguments"]} for c in tool_sample["calls"]
    ]
    assert parsed.content == tool_sample["content"]
    assert parsed.reasoning == ""
    assert [call.index for call in parsed.tool_calls] == list(range(len(parsed.tool_calls)))
    for call, expected in zip(whole, tool_sample["calls"], strict=True):
        assert "id" not in expected or call.id == expected["id"]
    cut = [{"name": c.name, "arguments": c.arguments} for c in parsed.tool_calls if not c.complete]
    assert cut == ([tool_sample["cut"]] if "cut" in tool_sample else [])


def test_reasoning_sample(reasoning_sample: dict[str, Any], new_reasoning_parser: Any, parse_pieces: Any) -> None:
    parsed = parse_pieces(new_reasoning_parser(reasoning_sample), [reasoning_sample["text"]])
    assert (parsed.reasoning, parsed.content) == (reasoning_sample["reasoning"], reasoning_sample["content"])


def test_tool_sample_cut_anywhere(tool_sample: dict[str, Any], new_tool_parser: Any, parse_pieces: Any) -> None:
    name, text = tool_sample["parser"], tool_sample["text"]
    whole = parse_pieces(new_tool_parser(name), [text])
    assert parse_pieces(new_tool_parser(name), list(text)) == whole
    everywhere = len(tool_sample["calls"]) == 2 or "cut" in tool_sample or not tool_sample["calls"]
    for at in range(len(text) + 1) if everywhere else range(len(tool_sample["name"]) % 4, len(text) + 1, 4):
        assert parse_pieces(new_tool_parser(name), [text[:at], text[at:]]) == whole


def test_reasoning_sample_cut_anywhere(
    reasoning_sample: dict[str, Any], new_reasoning_parser: Any, parse_pieces: Any
) -> None:
    text = reasoning_sample["text"]
    whole = parse_pieces(new_reasoning_parser(reasoning_sample), [text])
    assert parse_pieces(new_reasoning_parser(reasoning_sample), list(text)) == whole
    for at in range(len(text) + 1):
        assert parse_pieces(new_reasoning_parser(reasoning_sample), [text[:at], text[at:]]) == whole


def test_held_reasoning_is_one_event_a_section(
    reasoning_sample: dict[str, Any], new_reasoning_parser: Any, run_pieces: Any
) -> None:
    text = reasoning_sample["text"]
    events = run_pieces(new_reasoning_parser(reasoning_sample, stream_reasoning=False), list(text))
    told = [event.text for event in events if isinstance(event, Reasoning)]
    assert "".join(told) == reasoning_sample["reasoning"]
    sections = 2 if "second section" in reasoning_sample["name"] or "two analysis" in reasoning_sample["name"] else 1
    assert len(told) <= sections


@pytest.mark.parametrize(("kind", "formats"), [("tools", TOOL_FORMATS), ("reasoning", REASONING_FORMATS)])
def test_every_parser_has_at_least_eight_samples(
    kind: str, formats: dict[str, Any], tool_samples: list[dict[str, Any]], reasoning_samples: list[dict[str, Any]]
) -> None:
    counted = Counter(sample["parser"] for sample in (tool_samples if kind == "tools" else reasoning_samples))
    assert set(counted) == set(formats)
    assert min(counted.values()) >= 8
