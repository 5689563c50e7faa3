"""Parsing takes time in proportion to the text, also for texts made to hurt."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from bough.parsers import REASONING_FORMATS, TOOL_FORMATS, reasoning_parser

SIZE = 40_000
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


def seconds(make: Any, pieces: Iterable[str]) -> float:
    """This thread's own: what others do meanwhile counts for nothing, nor does what they left to tidy up."""
    parser = make()
    gc.disable()
    started = time.thread_time()
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    took = time.thread_time() - started
    gc.enable()
    return took


def grows_linearly(make: Any, small: Sequence[str], large: Sequence[str]) -> bool:
    floor = 0.004  # below this the clock and the machine speak, not the parser
    best_small = best_large = float("inf")
    for _ in range(6):  # a machine that is slow once is not so six times
        best_small = min(best_small, seconds(make, small))
        best_large = min(best_large, seconds(make, large))
        if best_large < max(best_small, floor) * GROWTH * TOLERANCE:
            return True
    return False


def assert_linear(make: Any, prefix: str, unit: str) -> None:
    small = prefix + unit * (SIZE // GROWTH // len(unit) + 1)
    large = prefix + unit * (SIZE // len(unit) + 1)
    assert grows_linearly(make, [small], [large]), f"not in proportion for {unit!r} behind {prefix!r}"


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

    small, large = (sample[:at] + "x" * length + sample[at:] for length in (2_000, 2_000 * GROWTH))
    assert grows_linearly(lambda: new_tool_parser(name), small, large)
