"""Parsing takes time in proportion to the text, also for texts made to hurt."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bough.parsers import REASONING_FORMATS, TOOL_FORMATS, reasoning_parser

SIZE = 200_000
GROWTH = 8
TOLERANCE = 3.0
"""A quadratic parser takes GROWTH ** 2 times as long; noise on a busy machine stays below GROWTH * TOLERANCE."""


def outside(markers: tuple[str, ...], sample: str) -> list[str]:
    """What may hurt in content; repeated to any length."""
    halves = "".join(marker[:-1] for marker in markers)
    return [
        "The quick brown fox jumps over the lazy dog. ",
        markers[0],
        halves,
        "".join(markers),
        sample + "\n",
        " \n",
        "[",
    ]


def inside(markers: tuple[str, ...]) -> list[str]:
    """What may hurt inside a call or a section."""
    return ["word ", "".join(markers), "[", '{"a":', "\"'", "\\", "1"]


def seconds(make: Any, text: str) -> float:
    parser = make()
    started = time.perf_counter()
    parser.feed(text)
    parser.finish()
    return time.perf_counter() - started


def assert_linear(make: Any, prefix: str, unit: str) -> None:
    small = prefix + unit * (SIZE // GROWTH // len(unit) + 1)
    large = prefix + unit * (SIZE // len(unit) + 1)
    floor = 0.004  # below this the clock and the machine speak, not the parser
    for _ in range(4):  # a machine that stalls once does not stall four times
        if seconds(make, large) < max(seconds(make, small), floor) * GROWTH * TOLERANCE:
            return
    pytest.fail(f"takes more than proportionally longer for {unit!r} behind {prefix!r}")


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_tool_parsers_are_linear(name: str, tool_samples: list[dict[str, Any]], new_tool_parser: Any) -> None:
    sample = next(s["text"] for s in tool_samples if s["parser"] == name)
    opened = next(
        (s["text"] for s in tool_samples if s["parser"] == name and s["name"] == "stopped inside the arguments"), sample
    )
    markers = new_tool_parser(name).markers
    for prefix, units in (("", outside(markers, sample)), (opened, inside(markers))):
        for unit in units:
            assert_linear(lambda: new_tool_parser(name), prefix, unit)


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_reasoning_parsers_are_linear(name: str) -> None:
    format = REASONING_FORMATS[name]
    markers = reasoning_parser(name).markers
    section = format.start + "hm" + format.end
    for prefix, units in (("", outside(markers, section)), (format.start, inside(markers))):
        for unit in units:
            assert_linear(lambda: reasoning_parser(name), prefix, unit)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "gpt-oss"])
def test_single_characters_are_linear(name: str, tool_samples: list[dict[str, Any]], new_tool_parser: Any) -> None:
    """A long argument, one character at a time."""
    sample = next(
        s["text"]
        for s in tool_samples
        if s["parser"] == name and s["name"] == "quotes, backslashes, line breaks, many scripts"
    )
    at = sample.index("line two")

    def took(length: int) -> float:
        parser = new_tool_parser(name)
        text = sample[:at] + "x" * length + sample[at:]
        started = time.perf_counter()
        for char in text:
            parser.feed(char)
        parser.finish()
        return time.perf_counter() - started

    small = min(took(2_000) for _ in range(3))
    assert min(took(2_000 * GROWTH) for _ in range(2)) < small * GROWTH * TOLERANCE
