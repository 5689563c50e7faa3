"""Every way through: {chat, completions} x {thinking, not} x {json, regex, tools} x {streamed, whole}, with the official
client, on the default model under a chat template that opens a reasoning section.

Completions have no tools of their own: there, a call is a structural tag, and `/parse_function_call` reads it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from msgspec import Struct

from tests.covers import cover
from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BUDGET = 12
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["calm", "cheerful", "cross"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
PATTERN = r"(yes|no), because [a-z ]{3,20}\."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": PARAMETERS, "strict": True},
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "get_weather", "arguments": ',
        "content": {"type": "json_schema", "json_schema": PARAMETERS},
        "end": "}\n</tool_call>",
    },
}
ASKED = "Is it warm in Paris? Make up somebody who would know."


class Said(Struct):
    """An answer, put together from whatever it came in."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []
    reason: str = ""
    reasoning_tokens: int = -1


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    template = Path(__file__).parent / "thinking.jinja"
    made = Server({"chat_template": str(template), "max_total_tokens": 8192})
    yield made
    made.end()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def constraint(kind: str, *, chat: bool) -> dict[str, Any]:
    """What to add to a request."""
    if kind == "json":
        schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
        return {"response_format": schema} if chat else {"extra_body": {"response_format": schema}}
    if kind == "regex":
        return {"extra_body": {"regex": PATTERN}}
    if chat:
        return {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    return {"extra_body": {"response_format": CALL}}


def ask_chat(client: openai.OpenAI, kind: str, think: bool, stream: bool) -> Said:
    options = {"max_tokens": 120, "temperature": 0.0, **constraint(kind, chat=True)}
    extra = {"chat_template_kwargs": {"enable_thinking": think}, "thinking_budget": BUDGET}
    options["extra_body"] = {**options.get("extra_body", {}), **extra}
    messages: Any = [{"role": "user", "content": ASKED}]
    if not stream:
        answer = client.chat.completions.create(model="default", messages=messages, **options)
        (choice,) = answer.choices
        message: Any = choice.message
        calls = [(each.function.name, each.function.arguments) for each in message.tool_calls or []]
        assert len({each.id for each in message.tool_calls or []}) == len(calls)
        return Said(
            message.content or "", getattr(message, "reasoning_content", None) or "", calls, choice.finish_reason,
            answer.usage.completion_tokens_details.reasoning_tokens,
        )  # fmt: skip
    said = Said()
    for chunk in client.chat.completions.create(
        model="default", messages=messages, stream=True, stream_options={"include_usage": True}, **options
    ):
        if chunk.usage is not None:
            said.reasoning_tokens = chunk.usage.completion_tokens_details.reasoning_tokens
        for choice in chunk.choices:
            add_delta(said, choice.delta)
            said.reason = choice.finish_reason or said.reason
    return said


def add_delta(said: Said, delta: Any) -> None:
    assert not (delta.content and said.calls), "content behind a call"
    said.content += delta.content or ""
    said.reasoning += getattr(delta, "reasoning_content", None) or ""
    for each in delta.tool_calls or []:
        if each.index == len(said.calls):
            said.calls.append((each.function.name, ""))
        name, arguments = said.calls[each.index]
        said.calls[each.index] = (name, arguments + (each.function.arguments or ""))


def ask_completions(client: openai.OpenAI, kind: str, think: bool, stream: bool, server: Server) -> Said:
    prompt = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n<think>\n" + (
        "" if think else "\n</think>\n\n"
    )
    options = {"max_tokens": 120, "temperature": 0.0, **constraint(kind, chat=False)}
    options["extra_body"] = {**options["extra_body"], "thinking_budget": BUDGET}
    said = Said()
    if not stream:
        answer = client.completions.create(model="default", prompt=prompt, **options)
        said.content, said.reason = answer.choices[0].text, answer.choices[0].finish_reason
        said.reasoning_tokens = answer.usage.completion_tokens_details.reasoning_tokens
    else:
        for chunk in client.completions.create(
            model="default", prompt=prompt, stream=True, stream_options={"include_usage": True}, **options
        ):
            if chunk.usage is not None:
                said.reasoning_tokens = chunk.usage.completion_tokens_details.reasoning_tokens
            for choice in chunk.choices:
                said.content += choice.text
                said.reason = choice.finish_reason or said.reason
    if think:
        said.reasoning, _, said.content = said.content.partition("</think>")
    if kind == "tools":
        parsed = httpx.post(
            f"{server.url}/parse_function_call",
            json={"text": said.content, "tools": [TOOL], "tool_call_parser": "hermes"},
            timeout=30,
        ).json()
        said.content = parsed["normal_text"]
        said.calls = [(each["name"], each["parameters"]) for each in parsed["calls"]]
    return said


@pytest.mark.parametrize(
    ("kind", "think", "route"),
    cover(["json", "regex", "tools"], {"think": True, "no think": False}, ["chat", "completions"]),
)
def test_every_way(client: openai.OpenAI, server: Server, route: str, think: bool, kind: str) -> None:
    def ask(stream: bool) -> Said:
        if route == "chat":
            return ask_chat(client, kind, think, stream)
        return ask_completions(client, kind, think, stream, server)

    first, whole, streamed = ask(False), ask(False), ask(True)
    for said in (first, whole, streamed):
        check(said, kind, think)
        assert said.reason == ("tool_calls" if (route, kind) == ("chat", "tools") else "stop")
    assert streamed == whole, "both found the prompt in the cache, so not a bit differs"


def check(said: Said, kind: str, think: bool) -> None:
    assert bool(said.reasoning.strip()) == think
    assert said.reasoning_tokens == (BUDGET if think else 0)
    assert "think>" not in said.content + said.reasoning
    if kind == "json":
        jsonschema.validate(json.loads(said.content), PERSON)
    elif kind == "regex":
        assert re.fullmatch(PATTERN, said.content), said.content
    else:
        assert said.content.strip() == ""
        ((name, arguments),) = said.calls
        assert name == "get_weather"
        jsonschema.validate(json.loads(arguments), PARAMETERS)


def test_completions_refuse_tools(client: openai.OpenAI) -> None:
    """They are not ignored."""
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.completions.create(model="default", prompt="x", extra_body={"tools": [TOOL]})


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_stay_in_the_content(client: openai.OpenAI, stream: bool) -> None:
    """Not separated, the reasoning is text like the answer, which still fits."""
    options: Any = {
        "messages": [{"role": "user", "content": ASKED}],
        "max_tokens": 120,
        "temperature": 0.0,
        "extra_body": {"regex": PATTERN, "separate_reasoning": False, "thinking_budget": BUDGET},
    }
    if stream:
        chunks = client.chat.completions.create(model="default", stream=True, **options)
        content = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    else:
        content = client.chat.completions.create(model="default", **options).choices[0].message.content or ""
    reasoning, mark, answer = content.partition("</think>")
    assert reasoning.strip()
    assert mark
    assert re.fullmatch(PATTERN, answer), content


def test_reasoning_in_one_piece(client: openai.OpenAI) -> None:
    pieces = [
        reasoning
        for chunk in client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": ASKED}],
            max_tokens=60,
            temperature=0.0,
            stream=True,
            extra_body={"regex": PATTERN, "stream_reasoning": False, "thinking_budget": BUDGET},
        )
        for choice in chunk.choices
        if (reasoning := getattr(choice.delta, "reasoning_content", None))
    ]
    assert len(pieces) == 1


def test_native_requests_reason_too(server: Server) -> None:
    """The prompt ends inside the section, so the constraint waits; after it, it does not."""
    prompt = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"

    def ask(opening: str) -> str:
        body = {
            "text": prompt + opening,
            "sampling_params": {"max_new_tokens": 40, "temperature": 0.0, "choice": ["yes", "no"]},
        }
        return str(httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["text"])

    assert ask("<think>\n\n</think>\n\n") in ("yes", "no")
    assert ask("<think>\n") not in ("yes", "no")
