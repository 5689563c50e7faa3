"""/v1/responses with the official client: its types, its order of events, its stored responses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from scripted_server import Answer, FakeServer, endless, serving, wait_until

from bough.core.messages import End, Generate, unpack_ids
from bough.entrypoints.http.responses.store import ResponseStore, StoredResponse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
THINKS = {"reasoning_parser": "deepseek-r1", "tool_parser": "hermes"}
EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with connected(server) as made:
        yield made


def connected(running: FakeServer) -> openai.OpenAI:
    return openai.OpenAI(_strict_response_validation=True, base_url=f"{running.url}/v1", api_key="any", max_retries=0)


def prompt_of(message: Generate) -> str:
    return bytes(each for each in unpack_ids(message.prompt).tolist() if each < 256).decode()


def raw_events(running: FakeServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked by the client's own types."""
    answer = httpx.post(f"{running.url}/v1/responses", json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    told = []
    for chunk in answer.text.strip().split("\n\n"):
        name, data = chunk.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        told.append(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def test_a_response(client: openai.OpenAI, server: FakeServer) -> None:
    made = client.responses.create(model="fake", input="Hi", instructions="Be brief.", max_output_tokens=20)
    Response.model_validate(made.to_dict())
    assert made.output_text == "Hello there."
    assert (made.status, made.model, made.instructions) == ("completed", "fake", "Be brief.")
    assert [item.type for item in made.output] == ["message"]
    assert made.usage is not None
    assert made.usage.output_tokens == len("Hello there.")
    assert made.usage.input_tokens_details.cached_tokens == 2
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert prompt_of(server.engine.seen[-1]) == "system\nBe brief.\nuser\nHi\nassistant\n"


def test_the_order_of_events(server: FakeServer) -> None:
    told = raw_events(server, input="Hi")
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "Hello there."
    assert "".join(event["delta"] for event in told if event["type"].endswith("text.delta")) == "Hello there."


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="Hi") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == client.responses.create(model="fake", input="Hi").output_text


def test_items_become_messages(client: openai.OpenAI, server: FakeServer) -> None:
    items: Any = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Three"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "four"},
    ]
    client.responses.create(model="fake", input=items)
    assert prompt_of(server.engine.seen[-1]) == (
        "system\nRules.\nuser\nOne\nTwo\nassistant\nThree\n"
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\ntool\nfour\nassistant\n'
    )


def test_sampling_and_formats(client: openai.OpenAI, server: FakeServer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    client.responses.create(
        model="fake", input="Hi", temperature=0.5, top_p=0.9, max_output_tokens=7, extra_body={"top_k": 3, "seed": 5},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
    )  # fmt: skip
    sampling = server.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert (sampling.max_new_tokens, sampling.seed) == (7, 5)
    assert sampling.grammar is not None
    assert json.loads(sampling.grammar.source) == schema
    client.responses.create(model="fake", input="Hi", text={"format": {"type": "json_object"}})
    assert server.engine.seen[-1].sampling.grammar is not None


def test_logprobs(client: openai.OpenAI) -> None:
    made = client.responses.create(model="fake", input="Hi", top_logprobs=2, include=["message.output_text.logprobs"])
    part: Any = made.output[0].content[0]  # type: ignore[union-attr]
    assert len(part.logprobs) == len("Hello there.")
    assert len(part.logprobs[0].top_logprobs) == 2
    with client.responses.stream(model="fake", input="Hi", top_logprobs=2) as stream:
        deltas: Any = [event for event in stream if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) == len("Hello there.")


def test_reasoning_and_calls() -> None:
    pieces = ["<think>Hm", "m.</think>", "Let me see.", CALL[:30], CALL[30:]]
    with serving(Answer(pieces=pieces), served=THINKS) as running, connected(running) as client:
        asked: dict[str, Any] = {"model": "fake", "input": "Hi", "tools": [ADD]}
        made = client.responses.create(**asked)
        Response.model_validate(made.to_dict())
        assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
        thought, said, call = made.output
        assert thought.content[0].text == "Hmm."  # type: ignore
        assert said.content[0].text.strip() == "Let me see."  # type: ignore
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})  # type: ignore
        kinds = [event["type"].removeprefix("response.") for event in raw_events(running, **asked)]
        assert [kind for kind in kinds if "output_item" in kind] == ["output_item.added", "output_item.done"] * 3
        assert "reasoning_text.delta" in kinds
        assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
        assert kinds.index("function_call_arguments.done") < len(kinds) - 1
        with client.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
        assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
        back: Any = [*made.output, {"type": "function_call_output", "call_id": call.call_id, "output": "two"}]  # type: ignore
        client.responses.create(model="fake", input=[{"role": "user", "content": "Hi"}, *back], tools=[ADD])
        assert prompt_of(running.engine.seen[-1]).endswith(f"Let me see.\n{CALL}\ntool\ntwo\nassistant\n")


@pytest.mark.parametrize(
    ("choice", "constrained", "offered"),
    [
        ("auto", False, True),
        ("required", True, True),
        ("none", False, False),
        ({"type": "function", "name": "add"}, True, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, True, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, False, False),
    ],
)
def test_tool_choice(client: openai.OpenAI, server: FakeServer, choice: Any, constrained: bool, offered: bool) -> None:
    client.responses.create(model="fake", input="Hi", tools=[ADD], tool_choice=choice)
    seen = server.engine.seen[-1]
    assert (seen.sampling.grammar is not None) is constrained
    assert (seen.text is not None and seen.text.tool_parser is not None) is offered


# -- endings --------------------------------------------------------------------------------------


def test_cut_short() -> None:
    with serving(Answer(pieces=["Hel"], reason="length", matched=None)) as running, connected(running) as client:
        made = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
        assert made.status == "incomplete"
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        assert raw_events(running, input="Hi")[-1]["type"] == "response.incomplete"


def test_a_failure_in_the_middle_is_an_event() -> None:
    answer = Answer(pieces=["one", "two"], delay_s=0.02, end=End(reason="error", message="it broke", status=500))
    with serving(answer) as running:
        told = raw_events(running, input="Hi")
        assert told[-1]["type"] == "response.failed"
        assert told[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    with serving(Answer(pieces=[], end=End(reason="error", message="bad grammar", status=400))) as running:
        for stream in (False, True):
            refused = httpx.post(f"{running.url}/v1/responses", json={"input": "Hi", "stream": stream})
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == "bad grammar"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": "a", "tools": [{"type": "teleport"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"input": "a", "tools": [{"type": "namespace", "name": "a", "tools": [3]}]}, "tools[0].tools"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input[0]"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "truncation": "some"}, "truncation"),
        ({"input": "long " * 2000, "truncation": "auto"}, "prompt"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata"),
        ({"input": "a", "background": True, "store": False}, "store"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
def test_wrong_requests(server: FakeServer, body: dict[str, Any], param: str) -> None:
    refused = httpx.post(f"{server.url}/v1/responses", json=body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


# -- stored responses -----------------------------------------------------------------------------


def test_continuing(client: openai.OpenAI, server: FakeServer) -> None:
    first = client.responses.create(model="fake", input="One", instructions="Only now.")
    second = client.responses.create(model="fake", input="Two", previous_response_id=first.id)
    assert prompt_of(server.engine.seen[-1]) == ("user\nOne\nassistant\nHello there.\nuser\nTwo\nassistant\n")
    assert second.previous_response_id == first.id
    with client.responses.stream(model="fake", input="Three", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    assert prompt_of(server.engine.seen[-1]).count("Hello there.") == 2
    assert client.responses.retrieve(third.id).output_text == "Hello there."
    listed = client.responses.input_items.list(third.id, order="asc", limit=2)
    assert [item.type for item in listed.data] == ["message", "message"]
    assert listed.has_more
    turned = [item.id for item in client.responses.input_items.list(third.id, order="desc")]
    assert turned == [item.id for item in client.responses.input_items.list(third.id, order="asc")][::-1]
    with pytest.raises(openai.BadRequestError, match="it must be asc or desc"):
        client.responses.input_items.list(third.id, order="ascending")  # type: ignore[arg-type]
    reference: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Again"}]
    client.responses.create(model="fake", input=reference)
    assert prompt_of(server.engine.seen[-1]) == "assistant\nHello there.\nuser\nAgain\nassistant\n"


def test_forgetting(client: openai.OpenAI) -> None:
    made = client.responses.create(model="fake", input="One")
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    unkept = client.responses.create(model="fake", input="One", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="fake", input="Two", previous_response_id=unkept.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(model="fake", input="One").id)


def test_in_the_background() -> None:
    held = threading.Event()
    with serving(Answer(pieces=["x"] * 40, delay_s=0.01, held=held)) as running, connected(running) as client:
        made = client.responses.create(model="fake", input="Hi", background=True)
        assert made.status == "queued"
        with pytest.raises(openai.BadRequestError, match="not ended"):
            client.responses.create(model="fake", input="Hi", previous_response_id=made.id)
        held.set()
        wait_until(lambda: client.responses.retrieve(made.id).status == "completed")
        made = client.responses.retrieve(made.id)
        assert made.output_text == "x" * 40
        told = list(client.responses.retrieve(made.id, stream=True, starting_after=3))
        assert told[0].sequence_number == 4
        assert told[-1].type == "response.completed"
        streamed = list(client.responses.create(model="fake", input="Hi", background=True, stream=True))
        assert streamed[1].type == "response.queued"
        assert streamed[-1].type == "response.completed"


def test_cancelling() -> None:
    with serving(endless()) as running, connected(running) as client:
        made = client.responses.create(model="fake", input="Hi", background=True)
        stream = client.responses.retrieve(made.id, stream=True)
        assert next(iter(stream)).type == "response.created"
        stream.close()
        wait_until(lambda: running.engine.seen)
        assert client.responses.cancel(made.id).status == "cancelled"
        assert client.responses.cancel(made.id).status == "cancelled"
        assert len(running.engine.aborted) == 1
        client.responses.create(model="fake", input="Hi", background=True)  # left running: the server ends all the same


def test_what_is_deleted_while_it_runs_stays_deleted() -> None:
    with serving(endless()) as running, connected(running) as client:
        made = client.responses.create(model="fake", input="Hi", background=True)
        stream = client.responses.retrieve(made.id, stream=True)
        assert next(iter(stream)).type == "response.created"
        client.responses.delete(made.id)
        assert list(stream)[-1].type != "response.completed"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_nothing_is_stored_where_it_could_not_be_found() -> None:
    with serving(response_store_size=0) as running, connected(running) as client:
        made = client.responses.create(model="fake", input="Hi")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        for asked in ({"previous_response_id": made.id}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="stores none"):
                client.responses.create(model="fake", input="Hi", **asked)  # type: ignore[arg-type]


def test_other_tenants_see_nothing() -> None:
    with serving(api_key=["mine=a", "theirs=b"]) as running:
        made = httpx.post(
            f"{running.url}/v1/responses", json={"input": "a"}, headers={"authorization": "Bearer a"}
        ).json()
        url = f"{running.url}/v1/responses/{made['id']}"
        assert httpx.get(url, headers={"authorization": "Bearer a"}).status_code == 200
        assert httpx.get(url, headers={"authorization": "Bearer b"}).status_code == 404


def test_the_store_is_bounded() -> None:
    def kept(name: str, size: int = 10) -> StoredResponse:
        response = {"id": name, "status": "completed", "output": [{"id": f"item_{name}", "text": "x" * size}]}
        return StoredResponse(response, [], 0, "")

    store = ResponseStore(3)
    for name in "abcd":
        store.put(kept(name))
    assert len(store) == 3
    assert store.item("item_a", "") is None
    store.get("b", "")
    store.put(kept("e"))
    assert store.get("b", "").id == "b"
    assert store.item("item_c", "") is None
    assert store.item("item_b", "") is not None
    small = ResponseStore(100, max_bytes=1000)
    for name in "abcd":
        small.put(kept(name, 400))
    assert len(small) == 2
