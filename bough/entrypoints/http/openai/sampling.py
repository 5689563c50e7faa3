"""OpenAI's sampling fields in native words. Only what was given is passed on, so that the model's own defaults apply."""

from __future__ import annotations

from typing import Any

import msgspec

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.core.sampling import SamplingParams
from bough.entrypoints.http.openai.schema import Common, StructuredOutputs
from bough.intake import ANY_JSON

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop",
    "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "allowed_token_ids", "bad_words", "regex", "ebnf", "custom_params", "logit_processor", "beam_width", "n",
)  # fmt: skip
_ORIGINS = (
    "structural_tag", "json_schema", "structured_outputs", "guided_json", "guided_choice", "guided_regex",
    "guided_grammar", "regex", "ebnf",
)  # fmt: skip
"""Fields of constraints, those that win over others first; `response_format` wins over all."""
_RENAMED = (("min_tokens", "min_new_tokens"), ("seed", "sampling_seed"), ("no_stop_trim", "no_stop_trim"))


def native_sampling(body: Common, max_new_tokens: int | None) -> dict[str, Any]:
    """The body's sampling parameters as a native dict. Raises `InvalidRequest` for contradictions and sizes."""
    given: dict[str, Any] = {}
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            given[name] = value
    for theirs, ours in _RENAMED:
        value = getattr(body, theirs)
        if value is not None:
            given[ours] = value
    if body.include_stop_str_in_output is not None:
        given["no_stop_trim"] = body.include_stop_str_in_output
    if max_new_tokens is not None:
        given["max_new_tokens"] = max_new_tokens
    _add_guides(body, given)
    if body.json_schema is not None:
        given["json_schema"] = _source(body.json_schema)
    if body.structural_tag is not None:
        given["structural_tag"] = _source(body.structural_tag)
    if body.response_format is not None:
        given.update(constraint(body.response_format))
    return given


def with_origin(sampling: SamplingParams, body: Common, *, tools: bool) -> SamplingParams:
    """The same parameters, whose constraint (if there is one) knows the field it came from. `tools`: it is what holds
    calls to their schemas."""
    if sampling.grammar is None:
        return sampling
    param = next((name for name in _ORIGINS if getattr(body, name) is not None), "")
    if body.response_format is not None and body.response_format.get("type") != "text":
        param = "response_format"
    if tools:
        param = "tools"
    return msgspec.structs.replace(sampling, grammar=msgspec.structs.replace(sampling.grammar, param=param))


def _add_guides(body: Common, given: dict[str, Any]) -> None:
    """vLLM's names of constraints, the older ones and `structured_outputs`."""
    asked = body.structured_outputs or StructuredOutputs()
    if body.structured_outputs is not None and asked == StructuredOutputs():
        raise InvalidRequest(
            what="structured_outputs has no constraint",
            why="an answer would be free where it is not meant to be",
            fix="send one of json, json_object, regex, choice, grammar and structural_tag in it, or leave it out",
            param="structured_outputs",
        )
    for schema in (body.guided_json, asked.json):
        if schema is not None:
            given["json_schema"] = _source(schema)
    if asked.json_object:
        given["json_schema"] = ANY_JSON
    if asked.structural_tag is not None:
        given["structural_tag"] = _source(asked.structural_tag)
    for name, value in (
        ("choice", body.guided_choice),
        ("regex", body.guided_regex),
        ("ebnf", body.guided_grammar),
        ("choice", asked.choice),
        ("regex", asked.regex),
        ("ebnf", asked.grammar),
    ):
        if value is not None:
            given[name] = value


def constraint(response_format: dict[str, Any]) -> dict[str, str]:
    """What `response_format` asks for, as a native constraint; empty for plain text."""
    match response_format.get("type"):
        case "text":
            return {}
        case "json_object":
            schema = response_format.get("schema")  # as llama.cpp has it
            if not isinstance(schema, dict):
                return {"json_schema": ANY_JSON}
            bounds.depth(schema, "schema_depth", "response_format")
            return {"json_schema": _source(schema)}
        case "json_schema":
            wrapper = response_format.get("json_schema")
            schema = wrapper.get("schema", wrapper.get("schema_")) if isinstance(wrapper, dict) else None
            if not isinstance(schema, dict):
                raise _bad_format(
                    "response_format.json_schema.schema is missing or no object",
                    'send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
                )
            bounds.depth(schema, "schema_depth", "response_format")
            return {"json_schema": _source(schema)}
        case "structural_tag":
            return {"structural_tag": _source(response_format)}
        case "regex":
            pattern = response_format.get("pattern")
            if not isinstance(pattern, str):
                raise _bad_format("response_format.pattern is missing", 'send {"type": "regex", "pattern": "..."}')
            return {"regex": pattern}
        case "ebnf":
            grammar = response_format.get("grammar")
            if not isinstance(grammar, str):
                raise _bad_format("response_format.grammar is missing", 'send {"type": "ebnf", "grammar": "..."}')
            return {"ebnf": grammar}
        case other:
            raise _bad_format(
                f"response_format.type is {str(other)[:50]!r}",
                "use text, json_object, json_schema, structural_tag, regex or ebnf",
            )


def _source(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


def _bad_format(what: str, fix: str) -> InvalidRequest:
    return InvalidRequest(what=what, why="this format is not known", fix=fix, param="response_format")
