"""Clients that are odd but right: numbers with a point, HTTP/1.0, long addresses, compressed bodies, other methods; and
errors that name a field as the client's own dialect does."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import CONTEXT, Answer, FakeServer, serving

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def raw_answer(server: FakeServer, request: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("path", "whole", "pointed"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 3, "n": 2}, {"max_tokens": 3.0, "n": 2e0}),
        ("/v1/completions", {"prompt": [72, 105], "seed": 7}, {"prompt": [72.0, 105.0], "seed": 7.0}),
        ("/v1/messages", {"model": "fake", "messages": USER, "max_tokens": 3}, {"max_tokens": 3.0}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3}, {"max_output_tokens": 3.0}),
        (
            "/api/generate",
            {"model": "fake", "prompt": "Hi", "stream": False, "options": {"num_predict": 3, "top_k": 4}},
            {"options": {"num_predict": 3.0, "top_k": 4.0}},
        ),
        ("/detokenize", {"tokens": [72, 105]}, {"tokens": [72.0, 105.0]}),
    ],
)
def test_whole_numbers_may_have_a_point(
    client: httpx.Client, server: FakeServer, path: str, whole: dict[str, Any], pointed: dict[str, Any]
) -> None:
    asked = []
    for body in (whole, whole | pointed):
        before = len(server.engine.seen)
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        asked.append([(bytes(each.prompt), each.sampling) for each in server.engine.seen[before:]])
    assert asked[0] == asked[1]


@pytest.mark.parametrize("wrong", [2.5, "2", True, 1e300, [2.0]])
def test_other_numbers_are_still_refused(client: httpx.Client, wrong: object) -> None:
    response = client.post("/v1/chat/completions", json={"messages": USER, "n": wrong})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


def test_numbers_with_points_in_very_many_places_are_the_clients_error(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": [[72.0] for _ in range(100)]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt[")


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": CONTEXT}, "max_tokens", "max_tokens of"),
        ("/v1/chat/completions", {"messages": USER, "seed": 2**64}, "seed", "seed is"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * CONTEXT}]}, "messages", "the prompt has"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": CONTEXT}, "max_tokens", "max_tokens of"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt", "token id 1000000"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": CONTEXT}, "max_output_tokens", "max_output_tokens of"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ("/generate", {"text": ""}, "text", "the prompt is empty"),
        ("/generate", {"text": []}, "text", "text is an empty list"),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": CONTEXT}}, "max_new_tokens", "max_new_tokens"),
        ("/api/generate", {"model": "fake", "prompt": "Hi", "options": {"repeat_penalty": -1}}, None, "repeat_penalty"),
        ("/v1/messages", {"model": "fake", "messages": USER, "max_tokens": 0}, None, "max_tokens is 0"),
    ],
)  # fmt: skip
def test_errors_name_fields_as_the_route_does(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None, named: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert named in message
    if path != "/generate":
        assert not [word for word in ("max_new_tokens", "sampling_seed", "repetition_penalty") if word in message]
    if param is not None:
        assert error["param"] == param


def test_what_the_client_wrote_is_quoted_as_it_is(client: httpx.Client) -> None:
    error = client.post("/v1/chat/completions", json={"messages": USER, "model": "max_new_tokens"}).json()["error"]
    assert "'max_new_tokens'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate", "/v1/messages", "/api/chat"])
def test_a_compressed_body_is_told_apart_from_broken_json(client: httpx.Client, path: str) -> None:
    body = gzip.compress(json.dumps({"model": "fake", "text": "Hi", "messages": USER, "max_tokens": 2}).encode())
    response = client.post(path, content=body, headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert "content-encoding is 'gzip'" in response.text
    plain = gzip.decompress(body)
    for encoding in ("Identity", "utf-8", ""):
        assert client.post(path, content=plain, headers={"content-encoding": encoding}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/v1/responses/resp_1", {"GET", "HEAD", "DELETE"}),
        ("DELETE", "/generate", {"POST", "PUT"}),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(client: httpx.Client, method: str, path: str, allowed: set[str]) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed


def test_models_with_a_slash_at_the_end_is_the_list(client: httpx.Client) -> None:
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


def test_http_1_0_gets_streams_without_chunks(server: FakeServer) -> None:
    body = json.dumps({"messages": USER, "stream": True}).encode()
    head, _, told = raw_answer(
        server,
        b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body),
    ).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    events = told.decode().split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    whole = b"GET /v1/models HTTP/1.0\r\n\r\n"
    head, _, told = raw_answer(server, whole).partition(b"\r\n\r\n")
    assert f"content-length: {len(told)}".encode() in head
    head, _, told = raw_answer(server, b"HEAD /v1/models HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert told == b""


def test_long_addresses(server: FakeServer, client: httpx.Client) -> None:
    answer = raw_answer(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"head is too large" in answer
    unknown = client.get("/" + "a" * 5000)
    assert unknown.status_code == 404
    assert len(unknown.content) < 500


SCATTERED = "naïve 日本語 🤦🏽 é"


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    """Every token of this server is one byte: together their bytes are the text, though most of their texts are not."""
    with serving(Answer(pieces=[SCATTERED])) as running, httpx.Client(base_url=running.url) as client:
        body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
        told = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
        assert bytes(byte for item in told for byte in item["bytes"]).decode() == SCATTERED
        assert all(item["top_logprobs"][0]["bytes"] == item["bytes"] for item in told)
        body = {"input": "Hi", "top_logprobs": 1}
        response = client.post("/v1/responses", json=body).json()
        told = response["output"][0]["content"][0]["logprobs"]
        assert bytes(byte for item in told for byte in item["bytes"]).decode() == SCATTERED


def test_text_offsets_count_characters() -> None:
    with (
        serving(Answer(pieces=[SCATTERED[:9], SCATTERED[9:]])) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        prompt = "größer "
        body = {"prompt": prompt, "echo": True, "logprobs": 0}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        text = prompt + SCATTERED
        assert choice["text"] == text
        expected = [at for at, character in enumerate(text) for _ in character.encode()]
        assert choice["logprobs"]["text_offset"] == expected
        offsets: list[int] = []
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    offsets += (json.loads(line[6:])["choices"][0]["logprobs"] or {}).get("text_offset", [])
        assert offsets == expected


def test_ollamas_num_predict_may_exceed_the_context(client: httpx.Client, server: FakeServer) -> None:
    body = {"model": "fake", "messages": USER, "stream": False, "options": {"num_predict": 10 * CONTEXT}}
    response = client.post("/api/chat", json=body)
    assert response.status_code == 200, response.text
    asked = server.engine.seen[-1]
    assert asked.sampling.max_new_tokens == CONTEXT - len(asked.prompt) // 4


def test_ollama_is_told_how_weights_are_stored() -> None:
    with serving(served={"format": "gguf", "stored_as": "Q4_1"}) as running:
        details = httpx.get(f"{running.url}/api/tags").json()["models"][0]["details"]
    assert (details["format"], details["quantization_level"]) == ("gguf", "Q4_1")


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        ("/v1/chat/completions", {"messages": USER, "tool_choice": "any"}, "none, auto, required"),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "code_interpreter"}]}, "function"),
    ],
)
def test_a_wrong_word_is_told_the_right_ones(
    client: httpx.Client, path: str, body: dict[str, Any], choices: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert f"send one of {choices}" in response.json()["error"]["message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


def test_a_schema_beside_json_object_counts(client: httpx.Client, server: FakeServer) -> None:
    """As llama.cpp takes it."""
    body = {"messages": USER, "response_format": {"type": "json_object", "schema": SCHEMA}}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    asked = server.engine.seen[-1].sampling.grammar
    assert asked is not None
    assert (asked.kind, json.loads(asked.source)) == ("json_schema", SCHEMA)


@pytest.mark.parametrize("constraint", [{"grammar": 'root ::= "a"'}, {"structured_outputs": {"foo": "[0-9]"}}])
def test_a_constraint_that_is_not_known_is_refused(client: httpx.Client, constraint: dict[str, Any]) -> None:
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "Hi"})):
        response = client.post(path, json=body | constraint)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] in constraint


def test_an_embedder_says_so_and_names_its_fields() -> None:
    pooling = {"task": "embed", "family": "Qwen3", "modes": ["last"], "width": 4, "labels": []}
    with serving(facts={"pooling": pooling}) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        assert client.post("/api/show", json={"model": "fake"}).json()["capabilities"] == ["embedding"]
        for path, field in (("/v1/embeddings", "input"), ("/encode", "text")):
            response = client.post(path, json={field: ""})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field


def test_server_info_has_the_names_that_sglangs_tools_read(client: httpx.Client) -> None:
    told = client.get("/get_server_info").json()
    model = client.get("/get_model_info").json()
    assert {name: told[name] for name in ("model_path", "tokenizer_path", "served_model_name")} == {
        name: model[name] for name in ("model_path", "tokenizer_path", "served_model_name")
    }
    assert "max_total_num_tokens" in told
