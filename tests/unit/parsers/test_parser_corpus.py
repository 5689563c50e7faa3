"""Every sample of every format: whole, by characters, and cut once, at every place of the samples with most marks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from bough.core.messages import Reasoning
from bough.parsers import REASONING_FORMATS, TOOL_FORMATS

Samples = list[dict[str, Any]]


def test_tool_samples(tool_samples_of_one: Samples, new_tool_parser: Any, parse_pieces: Any) -> None:
    for sample in tool_samples_of_one:
        which = sample["name"]
        parsed = parse_pieces(new_tool_parser(sample["parser"]), [sample["text"]])
        whole = [call for call in parsed.tool_calls if call.complete]
        assert [{"name": c.name, "arguments": json.loads(c.arguments)} for c in whole] == [
            {"name": c["name"], "arguments": c["arguments"]} for c in sample["calls"]
        ], which
        assert parsed.content == sample["content"], which
        assert parsed.reasoning == "", which
        assert [call.index for call in parsed.tool_calls] == list(range(len(parsed.tool_calls))), which
        for call, expected in zip(whole, sample["calls"], strict=True):
            assert "id" not in expected or call.id == expected["id"], which
        cut = [{"name": c.name, "arguments": c.arguments} for c in parsed.tool_calls if not c.complete]
        assert cut == ([sample["cut"]] if "cut" in sample else []), which


def test_reasoning_samples(reasoning_samples_of_one: Samples, new_reasoning_parser: Any, parse_pieces: Any) -> None:
    for sample in reasoning_samples_of_one:
        parsed = parse_pieces(new_reasoning_parser(sample), [sample["text"]])
        assert (parsed.reasoning, parsed.content) == (sample["reasoning"], sample["content"]), sample["name"]


def test_tool_samples_cut_anywhere(tool_samples_of_one: Samples, new_tool_parser: Any, parse_pieces: Any) -> None:
    for sample in tool_samples_of_one:
        name, text = sample["parser"], sample["text"]
        whole = parse_pieces(new_tool_parser(name), [text])
        assert parse_pieces(new_tool_parser(name), list(text)) == whole, sample["name"]
        everywhere = len(sample["calls"]) == 2 or "cut" in sample or not sample["calls"]
        for at in range(len(text) + 1) if everywhere else range(len(sample["name"]) % 4, len(text) + 1, 4):
            assert parse_pieces(new_tool_parser(name), [text[:at], text[at:]]) == whole, (sample["name"], at)


def test_reasoning_samples_cut_anywhere(
    reasoning_samples_of_one: Samples, new_reasoning_parser: Any, parse_pieces: Any
) -> None:
    for sample in reasoning_samples_of_one:
        text = sample["text"]
        whole = parse_pieces(new_reasoning_parser(sample), [text])
        assert parse_pieces(new_reasoning_parser(sample), list(text)) == whole, sample["name"]
        for at in range(len(text) + 1):
            assert parse_pieces(new_reasoning_parser(sample), [text[:at], text[at:]]) == whole, (sample["name"], at)


def test_held_reasoning_is_one_event_a_section(
    reasoning_samples_of_one: Samples, new_reasoning_parser: Any, run_pieces: Any
) -> None:
    for sample in reasoning_samples_of_one:
        events = run_pieces(new_reasoning_parser(sample, stream_reasoning=False), list(sample["text"]))
        told = [event.text for event in events if isinstance(event, Reasoning)]
        assert "".join(told) == sample["reasoning"], sample["name"]
        sections = 2 if "second section" in sample["name"] or "two analysis" in sample["name"] else 1
        assert len(told) <= sections, sample["name"]


@pytest.mark.parametrize(("kind", "formats"), [("tools", TOOL_FORMATS), ("reasoning", REASONING_FORMATS)])
def test_every_parser_has_at_least_eight_samples(
    kind: str, formats: dict[str, Any], tool_samples: list[dict[str, Any]], reasoning_samples: list[dict[str, Any]]
) -> None:
    counted = Counter(sample["parser"] for sample in (tool_samples if kind == "tools" else reasoning_samples))
    assert set(counted) == set(formats)
    assert min(counted.values()) >= 8
