"""What coding agents send by default: tools of every kind, their own names for models, conversations that are too long."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent
from scripted_server import CONTEXT, Answer, FakeServer, serving

from bough.core.messages import Generate, unpack_ids

IGNORED = "x-bough-ignored-fields"
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
USER = [{"role": "user", "content": "Hi"}]
EMPTY = {"type": "object", "properties": {}}
CODEX: list[dict[str, Any]] = [
    {"type": "function", "name": "exec", "strict": False, "parameters": EMPTY},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "mcp__files", "description": "Files.",
     "tools": [{"type": "function", "name": "read", "parameters": EMPTY},
               {"type": "custom", "name": "write"}]},
    {"type": "web_search"},
    {"type": "image_generation", "output_format": "png"},
]  # fmt: skip
"""Tools of the kinds that Codex sends."""


def prompt_of(message: Generate) -> str:
    return bytes(each for each in unpack_ids(message.prompt).tolist() if each < 256).decode()


def calling(*calls: tuple[str, dict[str, Any]]) -> Answer:
    """An answer that calls these."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return Answer(
        pieces=[piece for each in written for piece in ("<tool_call>\n", each[:9], each[9:], "\n</tool_call>\n")]
    )


def connected(running: FakeServer) -> openai.OpenAI:
    return openai.OpenAI(_strict_response_validation=True, base_url=f"{running.url}/v1", api_key="any", max_retries=0)


def streamed(running: FakeServer, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], httpx.Response]:
    answer = httpx.post(running.url + path, json={"stream": True, **body})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines], answer


# -- the kinds of tools of the Responses API ------------------------------------------------------


def test_custom_and_namespaced_tools_there_and_back() -> None:
    patch = '*** Begin Patch\n+ä"\\\n'
    answer = calling(("apply_patch", {"input": patch}), ("mcp__files__read", {}), ("mcp__files__write", {"input": "x"}))
    with serving(answer, served={"tool_parser": "hermes"}) as running, connected(running) as client:
        tools: Any = CODEX
        made = client.responses.with_raw_response.create(model="fake", input="Hi", tools=tools)
        assert made.headers[IGNORED] == "tools[3]:web_search,tools[4]:image_generation"
        output: list[Any] = made.parse().output
        assert [item.type for item in output] == ["custom_tool_call", "function_call", "custom_tool_call"]
        assert (output[0].name, output[0].input, output[0].namespace) == ("apply_patch", patch, None)
        assert (output[1].name, output[1].namespace, output[1].arguments) == ("read", "mcp__files", "{}")
        assert (output[2].name, output[2].namespace, output[2].input) == ("write", "mcp__files", "x")
        told, _ = streamed(running, "/v1/responses", {"input": "Hi", "tools": tools})
        for event in told:
            EVENT.validate_python(event)
        done = {event["type"]: event for event in told}
        assert done["response.custom_tool_call_input.done"]["input"] == "x"
        whole = "".join(
            event["delta"]
            for event in told
            if event["type"] == "response.custom_tool_call_input.delta" and event["output_index"] == 0
        )
        assert whole == patch
        assert "mcp__files__read" in prompt_of(running.engine.seen[-1])
        back: Any = [
            *USER,
            *(item.to_dict() for item in output),
            {"type": "custom_tool_call_output", "call_id": output[0].call_id, "output": "patched"},
            {"type": "function_call_output", "call_id": output[1].call_id, "output": "content"},
        ]
        client.responses.create(model="fake", input=back, tools=tools)
        prompt = prompt_of(running.engine.seen[-1])
        assert json.dumps({"name": "mcp__files__read", "arguments": {}}) in prompt.replace('":"', '": "')
        assert prompt.endswith("tool\npatched\ntool\ncontent\nassistant\n")


@pytest.mark.parametrize(
    ("syntax", "definition", "keyword"),
    [("lark", 'start: "a" LF\n%import common.LF', "x-grammar"), ("regex", "a+", "pattern"),
     ("lark", "start: _list{A}\n_list{x}: x", ""), ("regex", "(?=a)b", "")],
)  # fmt: skip
def test_a_custom_tool_is_held_to_its_grammar(syntax: str, definition: str, keyword: str) -> None:
    """In calls that the model begins, too. A grammar that can't be followed is shown to the model instead."""
    tool = {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    with serving(Answer(), served={"tool_parser": "hermes"}) as running:
        body = {"model": "fake", "input": "Hi", "tools": [tool]}
        httpx.post(f"{running.url}/v1/responses", json=body).raise_for_status()
        message = running.engine.seen[-1]
        grammar = message.sampling.grammar
        assert (grammar is not None and keyword in grammar.source) == bool(keyword)
        assert bool(keyword) or "Text in the language of this grammar" in prompt_of(message)


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "read", "namespace": "mcp__files"}, "mcp__files__read"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            "apply_patch",
        ),
    ],
)
def test_choosing_such_tools(server: FakeServer, choice: Any, forced: str) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": "a", "tools": CODEX, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert f'"{forced}' in grammar.source.replace('\\"', '"')
    assert "exec" not in grammar.source


def test_strict_servers_refuse_what_they_would_leave_out() -> None:
    with serving(strict_api=True) as running:
        refused = httpx.post(f"{running.url}/v1/responses", json={"input": "a", "tools": CODEX})
        assert refused.json()["error"]["param"] == "tools[3].type"
        hosted = [{"type": "web_search_20250305", "name": "web_search"}]
        body = {"max_tokens": 5, "messages": USER, "tools": hosted}
        refused = httpx.post(f"{running.url}/v1/messages", json=body)
        assert "tools[0].type" in refused.json()["error"]["message"]


def test_hosted_tools_of_anthropics_are_left_out(server: FakeServer) -> None:
    hosted = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    for path, more in (("/v1/messages", {"max_tokens": 5}), ("/v1/messages/count_tokens", {})):
        answer = httpx.post(server.url + path, json={"messages": USER, "tools": hosted, **more})
        assert (answer.status_code, answer.headers[IGNORED]) == (200, "tools[0]:web_search_20250305")


def test_tools_may_come_as_an_item_of_the_conversation(server: FakeServer) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [*CODEX[:2], CODEX[0]]}
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": [more, *USER], "tools": CODEX[:1]})
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(server.engine.seen[-1])
    assert (prompt.count('"name":"exec"'), prompt.count('"name":"apply_patch"')) == (1, 1)
    wrong = httpx.post(f"{server.url}/v1/responses", json={"input": [{"type": "additional_tools"}, *USER]})
    assert wrong.json()["error"]["param"] == "input[0].tools"


# -- lengths --------------------------------------------------------------------------------------


def test_input_tokens(server: FakeServer) -> None:
    with connected(server) as client:
        counted = client.responses.input_tokens.count(model="fake", input="Hi", instructions="Be brief.", tools=[])
        assert counted.object == "response.input_tokens"
        client.responses.create(model="fake", input="Hi", instructions="Be brief.")
        assert counted.input_tokens == len(unpack_ids(server.engine.seen[-1].prompt))


def test_truncation_leaves_out_the_oldest_turns(server: FakeServer) -> None:
    turns: list[dict[str, Any]] = []
    for number in range(40):
        turns += [{"role": "user", "content": f"Question {number}: " + "x" * 200}]
        turns += [{"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}]
        turns += [{"type": "function_call_output", "call_id": f"c{number}", "output": f"Output {number}"}]
    body = {"input": turns, "instructions": "Be brief.", "max_output_tokens": 100}
    refused = httpx.post(f"{server.url}/v1/responses", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")
    answer = httpx.post(f"{server.url}/v1/responses", json={**body, "truncation": "auto"})
    assert (answer.status_code, answer.json()["truncation"]) == (200, "auto")
    seen = server.engine.seen[-1]
    prompt = prompt_of(seen)
    first = int(prompt.partition("Question ")[2].partition(":")[0])
    assert answer.headers[IGNORED] == f"input[:{3 * first}]"
    assert prompt.startswith("system\nBe brief.\nuser\nQuestion ")
    assert "Output 39" in prompt
    assert f"Output {first - 1}" not in prompt
    one_turn = len(unpack_ids(seen.prompt)) // (40 - first)
    assert CONTEXT - 100 - 2 * one_turn < len(unpack_ids(seen.prompt)) <= CONTEXT - 100


# -- the agents' names for models -----------------------------------------------------------------


def test_names_and_patterns() -> None:
    served = {"names": ("fake", "second"), "patterns": ("claude-*", "gpt-5?")}
    with serving(Answer(), served=served) as running:
        listed = httpx.get(f"{running.url}/v1/models").json()
        assert [card["id"] for card in listed["data"]] == ["fake", "second"]
        for name in ("fake", "second", "claude-sonnet-4-5-20250929", "gpt-5x"):
            answer = httpx.post(f"{running.url}/v1/chat/completions", json={"messages": USER, "model": name})
            assert answer.json()["model"] == name
            assert httpx.get(f"{running.url}/v1/models/{name}").json()["id"] == name
        for name in ("gpt-5", "gpt-55x", "opus", "Claude-x"):
            answer = httpx.post(f"{running.url}/v1/responses", json={"input": "Hi", "model": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# -- chat: choices among tools, and the older fields ----------------------------------------------

ADD: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS: Any = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "sub"}}]


@pytest.mark.parametrize(("mode", "forced"), [("auto", False), ("required", True)])
def test_allowed_tools(server: FakeServer, mode: Any, forced: bool) -> None:
    allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "add"}}]}
    with connected(server) as client:
        client.chat.completions.create(
            model="fake", messages=USER, tools=TOOLS,  # type: ignore[arg-type]
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        )  # fmt: skip
    seen = server.engine.seen[-1]
    assert '"add"' in prompt_of(seen)
    assert '"sub"' not in prompt_of(seen)
    assert (seen.sampling.grammar is not None) is forced


def test_a_forced_call_drops_the_response_format(server: FakeServer) -> None:
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "response_format")
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.param) == ("structural_tag", "tools")


def test_functions_of_older_clients() -> None:
    with serving(calling(("add", {"a": 1}), ("add", {"a": 2})), served={"tool_parser": "hermes"}) as running:
        with connected(running) as client:
            asked: Any = {"model": "fake", "messages": USER, "functions": [ADD]}
            made = client.chat.completions.create(**asked).choices[0]
            assert made.finish_reason == "function_call"
            assert made.message.tool_calls is None
            assert made.message.function_call is not None
            call = made.message.function_call
            assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
            told = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call is not None]
            assert [each.name for each in told if each.name] == ["add"]
            assert json.loads("".join(each.arguments or "" for each in told)) == {"a": 1}
            assert chunks[-1].finish_reason == "function_call"
            back = [*USER, made.message.to_dict(), {"role": "function", "name": "add", "content": "two"}]
            client.chat.completions.create(**{**asked, "messages": back, "function_call": {"name": "add"}})
        seen = running.engine.seen[-1]
        assert seen.sampling.grammar is not None
        assert prompt_of(seen).endswith("tool\ntwo\nassistant\n")


# -- Anthropic's clients --------------------------------------------------------------------------


def test_ids_as_anthropics_clients_know_them() -> None:
    with serving(calling(("add", {"a": 1})), served={"tool_parser": "hermes"}) as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0)
        tools: Any = [{"name": "add", "input_schema": ADD["parameters"]}]
        asked: Any = {"model": "fake", "max_tokens": 50, "messages": USER, "tools": tools}
        made = client.messages.create(**asked)
        assert made._request_id
        assert [block.id[:6] for block in made.content if block.type == "tool_use"] == ["toolu_"]
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert [block.id[:6] for block in final.content if block.type == "tool_use"] == ["toolu_"]
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(**{**asked, "model": "nope"})
        assert caught.value.request_id


# -- schemas --------------------------------------------------------------------------------------

SET = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"not": {"const": 1}}}}


def schema_format(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SET, **more}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "response_format": schema_format()}),
        ("/v1/completions", {"prompt": "Hi", "response_format": schema_format()}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SET}}}),
        ("/v1/messages", {"max_tokens": 9, "messages": USER,
                          "output_config": {"format": {"type": "json_schema", "schema": SET}}}),
    ],
)  # fmt: skip
def test_schemas_are_relaxed_to_what_can_be_enforced(server: FakeServer, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(server.url + path, json=body)
    assert answer.status_code == 200, answer.text
    pointers = ["response_format/properties/a/uniqueItems", "response_format/properties/b/not"]
    assert answer.headers[IGNORED].split(",") == pointers
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.source) == {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}}


def test_strict_schemas_keep_what_cannot_be_enforced(server: FakeServer) -> None:
    body = {"messages": USER, "response_format": schema_format(strict=True)}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.headers[IGNORED] == "response_format/properties/a/uniqueItems"
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert '"not"' in grammar.source


def test_schemas_of_tools_are_relaxed(server: FakeServer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SET}}]
    body = {"messages": USER, "tools": tools, "tool_choice": "required"}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.headers[IGNORED] == "tools[0]/properties/a/uniqueItems,tools[0]/properties/b/not"
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert "uniqueItems" not in grammar.source
    assert "uniqueItems" in prompt_of(server.engine.seen[-1])
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "tool_choice": "auto"})
    assert IGNORED not in answer.headers
