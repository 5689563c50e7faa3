"""Every row of the table of bounds: exactly so much is taken, one more is refused, over HTTP and over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest
from scripted_server import FakeServer, serving

from bough.core import bounds
from bough.core.bounds import BOUNDS
from bough.entrypoints.grpc import bough_pb2 as pb
from bough.entrypoints.grpc.bough_pb2_grpc import BoughStub
from bough.entrypoints.grpc.server import GrpcServer

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> tuple[str, Json]:
    return CHAT, {"messages": USER, "max_tokens": 4, **fields}


def text(**fields: Any) -> tuple[str, Json]:
    return TEXT, {"prompt": "Hi", "max_tokens": 4, **fields}


def native(**fields: Any) -> tuple[str, Json]:
    return "/generate", {"text": "Hi", **fields}


def sampled(**params: Any) -> tuple[str, Json]:
    return native(sampling_params={"max_new_tokens": 4, **params})


def tool(name: str, about: str = "") -> Json:
    return {"type": "function", "function": {"name": name, "description": about, "parameters": {"type": "object"}}}


def nested(levels: int) -> Json:
    """An object schema of so many levels of JSON."""
    schema: Json = {"type": "object"}
    for _ in range((levels - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema if levels % 2 else {"allOf": schema}


def lists(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


Case = Callable[[int], tuple[str, Any]]
HTTP: dict[str, list[Case]] = {
    "n": [lambda k: chat(n=k), lambda k: sampled(n=k)],
    "best_of": [lambda k: text(best_of=k)],
    "beam_width": [lambda k: sampled(beam_width=k), lambda k: text(beam_width=k)],
    "documents": [lambda k: ("/v1/rerank", {"query": "a", "documents": ["b"] * k}),
                  lambda k: ("/v1/score", {"query": "a", "items": ["b"] * k, "label_token_ids": [1]}),
                  lambda k: ("/v1/score", {"text_1": "a", "text_2": ["b"] * k})],
    "messages": [lambda k: chat(messages=USER * k), lambda k: ("/v1/messages", {"max_tokens": 4, "messages": USER * k}),
                 lambda k: ("/v1/responses", {"input": USER * k})],
    "content_parts": [
        lambda k: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * k}]),
        lambda k: ("/v1/messages", {"max_tokens": 4, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}] * k}]}),
    ],
    "top_logprobs": [lambda k: chat(logprobs=True, top_logprobs=k), lambda k: text(logprobs=k)],
    "native_top_logprobs": [lambda k: native(return_logprob=True, top_logprobs_num=k)],
    "token_ids_logprob": [lambda k: native(return_logprob=True, token_ids_logprob=[1] * k)],
    "label_token_ids": [lambda k: ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1] * k})],
    "stops": [lambda k: chat(stop=["x"] * k), lambda k: sampled(stop=["x"] * k), lambda k: sampled(stop_regex=["x"] * k),
              lambda k: ("/v1/messages", {"max_tokens": 4, "messages": USER, "stop_sequences": ["x"] * k}),
              lambda k: ("/api/generate", {"model": "fake", "prompt": "a", "stream": False,
                                           "options": {"stop": ["x"] * k}})],
    "stop_chars": [lambda k: chat(stop="x" * k), lambda k: sampled(stop=["x" * k])],
    "all_stops_chars": [lambda k: sampled(stop=[chr(97 + i) * 1000 for i in range(8)] + ["z" * (k - 8000)])],
    "stop_regex_chars": [lambda k: sampled(stop_regex="x" * k), lambda k: chat(stop_regex="x" * k)],
    "stop_token_ids": [lambda k: sampled(stop_token_ids=[1] * k), lambda k: text(stop_token_ids=[1] * k)],
    "logit_bias": [lambda k: chat(logit_bias={str(i): 1 for i in range(k)}),
                   lambda k: sampled(logit_bias={str(i): 1 for i in range(k)})],
    "allowed_token_ids": [lambda k: sampled(allowed_token_ids=[1] * k)],
    "bad_words": [lambda k: sampled(bad_words=["x"] * k), lambda k: chat(bad_words=["x"] * k)],
    "bad_word_chars": [lambda k: sampled(bad_words="x" * k)],
    "grammar_bytes": [lambda k: sampled(regex="x" * k), lambda k: sampled(ebnf="x" * k), lambda k: chat(regex="x" * k),
                      lambda k: sampled(json_schema='{"type":"' + "x" * (k - 11) + '"}')],
    "choices": [lambda k: sampled(choice=["x"] * k), lambda k: chat(guided_choice=["x"] * k)],
    "choice_chars": [lambda k: sampled(choice=["x" * k])],
    "custom_params": [lambda k: sampled(custom_params={str(i): 1 for i in range(k)})],
    "custom_param_chars": [lambda k: sampled(custom_params={"a": "x" * k})],
    "tools": [lambda k: chat(tools=[tool(f"t{i}") for i in range(k)]),
              lambda k: ("/v1/messages", {"max_tokens": 4, "messages": USER, "tools": [
                  {"name": f"t{i}", "input_schema": {"type": "object"}} for i in range(k)]}),
              lambda k: ("/v1/responses", {"input": "a", "tools": [
                  {"type": "function", "name": f"t{i}", "parameters": {"type": "object"}} for i in range(k)]}),
              lambda k: ("/api/chat", {"model": "fake", "messages": USER, "stream": False,
                                       "tools": [tool(f"t{i}") for i in range(k)]})],
    "tools_bytes": [lambda k: chat(tools=[tool("a", "x" * (k - len(
        b'[{"type":"function","function":{"name":"a","description":"","parameters":{"type":"object"}}}]')))])],
    "schema_depth": [lambda k: sampled(json_schema=nested(k)),
                     lambda k: chat(response_format={
                         "type": "json_schema", "json_schema": {"name": "a", "schema": nested(k)}}),
                     lambda k: ("/v1/responses", {"input": "a", "text": {"format": {
                         "type": "json_schema", "name": "a", "schema": nested(k)}}}),
                     lambda k: ("/api/generate", {"model": "fake", "prompt": "a", "stream": False, "format": nested(k)})],
    "rid_chars": [lambda k: native(rid="x" * k), lambda k: chat(rid="x" * k),
                  lambda k: ("/open_session", {"session_id": "x" * k}),
                  lambda k: ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "rid": "x" * k})],
    "salt_chars": [lambda k: native(cache_salt="x" * k), lambda k: chat(extra_key="x" * k),
                   lambda k: native(extra_key="x" * k)],
    "name_chars": [lambda k: sampled(logit_processor="x" * k), lambda k: chat(logit_processor="x" * k)],
    "template_kwargs": [lambda k: chat(chat_template_kwargs={f"k{i}": 1 for i in range(k)})],
    "template_kwargs_chars": [lambda k: chat(chat_template_kwargs={"a": "x" * (k - len('{"a": ""}'))})],
    "metadata": [lambda k: ("/v1/responses", {"input": "a", "metadata": {str(i): "x" for i in range(k)}})],
    "join_branches": [lambda k: ("/concate_and_append_request", {"src_rids": ["a"] * k, "dst_rid": "b"})],
    "json_depth": [lambda k: chat(user=lists(k - 1)), lambda k: native(text=lists(k - 1))],
    "tokenize_chars": [lambda k: ("/tokenize", {"prompt": "x" * k})],
}  # fmt: skip
"""By bound: bodies that ask for exactly k."""
ELSEWHERE = {
    "header_bytes": "test_slow_clients.py sends heads of every size",
    "grpc_requests": "below, over one stream",
    "embeddings": "below, on pooling models",
    "batch_tokens": "below, for completions with short prompts and with long ones",
    "json_numbers": "test_large_json.py",
    "json_parts": "test_large_json.py",
}


def params(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="Hi", sampling_params=pb.SamplingParams(max_new_tokens=4, **fields))


def with_custom(fields: Json) -> pb.GenerateRequest:
    made = params()
    made.sampling_params.custom_params.update(fields)
    return made


GRPC: dict[str, Callable[[int], pb.GenerateRequest]] = {
    "n": lambda k: params(n=k),
    "beam_width": lambda k: params(beam_width=k),
    "native_top_logprobs": lambda k: pb.GenerateRequest(text="a", logprobs=pb.LogprobOptions(top=k)),
    "token_ids_logprob": lambda k: pb.GenerateRequest(text="a", logprobs=pb.LogprobOptions(token_ids=[1] * k)),
    "stops": lambda k: params(stop=["x"] * k),
    "stop_chars": lambda k: params(stop=["x" * k]),
    "all_stops_chars": lambda k: params(stop=[chr(97 + i) * 1000 for i in range(8)] + ["z" * (k - 8000)]),
    "stop_regex_chars": lambda k: params(stop_regex=["x" * k]),
    "stop_token_ids": lambda k: params(stop_token_ids=[1] * k),
    "logit_bias": lambda k: params(logit_bias=dict.fromkeys(range(k), 1)),
    "allowed_token_ids": lambda k: params(allowed_token_ids=[1] * k),
    "bad_words": lambda k: params(bad_words=["x"] * k),
    "bad_word_chars": lambda k: params(bad_words=["x" * k]),
    "grammar_bytes": lambda k: params(regex="x" * k),
    "choices": lambda k: params(choice=["x"] * k),
    "choice_chars": lambda k: params(choice=["x" * k]),
    "custom_params": lambda k: with_custom({str(i): 1 for i in range(k)}),
    "custom_param_chars": lambda k: with_custom({"a": "x" * k}),
    "schema_depth": lambda k: params(json_schema=httpx.Request("POST", "http://a", json=nested(k)).content.decode()),
    "rid_chars": lambda k: pb.GenerateRequest(text="a", rid="x" * k),
    "salt_chars": lambda k: pb.GenerateRequest(text="a", cache_salt="x" * k),
    "name_chars": lambda k: params(logit_processor="x" * k),
}
NOT_IN_PROTO = {
    "best_of", "batch_tokens", "embeddings", "documents", "messages", "content_parts", "top_logprobs",
    "label_token_ids", "tools", "tools_bytes", "template_kwargs", "template_kwargs_chars", "metadata", "join_branches",
    "json_depth", "json_numbers", "json_parts", "header_bytes", "grpc_requests", "tokenize_chars",
}  # fmt: skip
"""Of these a message of bough.proto has one, none, or the transport's own bound (`--max-body-bytes`)."""


def says(bound: str) -> str:
    return f"at most {BOUNDS[bound].most} {BOUNDS[bound].unit} are allowed"


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with serving(max_body_bytes=32 * 1024 * 1024, max_queued_requests=5000, max_queued_tokens=10**9) as server:
        yield server


@pytest.fixture(scope="module")
def stub(running: FakeServer) -> Iterator[BoughStub]:
    async def open_server() -> GrpcServer:
        made = GrpcServer(running.service, "127.0.0.1", 0)
        await made.start()
        return made

    server = asyncio.run_coroutine_threadsafe(open_server(), running._loop).result(60)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield BoughStub(channel)
    asyncio.run_coroutine_threadsafe(server.close(), running._loop).result(60)


def test_the_walk_is_complete() -> None:
    assert BOUNDS.keys() == HTTP.keys() | ELSEWHERE.keys()
    assert BOUNDS.keys() == GRPC.keys() | NOT_IN_PROTO
    assert not GRPC.keys() & NOT_IN_PROTO


@pytest.mark.parametrize(("bound", "at"), [(bound, at) for bound, cases in HTTP.items() for at in range(len(cases))])
def test_http(running: FakeServer, bound: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if bound == "tokenize_chars":  # 16 Mi of them take ten seconds
        smaller = bounds.Bound(100_000, BOUNDS[bound].unit)
        monkeypatch.setitem(bounds.BOUNDS, bound, smaller)  # type: ignore[call-overload]
    case, most = HTTP[bound][at], BOUNDS[bound].most
    with httpx.Client(base_url=running.url, timeout=150) as client:
        path, body = case(most)
        fits = client.post(path, json=body)
        assert fits.status_code < 500, fits.text
        assert "at most" not in fits.text or says(bound) not in fits.text, fits.text[:300]
        path, body = case(most + 1)
        refused = client.post(path, json=body)
        assert refused.status_code == 400, refused.text[:300]
        assert says(bound) in refused.text


@pytest.mark.parametrize("bound", GRPC)
def test_grpc(stub: Any, bound: str) -> None:
    most = BOUNDS[bound].most
    fits = stub.Generate(GRPC[bound](most), timeout=150)
    with contextlib.suppress(grpc.RpcError):  # for other reasons, perhaps
        list(fits)
    assert says(bound) not in (fits.details() or "")
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(GRPC[bound](most + 1), timeout=150))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert says(bound) in refused.value.details()


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [
        ("embed", "/v1/embeddings", lambda k: {"input": ["a"] * k}),
        ("embed", "/v1/embeddings", lambda k: {"input": [[65]] * k}),
        ("embed", "/encode", lambda k: {"text": ["a"] * k}),
        ("embed", "/api/embed", lambda k: {"model": "fake", "input": ["a"] * k}),
        ("classify", "/v1/classify", lambda k: {"input": ["a"] * k}),
        ("classify", "/classify", lambda k: {"input_ids": [[65]] * k}),
        ("classify", "/v1/moderations", lambda k: {"input": ["a"] * k}),
    ],
)
def test_texts_to_pool(task: str, path: str, body: Callable[[int], Json], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bounds.BOUNDS, "embeddings", bounds.Bound(3, "inputs in one request"))  # type: ignore[call-overload]
    pooling = {"task": task, "family": "Qwen3", "modes": ["last"], "width": 2, "labels": ["safe", "hate"]}
    with serving(facts={"pooling": pooling}) as running, httpx.Client(base_url=running.url, timeout=150) as client:
        refused = client.post(path, json=body(4))
        assert (refused.status_code, says("embeddings") in refused.text) == (400, True), refused.text
        assert says("embeddings") not in client.post(path, json=body(3)).text


LONG = [65] * 2000
"""More tokens than any completion counts for."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", lambda k: {"text": ["a"] * k}),
        ("/generate", lambda k: {"input_ids": [LONG] * (k // 2) + [[65]] * (k % 2)}),
        ("/generate", lambda k: {"text": "a", "sampling_params": {"n": k}}),
        ("/v1/completions", lambda k: {"prompt": ["a"] * k, "max_tokens": 4}),
        ("/v1/completions", lambda k: {"prompt": [LONG] * (k // 2) + [[65]] * (k % 2), "max_tokens": 4}),
        ("/v1/completions", lambda k: {"prompt": "a", "n": k, "max_tokens": 4}),
        ("/tokenize", lambda k: {"prompt": ["a"] * k}),
        ("/detokenize", lambda k: {"tokens": [[65]] * k}),
    ],
)
def test_prompts_are_counted_by_their_tokens(
    running: FakeServer, path: str, body: Callable[[int], Json], monkeypatch: pytest.MonkeyPatch
) -> None:
    least = bounds.LEAST_BATCH_TOKENS
    monkeypatch.setitem(bounds.BOUNDS, "batch_tokens", bounds.Bound(6 * least, BOUNDS["batch_tokens"].unit))  # type: ignore[call-overload]
    with httpx.Client(base_url=running.url, timeout=150) as client:
        assert client.post(path, json=body(6)).status_code == 200
        refused = client.post(path, json=body(7))
        assert (refused.status_code, says("batch_tokens") in refused.text) == (400, True), refused.text


def test_thousands_of_prompts_go_in_one_request(running: FakeServer) -> None:
    answers = httpx.post(f"{running.url}/generate", json={"text": ["a"] * 2000}, timeout=150).json()
    assert [answer["text"] for answer in answers] == ["Hello there."] * 2000


def test_requests_over_one_grpc_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.entrypoints.grpc.generate._MOST_AT_ONCE", 3)
    from scripted_server import Answer

    held = threading.Event()
    with serving(Answer(held=held)) as running:

        async def open_server() -> GrpcServer:
            made = GrpcServer(running.service, "127.0.0.1", 0)
            await made.start()
            return made

        server = asyncio.run_coroutine_threadsafe(open_server(), running._loop).result(60)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            commands = [pb.GenerateCommand(generate=pb.GenerateRequest(text="a", rid=str(i))) for i in range(4)]
            told = []
            for each in BoughStub(channel).GenerateMany(iter(commands), timeout=150):
                told.append(each)
                if each.HasField("error"):
                    held.set()
        asyncio.run_coroutine_threadsafe(server.close(), running._loop).result(60)
    assert {each.rid for each in told if each.HasField("error")} == {"3"}
    assert {each.rid for each in told if each.HasField("finish_reason")} == {"0", "1", "2"}
