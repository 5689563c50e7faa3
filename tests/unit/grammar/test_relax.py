"""Schemas with what can't be enforced: it is left out and named, and what an answer is made of stays."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pydantic
import pytest

from bough.grammar.keywords import REFUSED
from bough.grammar.relax import ALWAYS_RELAXED, RELAXED, relax
from bough.grammar.sources import grammar_of
from tests.unit.grammar.random_texts import Sampler


class Kinds(pydantic.BaseModel):
    url: pydantic.HttpUrl
    path: Path
    secret: pydantic.SecretStr
    raw: bytes
    tags: set[str]
    place: Path | None = None


@pytest.mark.parametrize("strict", [False, True])
def test_pydantics_kinds_of_fields(strict: bool) -> None:
    schema, dropped = relax(Kinds.model_json_schema(), strict=strict)
    assert sorted(dropped) == [
        "/properties/path/format", "/properties/place/anyOf/0/format", "/properties/raw/format",
        "/properties/secret/format", "/properties/tags/uniqueItems",
    ]  # fmt: skip
    assert schema["required"] == ["url", "path", "secret", "raw", "tags"]
    sampler = Sampler(grammar_of("json_schema", json.dumps(schema), 0), random.Random(1))
    for _ in range(25):
        made = Kinds.model_validate_json(sampler.text())
        assert len(str(made.url)) <= 2084


@pytest.mark.parametrize(("kind", "most"), [("uri", 2083), ("uri", 40), ("email", 30), ("hostname", 12), ("email", 64)])
def test_lengths_beside_formats_are_enforced(kind: str, most: int) -> None:
    schema = {"type": "string", "format": kind, "minLength": 1, "maxLength": most}
    sampler = Sampler(grammar_of("json_schema", json.dumps(schema), 0), random.Random(most))
    texts = {json.loads(sampler.text()) for _ in range(50)}
    assert max(map(len, texts)) <= most
    assert len(texts) > 10


LOOSE: Any = {
    "type": "object",
    "properties": {
        "not": {"type": "integer", "multipleOf": 5, "not": {"const": 3}},
        "list": {"type": "array", "items": {"type": "string", "pattern": "^(?=a)b"}, "contains": {"const": 1}},
        "one": {"type": "number", "multipleOf": 1, "enum": [1, 2]},
    },
    "required": ["not"],
    "if": {"properties": {"not": {"const": 1}}},
    "then": {"required": ["list"]},
    "uniqueItems": False,
}


def test_what_cannot_be_enforced_is_left_out_and_named() -> None:
    schema, dropped = relax(LOOSE, strict=False, at="tools[0]")
    assert sorted(dropped) == [
        "tools[0]/if", "tools[0]/properties/list/contains", "tools[0]/properties/list/items/pattern",
        "tools[0]/properties/not/multipleOf", "tools[0]/properties/not/not", "tools[0]/then",
    ]  # fmt: skip
    grammar_of("json_schema", json.dumps(schema), 0)
    assert set(schema["properties"]) == {"not", "list", "one"}
    assert (schema["required"], schema["properties"]["one"]) == (["not"], LOOSE["properties"]["one"])
    assert relax(LOOSE, strict=True) == (LOOSE, [])


def test_only_refused_keywords_are_left_out() -> None:
    assert set(REFUSED) > (RELAXED | ALWAYS_RELAXED)
    assert not {"$dynamicRef", "$recursiveRef", "$anchor"} & RELAXED
    for value in (True, None, 3, "x", [{"not": 1}]):
        assert relax(value, strict=False) == (value, [])
