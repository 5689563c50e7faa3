"""Structured output through HTTP, with the official client, on the default model: everything it says is valid."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.default_server import default_server
from tests.unit.grammar.hostile import HOSTILE, LAZY_ONLY
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SCHEMAS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "unit" / "grammar" / "schemas.json").read_text()
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email", "maxLength": 254},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Make up a person and describe them as JSON."}]


@pytest.fixture(scope="module")
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{default_server()}/v1", api_key="none", max_retries=0, timeout=300)


def said(client: openai.OpenAI, *, stream: bool = False, **options: Any) -> tuple[str, str]:
    """What the chat route answers, and how it ended."""
    options = {"messages": ASK, "max_tokens": 200, "temperature": 0.7, "seed": 5, **options}
    if not stream:
        choice = client.chat.completions.create(model="default", **options).choices[0]
        return choice.message.content or "", choice.finish_reason
    text, reason = "", ""
    for chunk in client.chat.completions.create(model="default", stream=True, **options):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema(client: openai.OpenAI, stream: bool) -> None:
    text, reason = said(client, stream=stream, response_format=json_schema(PERSON))
    assert reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_streaming_equals_not_streaming(client: openai.OpenAI) -> None:
    options = {"response_format": json_schema(PERSON), "temperature": 0}
    assert said(client, stream=True, **options) == said(client, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_any_json(client: openai.OpenAI, stream: bool) -> None:
    text, reason = said(client, stream=stream, response_format={"type": "json_object"}, max_tokens=300)
    assert text.startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "fits"),
    [
        ({"regex": r"(yes|no), [a-z ]{3,20}\."}, lambda text: re.fullmatch(r"(yes|no), [a-z ]{3,20}\.", text)),
        ({"guided_choice": ["red", "green", "blue"]}, lambda text: text in ("red", "green", "blue")),
        ({"ebnf": 'root ::= "<" [a-z]{2,6} ">" ("!" | "?")'}, lambda text: re.fullmatch(r"<[a-z]{2,6}>[!?]", text)),
    ],
    ids=["regex", "choice", "ebnf"],
)
def test_patterns_choices_and_grammars(client: openai.OpenAI, extra: Any, fits: Any, stream: bool) -> None:
    text, reason = said(client, stream=stream, extra_body=extra)
    assert reason == "stop"
    assert fits(text), text


def test_completions_take_them_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default",
        prompt="The colours are",
        max_tokens=60,
        temperature=0,
        extra_body={"regex": r" \[(red|blue), \w+\]"},
    )
    assert re.fullmatch(r" \[(red|blue), \w+\]", answer.choices[0].text)


def test_several_answers_with_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=ASK, max_tokens=120, temperature=1.0, seed=3, n=3, logprobs=True, top_logprobs=2,
        response_format=json_schema(PERSON),
    )  # fmt: skip
    assert len(answer.choices) == 3
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
        assert choice.logprobs is not None
        spelled = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content or [])
        assert spelled.decode() == choice.message.content


def test_stop_strings_end_a_constrained_answer(client: openai.OpenAI) -> None:
    text, reason = said(client, stop=['"age"'], response_format=json_schema(PERSON))
    assert reason == "stop"
    assert '"age"' not in text
    assert text.startswith("{")


def test_tool_calls_fit_their_schema(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": True}}
    answer = client.chat.completions.create(
        model="default", messages=ASK, tools=[tool], tool_choice="required", max_tokens=120, temperature=0.7, seed=1,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), parameters)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400_with_its_place(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "object", "properties": {"tags": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError) as error:
        said(client, stream=stream, response_format=json_schema(schema))
    assert "/properties/tags/not" in str(error.value)
    with pytest.raises(openai.BadRequestError) as error:
        said(client, stream=stream, extra_body={"regex": "(?=a)b"})
    assert "look-ahead" in str(error.value)


def test_two_constraints_are_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="one constraint at a time"):
        said(client, response_format=json_schema(PERSON), extra_body={"regex": "a"})


def test_a_cut_answer_says_so() -> None:
    body = {
        "text": "A list:",
        "sampling_params": {"max_new_tokens": 5, "json_schema": json.dumps({"type": "array", "minItems": 50})},
    }
    answer = httpx.post(f"{default_server()}/generate", json=body, timeout=120).json()
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert "before its grammar was complete" in answer["meta_info"]["finish_reason"]["message"]

    def counted() -> int:
        metrics = httpx.get(f"{default_server()}/metrics", timeout=60).text
        found = re.search(r"cut_grammars_total\S* (\d+)", metrics)
        assert found is not None
        return int(found[1])

    assert until(lambda: counted() >= 1), "the engine writes its numbers after it has answered"


async def answers_to(entries: list[dict[str, Any]], max_tokens: int) -> list[tuple[str, str]]:
    async with openai.AsyncOpenAI(
        base_url=f"{default_server()}/v1", api_key="none", max_retries=0, timeout=800
    ) as client:
        gate = asyncio.Semaphore(16)

        async def one(entry: dict[str, Any]) -> tuple[str, str]:
            async with gate:
                answer = await client.chat.completions.create(
                    model="default",
                    messages=[{"role": "user", "content": f"Give an example of: {entry['name']}. Answer in JSON."}],
                    max_tokens=max_tokens,
                    temperature=0.8,
                    seed=len(entry["name"]),
                    response_format=json_schema(entry["schema"]),
                )
            return answer.choices[0].message.content or "", answer.choices[0].finish_reason

        return await asyncio.gather(*(one(entry) for entry in entries))


def check(entries: list[dict[str, Any]], max_tokens: int) -> int:
    """Validates the model's answers; returns how many were complete."""
    complete = 0
    for entry, (text, reason) in zip(entries, asyncio.run(answers_to(entries, max_tokens)), strict=True):
        if reason != "stop":
            continue
        complete += 1
        value, schema = json.loads(text), entry["schema"]
        if "nullable" in json.dumps(schema):
            continue
        kind = jsonschema.Draft202012Validator
        if isinstance(schema.get("items"), list):
            kind = jsonschema.Draft7Validator
        if '"exclusiveMinimum": true' in json.dumps(schema):
            kind = jsonschema.Draft4Validator
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(value)
    return complete


def test_a_dozen_schemas() -> None:
    entries = [entry for entry in SCHEMAS if len(json.dumps(entry)) < 400][3::14][:12]
    assert check(entries, 160) >= 10


@pytest.mark.long
def test_all_schemas() -> None:
    assert check(SCHEMAS, 500) >= 0.93 * len(SCHEMAS)


@pytest.mark.long
def test_other_requests_keep_streaming_under_hostile_ones(client: openai.OpenAI) -> None:
    """While a hundred hostile grammars come in, an answer that streams goes on as before."""

    def pace(num_tokens: int) -> list[float]:
        times = []
        stream = client.completions.create(
            model="default", prompt="Once upon a time", max_tokens=num_tokens, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for _ in stream:
            times.append(time.monotonic())
        return sorted(later - earlier for earlier, later in itertools.pairwise(times))

    quiet = pace(150)
    answered: list[tuple[int, bool, float]] = []

    def attack() -> None:
        names = {"json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}
        with httpx.Client(timeout=60) as http:
            for kind, source in HOSTILE:
                if not source:
                    continue
                body = {"text": "x", "sampling_params": {"max_new_tokens": 4, names[kind]: source}}
                began = time.monotonic()
                status = http.post(f"{default_server()}/generate", json=body).status_code
                answered.append((status, source in LAZY_ONLY, time.monotonic() - began))

    attacker = threading.Thread(target=attack)
    attacker.start()
    gaps: list[float] = []
    while attacker.is_alive():
        gaps += pace(150)
    attacker.join()
    gaps.sort()
    assert {status for status, lazy, _ in answered if not lazy} == {400}
    assert {status for status, lazy, _ in answered if lazy} <= {200, 400}, (
        "what is counted, not laid out, can be served"
    )
    assert max(seconds for *_, seconds in answered) < 9.5
    assert gaps[int(0.99 * len(gaps))] < max(10 * quiet[len(quiet) // 2], 0.5)
