"""OpenAI's sampling fields as native parameters. Only given fields are passed on, so that the model's own defaults
apply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.core.sampling import SamplingParams
from bough.engine_client import ANY_JSON
from bough.engine_client.sampling import Constraint, GivenSampling, Source, biased_id
from bough.entrypoints.http.openai.schema import Common, StructuredOutputs

_ORIGINS = (
    "structural_tag", "json_schema", "structured_outputs", "guided_json", "guided_choice", "guided_regex",
    "guided_grammar", "regex", "ebnf",
)  # fmt: skip
"""Fields of constraints: if several have the same value, an error names the first of them, or `response_format`."""


def native_sampling(body: Common, max_new_tokens: int | None) -> GivenSampling:
    """The body's sampling parameters by their native names. Raises `InvalidRequest` for contradictions and sizes."""
    bias = body.logit_bias
    if bias is not None:
        bounds.count("logit_bias", bias, "logit_bias")
    trim = body.include_stop_str_in_output
    return GivenSampling(
        max_new_tokens=UNSET if max_new_tokens is None else max_new_tokens,
        min_new_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        sampling_seed=body.seed,
        n=body.n,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        stop_regex=body.stop_regex,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        no_stop_trim=body.no_stop_trim if trim is None else trim,
        logit_bias=None if bias is None else {biased_id("logit_bias", token): each for token, each in bias.items()},
        allowed_token_ids=body.allowed_token_ids,
        logit_processor=body.logit_processor,
        custom_params=body.custom_params,
        beam_width=body.beam_width,
        bad_words=body.bad_words,
        constraints=_constraints(body),
    )


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


def _constraints(body: Common) -> dict[Constraint, Source]:
    """The body's constraints by their native names. Raises `InvalidRequest` if two of one kind differ."""
    given: dict[Constraint, Source] = {}
    for param, kind, source in _asked(body):
        if given.get(kind, "") == "":
            given[kind] = source
        elif source not in ("", given[kind]):
            raise InvalidRequest(
                what=f"{param} and another field ask for different constraints of one kind",
                why="an answer follows one constraint at a time",
                fix=f"send {param} or the other, not both",
                param=param,
            )
    return given


def _asked(body: Common) -> Iterator[tuple[str, Constraint, Source]]:
    """The fields of the body that are constraints: the field, the native constraint, and its source. vLLM's names, older
    ones and `structured_outputs` are among them."""
    asked = body.structured_outputs or StructuredOutputs()
    if body.structured_outputs is not None and asked == StructuredOutputs():
        raise InvalidRequest(
            what="structured_outputs has no constraint",
            why="an answer would be free where it is not meant to be",
            fix="send one of json, json_object, regex, choice, grammar and structural_tag in it, or leave it out",
            param="structured_outputs",
        )
    fields: tuple[tuple[str, Constraint, Source | None], ...] = (
        ("regex", "regex", body.regex),
        ("ebnf", "ebnf", body.ebnf),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_grammar", "ebnf", body.guided_grammar),
        ("structured_outputs", "json_schema", asked.json),
        ("structured_outputs", "json_schema", ANY_JSON if asked.json_object else None),
        ("structured_outputs", "structural_tag", asked.structural_tag),
        ("structured_outputs", "choice", asked.choice),
        ("structured_outputs", "regex", asked.regex),
        ("structured_outputs", "ebnf", asked.grammar),
        ("json_schema", "json_schema", body.json_schema),
        ("structural_tag", "structural_tag", body.structural_tag),
    )
    for param, kind, value in fields:
        if value is not None:
            yield param, kind, _source(value) if isinstance(value, dict) else value
    if body.response_format is not None:
        for kind, source in constraint(body.response_format).items():
            yield "response_format", kind, source


def constraint(response_format: dict[str, Any]) -> dict[Constraint, str]:
    """`response_format` as a native constraint; empty for plain text."""
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
        case "ebnf" | "lark":
            grammar = response_format.get("grammar")
            if not isinstance(grammar, str):
                raise _bad_format("response_format.grammar is missing", 'send {"type": "ebnf", "grammar": "..."}')
            return {"ebnf": grammar}
        case other:
            raise _bad_format(
                f"response_format.type is {str(other)[:50]!r}",
                "use text, json_object, json_schema, structural_tag, regex, ebnf or lark",
            )


def _source(schema: str | dict[str, Any]) -> str:
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()


def _bad_format(what: str, fix: str) -> InvalidRequest:
    return InvalidRequest(what=what, why="this format is not known", fix=fix, param="response_format")
