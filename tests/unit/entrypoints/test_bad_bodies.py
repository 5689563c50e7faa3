"""Whatever is sent, the answer is a 4xx in OpenAI's shape that says what, why and fix; and the server goes on."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from scripted_server import Answer, FakeServer, serving

from bough.core.messages import End

POSTS = ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort_request"]
LEAKS = re.compile(r"0x[0-9a-f]{6,}|/home/|/root/|/tmp/|Traceback|\.py\b|site-packages")
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def http_client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert not LEAKS.search(response.text)
    return error


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "raw",
    [
        b"", b"   ", b"{", b"null", b"[]", b'"x"', b"5", b"{]", b'{"a": NaN}', b'{"a": "\xff\xfe"}', b"\x00\x01", b"\xff",
        b'{"messages": "\\ud800"}', b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"text": ' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"}", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": 1e999}', b'\xef\xbb\xbf{"prompt": "a"}',
    ],
)  # fmt: skip
def test_broken_bodies(http_client: httpx.Client, path: str, raw: bytes) -> None:
    error = check_error(http_client.post(path, content=raw), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": USER, "max_tokens": "5"}, "max_tokens"),
        ({"messages": USER, "max_tokens": -1}, "max_tokens"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": USER, "max_tokens": True}, "max_tokens"),
        ({"messages": USER, "max_completion_tokens": 10**30}, "sampling_params"),
        ({"messages": USER, "temperature": -0.1}, "temperature"),
        ({"messages": USER, "temperature": "hot"}, "temperature"),
        ({"messages": USER, "top_p": 0}, "top_p"),
        ({"messages": USER, "top_k": -7}, "top_k"),
        ({"messages": USER, "n": 0}, "n"),
        ({"messages": USER, "n": 10_000}, "n"),
        ({"messages": USER, "seed": 2**70}, "seed"),
        ({"messages": USER, "stop": [1]}, "stop[0]"),
        ({"messages": USER, "stop": ["a"] * 33}, "stop"),
        ({"messages": USER, "stop": "x" * 5000}, "stop"),
        ({"messages": USER, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": USER, "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"messages": USER, "logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"messages": USER, "top_logprobs": 5}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": USER, "stream": "yes"}, "stream"),
        ({"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": USER, "response_format": {}}, "response_format"),
        ({"messages": USER, "json_schema": "{"}, "json_schema"),
        ({"messages": USER, "regex": "a", "ebnf": "b"}, "ebnf"),
        ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools[1].function.name"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a"}}],
          "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
        ({"messages": USER, "functions": [], "tools": []}, "functions"),
        ({"messages": USER, "functions": [{"name": "a"}], "function_call": {"name": "b"}}, "tool_choice"),
        ({"messages": USER, "tools": [{"type": "function", "function": {"name": "a"}}],
          "tool_choice": {"type": "allowed_tools", "allowed_tools": {
              "mode": "auto", "tools": [{"type": "function", "function": {"name": "b"}}]}}}, "tool_choice"),
        ({"messages": USER, "audio": {}}, "audio"),
        ({"messages": USER, "modalities": ["audio"]}, "modalities"),
        ({"messages": USER, "chat_template": "x"}, "chat_template"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": USER, "custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"messages": USER, "lora_path": "/etc"}, "lora_path"),
        ({"messages": USER, "rid": "x" * 300}, "rid"),
        ({"messages": USER, "cache_salt": "x" * 300}, "cache_salt"),
        ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, "messages"),
    ],
)  # fmt: skip
def test_wrong_chat_fields(http_client: httpx.Client, body: dict[str, Any], param: str) -> None:
    for stream in ({}, {"stream": True}) if "stream" not in body else ({},):
        error = check_error(http_client.post("/v1/chat/completions", json={**body, **stream}), 400)
        assert error["type"] == "invalid_request_error"
        if param != "sampling_params":
            assert error["param"] == param
        assert len(error["message"].split("; ")) >= 2


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [10**9]}, "label_token_ids",
         "label_token_ids has token id 1000000000"),
        ("/score", {"query": "a", "items": ["b"], "label_token_ids": [10**9]}, "label_token_ids",
         "label_token_ids has token id 1000000000"),
        ("/v1/score", {"query": [], "items": [[]], "label_token_ids": [1]}, "query", "the prompt is empty"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format",
         'text.format.schema is missing or no object; it says what the answer looks like; '
         'send {"type": "json_schema", "name": ..., "schema": {...}}'),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role", "role is missing; roles are"),
        ("/v1/responses", {"input": [{"content": "a"}]}, "input[0].role", "role is missing; roles are"),
        ("/open_session", {"capacity_of_str_len": 0}, "capacity_of_str_len", "it must be 1 to 2,147,483,647"),
        ("/open_session", {"timeout": 0}, "timeout", "it must be 0.001 to 2,592,000;"),
    ],
)  # fmt: skip
def test_a_routes_errors_speak_of_its_own_fields(
    http_client: httpx.Client, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    error = check_error(http_client.post(path, json=body), 400)
    assert error["param"] == param
    assert said in error["message"]


def test_too_long_has_its_code(http_client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "long " * 2000}]}
    assert check_error(http_client.post("/v1/chat/completions", json=body), 400)["code"] == "context_length_exceeded"
    body = {"messages": USER, "max_tokens": 5000}
    assert check_error(http_client.post("/v1/chat/completions", json=body), 400)["code"] == "context_length_exceeded"


def test_unknown_model(http_client: httpx.Client, server: FakeServer) -> None:
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "a"})):
        error = check_error(http_client.post(path, json={**body, "model": "gpt-9"}), 404)
        assert error["code"] == "model_not_found"
        assert "fake" in error["message"]
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.chat.completions.create(model="gpt-9", messages=USER)


@pytest.mark.parametrize("model", ["fake", "default", "org/fake", "", None])
def test_known_names(http_client: httpx.Client, model: str | None) -> None:
    answer = http_client.post("/v1/chat/completions", json={"messages": USER, "model": model})
    assert answer.status_code == 200
    assert answer.json()["model"] == (model or "fake")


def test_unknown_fields_warn_once_and_strict_refuses(http_client: httpx.Client) -> None:
    body = {"messages": USER, "zzz": 1, "aaa\n": 2}
    answer = http_client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-bough-ignored-fields"] == "zzz,?"
    assert "x-bough-ignored-fields" not in http_client.post("/v1/chat/completions", json={"messages": USER}).headers
    with serving(strict_api=True) as strict:
        refused = httpx.post(f"{strict.url}/v1/chat/completions", json={"messages": USER, "zzz": 1})
        assert check_error(refused, 400)["param"] == "zzz"
        check_error(httpx.post(f"{strict.url}/generate", json={"text": "a", "zzz": 1}), 400)


def test_no_such_route_or_method(http_client: httpx.Client) -> None:
    assert check_error(http_client.get("/nope"), 404)["code"] == "not_found"
    assert check_error(http_client.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"


def test_large_bodies_are_cut_off_while_reading() -> None:
    with serving(max_body_bytes=10_000) as running:
        for path in POSTS:
            check_error(httpx.post(running.url + path, content=b"x" * 10_001), 413)
        sent = []

        def endless() -> Iterator[bytes]:
            for _ in range(100_000):
                sent.append(1)
                yield b"x" * 4096

        try:
            response = httpx.post(running.url + "/generate", content=endless(), timeout=60)
        except (httpx.WriteError, httpx.ReadError):
            pass  # the server closed before we stopped talking
        else:
            check_error(response, 413)
        assert len(sent) < 50_000
        assert httpx.get(running.url + "/health").status_code == 200


def test_a_lying_content_length_is_refused_early() -> None:
    with serving(max_body_bytes=10_000) as running:
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=60)
        connection.putrequest("POST", "/generate")
        connection.putheader("content-length", str(10**12))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "text", "input_ids", "tokens", "n", "stop", "stream", "tools", "tool_choice", "logprobs",
     "temperature", "max_tokens", "response_format", "sampling_params", "rid", "logit_bias", "seed", "stream_options",
     "top_logprobs", "return_logprob", "chat_template_kwargs", "reasoning_effort", "echo", "best_of", "regex"]
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(POSTS), body=st.dictionaries(FIELDS, JSON, max_size=5), real=st.booleans())
def test_no_body_breaks_the_server(http_client: httpx.Client, path: str, body: dict[str, Any], real: bool) -> None:
    if real:
        body = {"messages": USER, "prompt": "a", "text": "a", "tokens": [65], "rid": "x", **body}
    response = http_client.post(path, content=json.dumps(body).encode())
    assert response.status_code < 500, response.text
    assert not LEAKS.search(response.text)
    if response.status_code >= 400:
        assert response.json()["error"]["message"]


# -- errors from inside ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (End(reason="error", message="logits are not finite", status=500), 500, "request_failed"),
        (End(reason="abort", message="too late", status=504, code="deadline_exceeded"), 504, "deadline_exceeded"),
        (End(reason="abort", message="the queue is full", status=429), 429, "overloaded"),
        (End(reason="error", message="bad grammar", status=400), 400, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_engine_failures_before_the_first_token(
    end: End, status: int, code: str | None, path: str, stream: bool
) -> None:
    body = {"messages": USER} if "chat" in path else {"prompt": "a"} if "v1" in path else {"text": "a"}
    with serving(Answer(pieces=[], end=end)) as running:
        error = check_error(httpx.post(running.url + path, json={**body, "stream": stream}), status)
    assert error["code"] == code
    assert end.message in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
def test_engine_failures_in_the_middle_of_a_stream(path: str) -> None:
    body = {"messages": USER} if "chat" in path else {"prompt": "a"} if "v1" in path else {"text": "a"}
    answer = Answer(pieces=["one", "two"], delay_s=0.02, end=End(reason="error", message="it broke", status=500))
    with serving(answer) as running:
        response = httpx.post(running.url + path, json={**body, "stream": True})
    assert response.status_code == 200
    told = [line for line in response.text.split("\n\n") if line]
    assert "one" in told[1] or "one" in told[0]
    assert json.loads(told[-2].removeprefix("data: "))["error"]["message"] == "it broke"
    assert told[-1] == "data: [DONE]"


def test_a_bug_shows_nothing_of_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running:

        async def broken(*_: object) -> None:
            raise RuntimeError("secret at 0xdeadbeef in /home/me/x.py")

        running.service.engine_client.submit_batch = broken  # type: ignore[assignment, method-assign]
        response = httpx.post(f"{running.url}/generate", json={"text": "a"})
        error = check_error(response, 500)
        assert error["type"] == "internal_error"
        assert response.headers["x-request-id"]
        assert httpx.get(running.url + "/health").status_code == 200
    assert "secret" in caplog.text


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def _bad_grammar(message: Any, prompt: str) -> Answer:
    """As the engine ends a request whose grammar it can't use."""
    spec = message.sampling.grammar
    param = spec.param or spec.kind
    said = f"at /: wrong; change {param}, or leave it out"
    return Answer(pieces=[], end=End(reason="error", message=said, status=400, param=param))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": USER, "response_format": WRAPPED}, "response_format"),
        ("/v1/chat/completions", {"messages": USER, "stream": True, "response_format": WRAPPED}, "response_format"),
        ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/chat/completions", {"messages": USER, "regex": "("}, "regex"),
        ("/v1/chat/completions", {"messages": USER, "guided_json": SCHEMA}, "guided_json"),
        ("/v1/completions", {"prompt": "a", "guided_regex": "("}, "guided_regex"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "a", "ebnf": "("}, "ebnf"),
        ("/v1/completions", {"prompt": "a", "structural_tag": "{}", "response_format": {"type": "text"}},
         "structural_tag"),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": SCHEMA}}, "json_schema"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
         "text.format"),
    ],
)  # fmt: skip
def test_a_grammar_that_the_engine_refuses_names_the_clients_field(path: str, body: Any, param: str) -> None:
    with serving(_bad_grammar) as running:
        error = check_error(httpx.post(running.url + path, json=body), 400)
        assert error["param"] == param
        assert error["message"] == f"at /: wrong; change {param}, or leave it out"
        if path == "/v1/responses":
            format = {"type": "json_schema", "schema": SCHEMA}
            asked = {"messages": USER, "max_tokens": 9, "output_config": {"format": format}}
            told = httpx.post(running.url + "/v1/messages", json=asked).json()["error"]["message"]
            assert "change output_config.format," in told
