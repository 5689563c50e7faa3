"""The corpus as parameters: `tool_samples_of_one` and `reasoning_samples_of_one` are every parser's samples, in turn."""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough.parsers import Parser, ToolSpec, assemble, reasoning_parser, tool_parser, tool_specs

CORPUS = Path(__file__).parent / "corpus"


@cache
def load(kind: str) -> list[dict[str, Any]]:
    samples = []
    for path in sorted((CORPUS / kind).glob("*.yaml")):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        samples += [{"parser": document["parser"], **sample} for sample in document["samples"]]
    return samples


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, kind in (("tool_samples_of_one", "tools"), ("reasoning_samples_of_one", "reasoning")):
        if fixture in metafunc.fixturenames:
            by_parser: dict[str, list[dict[str, Any]]] = {}
            for sample in load(kind):
                by_parser.setdefault(sample["parser"], []).append(sample)
            metafunc.parametrize(fixture, by_parser.values(), ids=by_parser)


@pytest.fixture(scope="session")
def tool_samples() -> list[dict[str, Any]]:
    return load("tools")


@pytest.fixture(scope="session")
def reasoning_samples() -> list[dict[str, Any]]:
    return load("reasoning")


@pytest.fixture(scope="session")
def offered() -> list[ToolSpec]:
    return tool_specs(yaml.safe_load((CORPUS / "offered.yaml").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def new_tool_parser(offered: list[ToolSpec]) -> Any:
    """Tool parsers whose ids count up, so that two runs can be compared."""

    def make(name: str) -> Parser:
        numbers = count()
        return tool_parser(name, offered, new_id=lambda: f"id{next(numbers)}")

    return make


@pytest.fixture(scope="session")
def new_reasoning_parser() -> Any:
    def make(sample: dict[str, Any], **options: Any) -> Parser:
        return reasoning_parser(sample["parser"], force_reasoning=sample.get("force_reasoning"), **options)

    return make


@pytest.fixture(scope="session")
def run_pieces() -> Any:
    """Feed a text in pieces; the events, all of them."""

    def run(parser: Parser, pieces: list[str]) -> list[Any]:
        return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()

    return run


@pytest.fixture(scope="session")
def parse_pieces(run_pieces: Any) -> Any:
    """Feed a text in pieces; what the events add up to."""
    return lambda parser, pieces: assemble(run_pieces(parser, pieces))
