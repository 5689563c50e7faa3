"""From Python types to JSON schemas for a server, and from generated text back to objects."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bough.lang.errors import LangError

_DTYPE_SCHEMA = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
}
ANSWER = "answer"
"""The one key of the objects that chat APIs, whose schemas must be objects, wrap plain values in."""


def schema_of(target: Any) -> str:
    """The JSON schema of a pydantic model or a dataclass."""
    from pydantic import BaseModel, TypeAdapter

    if not (isinstance(target, type) and (dataclasses.is_dataclass(target) or issubclass(target, BaseModel))):
        raise LangError(
            what=f"schema={target!r} is not a type to generate into",
            why="gen builds the object from the generated JSON",
            fix="pass a pydantic model or a dataclass; for a JSON schema of your own use json_schema=",
        )
    return json.dumps(TypeAdapter(target).json_schema())


def parse_into(target: Any, text: str) -> Any:
    """Build the object; text that doesn't fit (a reply cut off by max_tokens, say) is an error that shows it."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(target).validate_json(text)
    except ValidationError as error:
        raise LangError(
            what=f"the generated text is not a {target.__name__}: {text!r}",
            why="; ".join(f"{'.'.join(map(str, e['loc'])) or 'text'}: {e['msg']}" for e in error.errors()),
            fix="raise max_tokens if the text is cut off",
        ) from error


def dtype_object_schema(dtype: str) -> dict[str, Any]:
    """`{"answer": <value of dtype>}` for APIs that only take schemas of objects."""
    return _answer_object(_DTYPE_SCHEMA[dtype])


def choices_object_schema(choices: Sequence[str]) -> dict[str, Any]:
    """`{"answer": <one of choices>}`."""
    return _answer_object({"type": "string", "enum": list(choices)})


def read_answer(text: str) -> Any:
    """The value inside `{"answer": value}`."""
    try:
        return json.loads(text)[ANSWER]
    except (ValueError, KeyError, TypeError) as error:
        raise LangError(
            what=f"the reply is not the object that was asked for: {text!r}",
            why="the API did not follow the JSON schema of the request",
            fix="use a model with structured output, or raise max_tokens",
        ) from error


def dtype_text(value: Any, dtype: str) -> str:
    """A value as the built-in pattern of its dtype writes it (a string in quotes)."""
    return f'"{value}"' if dtype == "str" else str(value)


def _answer_object(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {ANSWER: schema}, "required": [ANSWER], "additionalProperties": False}
