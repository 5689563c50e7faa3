"""/v1/messages with the official client, and its wire format event by event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import CONTEXT, Answer, FakeServer, endless, serving, wait_until

from bough.core.messages import End, Generate, unpack_ids

anthropic = pytest.importorskip("anthropic")

USER: list[Any] = [{"role": "user", "content": "Hi"}]
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THINKS = {"reasoning_parser": "deepseek-r1", "tool_parser": "hermes"}


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[Any]:
    with anthropic.Anthropic(
        _strict_response_validation=True, base_url=server.url, api_key="any", max_retries=0
    ) as made:
        yield made


def connected(running: FakeServer, **given: Any) -> Any:
    return anthropic.Anthropic(
        _strict_response_validation=True, base_url=running.url, **{"api_key": "any", "max_retries": 0, **given}
    )


def prompt_of(message: Generate) -> str:
    return bytes(each for each in unpack_ids(message.prompt).tolist() if each < 256).decode()


def test_a_message(client: Any) -> None:
    made = client.messages.create(model="fake", max_tokens=50, messages=USER)
    assert isinstance(made, anthropic.types.Message)
    assert made.id.startswith("msg_")
    assert (made.role, made.type, made.model) == ("assistant", "message", "fake")
    assert [block.to_dict() for block in made.content] == [{"type": "text", "text": "Hello there."}]
    assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
    assert made.usage.cache_read_input_tokens == 2
    assert made.usage.input_tokens + 2 == client.messages.count_tokens(model="fake", messages=USER).input_tokens
    assert made.usage.output_tokens == len("Hello there.")


def test_models(client: Any) -> None:
    listed = list(client.models.list())
    assert [(model.id, model.type, model.display_name) for model in listed] == [("fake", "model", "fake")]
    anthropic.types.ModelInfo.model_validate(listed[0].to_dict())
    assert client.models.retrieve("fake").max_input_tokens == CONTEXT


def test_a_stream_has_the_events_in_order_and_adds_up(client: Any) -> None:
    with client.messages.stream(model="fake", max_tokens=50, messages=USER) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    raw = [kind for kind in kinds if kind != "text"]
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[2:-3] == ["content_block_delta"] * 3
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    whole = client.messages.create(model="fake", max_tokens=50, messages=USER)
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.to_dict()) == (whole.stop_reason, whole.usage.to_dict())


def test_the_wire_names_every_event(server: FakeServer) -> None:
    body = {"model": "fake", "max_tokens": 5, "messages": USER, "stream": True}
    answer = httpx.post(f"{server.url}/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    for chunk in answer.text.strip().split("\n\n"):
        name, data = chunk.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert "[DONE]" not in answer.text


def test_system_and_blocks_reach_the_prompt(client: Any, server: FakeServer) -> None:
    client.messages.create(
        model="fake",
        max_tokens=5,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
            {"role": "user", "content": "Three"},
            {"role": "assistant", "content": "Four"},
            {"role": "user", "content": "Five"},
        ],
    )
    assert prompt_of(server.engine.seen[-1]) == (
        "system\nBe brief.\nuser\nOne\nTwo\n\nThree\nassistant\nFour\nuser\nFive\nassistant\n"
    )


def test_a_begun_answer_is_continued(client: Any, server: FakeServer) -> None:
    client.messages.create(
        model="fake", max_tokens=5, messages=[*USER, {"role": "assistant", "content": "The answer is"}]
    )
    assert prompt_of(server.engine.seen[-1]).endswith("assistant\nThe answer is")


def test_sampling(client: Any, server: FakeServer) -> None:
    client.messages.create(
        model="fake", max_tokens=7, messages=USER, stop_sequences=["END"],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3, "cache_salt": "s"},
    )  # fmt: skip
    seen = server.engine.seen[-1]
    assert (seen.sampling.max_new_tokens, seen.sampling.temperature, seen.sampling.top_p) == (7, 0.5, 0.9)
    assert (seen.sampling.top_k, seen.sampling.stop, seen.namespace) == (3, ("END",), "\ns")


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (Answer(matched="END"), "stop_sequence", "END"),
        (Answer(pieces=["12345"], reason="length", matched=None), "max_tokens", None),
        (Answer(pieces=["123"], reason="length", matched=None), "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(answer: Answer, reason: str, sequence: str | None) -> None:
    with serving(answer) as running, connected(running) as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": USER, "stop_sequences": ["END"]}
        made = client.messages.create(**asked)
        assert (made.stop_reason, made.stop_sequence) == (reason, sequence)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == (reason, sequence)


def test_more_than_fits_is_asked_for_as_much_as_fits(client: Any, server: FakeServer) -> None:
    client.messages.create(model="fake", max_tokens=20_000, messages=USER)
    seen = server.engine.seen[-1]
    assert seen.sampling.max_new_tokens == CONTEXT - len(seen.prompt) // 4


def test_tools_there_and_back() -> None:
    served = {**THINKS, "reasoning_parser": "qwen3"}  # which leaves it to the model whether it reasons
    with serving(Answer(pieces=["Let me see. ", CALL[:20], CALL[20:]]), served=served) as running:
        with connected(running) as client:
            asked: dict[str, Any] = {"model": "fake", "max_tokens": 90, "messages": USER, "tools": [ADD]}
            made = client.messages.create(**asked)
            assert [block.type for block in made.content] == ["text", "tool_use"]
            assert made.stop_reason == "tool_use"
            use = made.content[1]
            assert (use.name, use.input) == ("add", {"a": 1})
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            assert [block.type for block in streamed.content] == ["text", "tool_use"]
            assert streamed.content[0].text.strip() == made.content[0].text.strip() == "Let me see."
            assert streamed.content[1].input == {"a": 1}
            assert streamed.stop_reason == "tool_use"
            result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "two"}]}
            turns = [*USER, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
            client.messages.create(**{**asked, "messages": turns})
        assert prompt_of(running.engine.seen[-1]).endswith("tool\ntwo\nassistant\n")


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "add"}, True),
        ({"type": "none"}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
    ],
)
def test_tool_choice(client: Any, server: FakeServer, choice: Any, constrained: bool) -> None:
    client.messages.create(model="fake", max_tokens=9, messages=USER, tools=[ADD], tool_choice=choice)
    seen = server.engine.seen[-1]
    assert (seen.sampling.grammar is not None) is constrained
    assert (seen.text is not None and seen.text.tool_parser is not None) is (choice["type"] != "none")


def test_thinking() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}[on]{% else %}[off]{% endif %}"
    )
    answer = Answer(pieces=["<think>Hm", "m.</think>", "Yes."])
    with serving(answer, served=THINKS, template=template) as running, connected(running) as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 2000, "messages": USER}
        made = client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [block.type for block in made.content] == ["thinking", "text"]
        assert (made.content[0].thinking, made.content[1].text) == ("Hmm.", "Yes.")
        assert running.engine.seen[-1].thinking_budget == 1024
        assert prompt_of(running.engine.seen[-1]).endswith("[on]")
        with client.messages.stream(**asked, thinking={"type": "adaptive"}) as stream:
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert (final.content[0].thinking, final.content[1].text) == ("Hmm.", "Yes.")
        client.messages.create(**asked)
        assert prompt_of(running.engine.seen[-1]).endswith("[off]")
        turns = [*USER, {"role": "assistant", "content": made.content}, *USER]
        client.messages.create(**{**asked, "messages": turns})


def test_structured_output(client: Any, server: FakeServer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    client.messages.create(
        model="fake", max_tokens=9, messages=USER, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.source) == schema


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "names no image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]}, "no documents"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}]}, "content[0] is no call"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "content[0].text"),
        ({"tools": [{"type": "teleport", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "not among the tools"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": ["x"] * 40}, "stop"),
    ],
)  # fmt: skip
def test_wrong_requests(server: FakeServer, body: dict[str, Any], says: str) -> None:
    for stream in (False, True):
        full = {"model": "fake", "max_tokens": 5, "messages": USER, "stream": stream, **body}
        response = httpx.post(f"{server.url}/v1/messages", json=full)
        assert response.status_code == 400
        error = response.json()
        assert (set(error), error["type"]) == ({"type", "error"}, "error")
        assert error["error"]["type"] == "invalid_request_error"
        assert says in error["error"]["message"]


def test_errors_are_the_clients_types() -> None:
    with serving(api_key="s3cret") as running:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 5, "messages": USER}
        with connected(running, api_key="s3cret") as client:
            assert client.messages.create(**asked).content
            with pytest.raises(anthropic.NotFoundError) as missing:
                client.messages.create(**{**asked, "model": "claude-9"})
            assert missing.value.body["error"]["type"] == "not_found_error"
            with pytest.raises(anthropic.BadRequestError):
                client.messages.create(**{**asked, "messages": [{"role": "user", "content": "long " * 2000}]})
        with connected(running, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**asked)
        with connected(running, api_key=None, auth_token="s3cret") as client:
            assert client.messages.count_tokens(model="fake", messages=USER).input_tokens > 0


def test_an_error_in_the_middle_of_a_stream() -> None:
    answer = Answer(pieces=["one", "two"], delay_s=0.02, end=End(reason="error", message="it broke", status=500))
    with serving(answer) as running:
        body = {"model": "fake", "max_tokens": 5, "messages": USER, "stream": True}
        last = httpx.post(f"{running.url}/v1/messages", json=body).text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\n")
        error = json.loads(last.partition("data: ")[2])
        assert error == {"type": "error", "error": {"type": "api_error", "message": "it broke"}}


def test_leaving_early_ends_the_request() -> None:
    with serving(endless()) as running, connected(running) as client:
        with client.messages.stream(model="fake", max_tokens=900, messages=USER) as stream:
            next(iter(stream.text_stream))
        wait_until(lambda: running.engine.aborted)
