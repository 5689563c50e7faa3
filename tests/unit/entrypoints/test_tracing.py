"""X-Trace and OpenTelemetry: the timeline reaches whoever asked, and nobody else's answer changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest
from collector import Collector
from openai import OpenAI
from scripted_server import Answer, FakeServer, serving

from bough.core.errors import ConfigError
from bough.core.messages import End, TraceSpan
from bough.entrypoints.http.tracing import Tracing
from bough.observability.trace import OtlpExporter, Trace, valid_parent

USER = [{"role": "user", "content": "Hi"}]


def answer() -> Answer:
    spans = [
        TraceSpan("queue", 10.0, 0.5, {"cached_tokens": 2}),
        TraceSpan("prefill", 10.5, 0.25, {"start": 0, "tokens": 3, "step": 7}),
        TraceSpan("decode", 10.75, 1.0, {"tokens": 12, "retractions": 0}),
    ]
    return Answer(end=End(reason="stop", matched=256, spans=spans))


@pytest.fixture(scope="module")
def traced() -> Iterator[FakeServer]:
    with serving(lambda *_: answer()) as running:
        yield running


BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 20, "model": "fake"},
}


def check(told: dict[str, Any]) -> None:
    (only,) = told["answers"]
    names = [span["name"] for span in only["spans"]]
    assert names == ["prepare", "queue", "prefill", "decode", "deliver"]
    chunk = only["spans"][2]
    assert (chunk["tokens"], chunk["step"], chunk["ms"]) == (3, 7, 250.0)
    assert only["completion_tokens"] == 12
    assert only["finish_reason"] == "stop"
    assert told["total_ms"] > 0


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_carries_it_in_a_header(traced: FakeServer, path: str) -> None:
    plain = httpx.post(traced.url + path, json=BODIES[path])
    assert "x-trace" not in plain.headers
    assert not traced.engine.seen[-1].trace
    asked = httpx.post(traced.url + path, json=BODIES[path], headers={"x-trace": "1"})
    assert traced.engine.seen[-1].trace
    told = json.loads(asked.headers["x-trace"])
    check(told)
    assert told["request_id"] == asked.headers["x-request-id"]
    assert "prefill;dur=250.0" in asked.headers["server-timing"]
    assert asked.json().keys() == plain.json().keys()


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_ends_with_it(traced: FakeServer, path: str) -> None:
    body = {**BODIES[path], "stream": True}
    plain = httpx.post(traced.url + path, json=body).text
    asked = httpx.post(traced.url + path, json=body, headers={"x-trace": "1"}).text
    events = asked.split("\n\n")
    assert len(events) == len(plain.split("\n\n")) + 1
    name, _, data = events[-2].partition("\n")
    assert name == "event: trace"
    check(json.loads(data.removeprefix("data: ")))
    assert "event: trace" not in plain


def test_the_official_client_does_not_mind(traced: FakeServer) -> None:
    client = OpenAI(base_url=f"{traced.url}/v1", api_key="none", default_headers={"x-trace": "1"})
    chunks = list(client.chat.completions.create(model="fake", messages=USER, stream=True))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there."


def test_every_answer_of_a_batch_is_told(traced: FakeServer) -> None:
    asked = httpx.post(f"{traced.url}/generate", json={"text": ["a", "b", "c"]}, headers={"x-trace": "true"})
    assert len(json.loads(asked.headers["x-trace"])["answers"]) == 3


def test_a_timeline_too_long_for_a_header_is_summed_up(traced: FakeServer) -> None:
    asked = httpx.post(f"{traced.url}/generate", json={"text": ["a"] * 60}, headers={"x-trace": "1"})
    assert "x-trace" not in asked.headers
    assert "prefill;dur=15000.0" in asked.headers["server-timing"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
def test_other_routes_may_be_asked_too(traced: FakeServer, path: str) -> None:
    told = json.loads(httpx.get(traced.url + path, headers={"x-trace": "1"}).headers["x-trace"])
    assert told["answers"] == []


def test_opentelemetry_gets_the_whole_tree() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector()
    exporter = OtlpExporter(collector.url, service="bough", version="1")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    trace = Trace("POST /generate", "abc", valid_parent(parent), status=200)
    trace.submitted(1, "r1", 5)
    trace.ended(
        1, End(reason="length", prompt_tokens=5, completion_tokens=2, spans=[TraceSpan("queue", 1.0, 0.5, {"x": 1})])
    )
    exporter.export(trace)
    exporter.close()
    collector.server.shutdown()
    by_name = {span.name: span for span in collector.spans}
    assert set(by_name) == {"POST /generate", "prepare", "queue", "deliver"}
    root = by_name["POST /generate"]
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert all(span.parent_span_id == root.span_id for name, span in by_name.items() if name != root.name)
    assert by_name["queue"].end_time_unix_nano - by_name["queue"].start_time_unix_nano == pytest.approx(5e8, abs=1000)
    attributes = {item.key: item.value for item in root.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 2


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://"])
def test_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        OtlpExporter(endpoint, service="bough", version="1")


@pytest.mark.parametrize(
    "header", ["", "garbage", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "01-" + "a" * 32 + "-" + "b" * 16 + "-01"]
)
def test_bad_parents_are_ignored(header: str) -> None:
    assert valid_parent(header) == ""


@pytest.mark.parametrize("name", ["x-deadline-ms", "x-request-timeout-s"])
@pytest.mark.parametrize("value", ["soon", "-1", "0", "1e99", "nan", ""])
def test_deadlines_that_are_none(traced: FakeServer, name: str, value: str) -> None:
    refused = httpx.post(f"{traced.url}/generate", json={"text": "a"}, headers={name: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_the_earliest_deadline_counts(traced: FakeServer, path: str) -> None:
    for more, seconds in (({"deadline_ms": 60_000}, 60), ({}, 90)):
        began_s = time.monotonic()
        httpx.post(traced.url + path, json={**BODIES[path], **more}, headers={"x-deadline-ms": "90000"})
        assert began_s + seconds <= traced.engine.seen[-1].deadline_s <= time.monotonic() + seconds
    httpx.post(traced.url + path, json=BODIES[path])
    assert traced.engine.seen[-1].deadline_s == 0
    assert httpx.post(traced.url + path, json={**BODIES[path], "deadline_ms": "x"}).status_code == 400


def test_probes_and_scrapes_are_not_exported() -> None:
    class Sink:
        names: ClassVar[list[str]] = []

        def export(self, trace: Trace) -> None:
            self.names.append(trace.name)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        async def send(message: Any) -> None: ...

        tracing = Tracing(app, Sink())  # type: ignore[arg-type]
        for path in ("/metrics", "/livez", "/health", "/generate"):
            for headers in ([], [(b"x-trace", b"1")]):
                scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
                await tracing(scope, send, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert Sink.names == ["GET /generate"] * 2
