"""Whatever is sent to any route: never a 5xx, and nothing of the server's inside in any answer."""

from __future__ import annotations

import json
import os
import re
import socket
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from scripted_server import FakeServer, serving

from bough.entrypoints.http.app import ROUTES, RouteSpec

LEAKS = re.compile(
    r"0x[0-9a-f]{6,}|/home/|/root/|/usr/|/tmp/|/work/|site-packages|Traceback|\.py\b|line \d+, in |object at |msgspec|numpy"
)
"""Paths, addresses and traces."""

EXAMPLES = int(os.environ.get("BOUGH_FUZZ_EXAMPLES", "12"))
"""Bodies a route. Set it to some hundreds after a change of how bodies are read."""

ROUTE_CASES = [
    pytest.param(spec, path, method, id=f"{method} {path}")
    for spec in ROUTES
    for path in spec.paths
    for method in spec.methods
    if method != "HEAD"
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        serving(admin_api_key="boss", max_body_bytes=100_000) as running,
        httpx.Client(base_url=running.url, timeout=60, headers={"authorization": "Bearer boss"}) as made,
    ):
        yield made
        assert made.post("/generate", json={"text": "Hi"}).status_code == 200  # after all of it


def check(response: httpx.Response, *, echoes: str = "") -> None:
    assert response.status_code < 500 or response.status_code == 501, response.text
    if response.status_code >= 400:
        found = LEAKS.search(response.text)
        assert found is None or found[0] in echoes, response.text
        assert "error" in response.text
    for name, value in response.headers.items():
        assert not re.search(r"[\r\n]", value), name


# -- bodies that look almost right ------------------------------------------------------------------------------------

_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=30),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 1e308, "", "auto", "\x00", "\ud7ff", "a" * 3000, "../../etc/passwd",
                     "{{ 7*7 }}", "http://169.254.169.254/", "'; --", "%s%n", "<script>"]),
)  # fmt: skip
_JSON: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "text": st.just("Hi"),
    "prompt": st.just("Hi"),
    "input": st.just("Hi"),
    "messages": st.just([{"role": "user", "content": "Hi"}]),
    "model": st.just("fake"),
    "max_tokens": st.integers(1, 4),
    "sampling_params": st.just({"max_new_tokens": 2}),
    "tokens": st.just([72, 105]),
    "query": st.just("Hi"),
    "documents": st.just(["a"]),
    "stream": st.booleans(),
}
_SHAPED: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(
        st.fixed_dictionaries({}, optional={
            "role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "x"]) | _SCALARS,
            "content": st.text(max_size=20) | st.lists(st.fixed_dictionaries({}, optional={
                "type": st.sampled_from(["text", "image_url", "input_audio", "x"]), "text": _SCALARS,
                "image_url": _JSON}), max_size=3) | _JSON,
            "tool_calls": _JSON, "tool_call_id": _SCALARS, "name": _SCALARS,
        }), max_size=4),
    "tools": st.lists(st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["function", "x"]), "function": st.fixed_dictionaries({}, optional={
            "name": _SCALARS, "parameters": _JSON, "description": _SCALARS})}), max_size=3),
    "response_format": st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["json_object", "json_schema", "text", "x"]), "json_schema": _JSON}),
    "sampling_params": st.dictionaries(
        st.sampled_from(["temperature", "top_p", "top_k", "n", "stop", "stop_regex", "regex", "json_schema", "ebnf",
                         "logit_bias", "max_new_tokens", "min_new_tokens", "seed", "bad_words", "stop_token_ids"]),
        _JSON, max_size=4),
    "stop": st.lists(st.text(max_size=5), max_size=40) | _JSON,
    "logit_bias": st.dictionaries(st.text(max_size=6) | st.integers(-5, 300).map(str), _SCALARS, max_size=5),
    "input_ids": st.lists(st.integers(-5, 400), max_size=8) | _JSON,
}  # fmt: skip


def body_of(kind: type[msgspec.Struct] | None) -> st.SearchStrategy[Any]:
    if kind is None:
        return _JSON
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    wild = st.dictionaries(st.sampled_from(sorted(fields)), _JSON, max_size=5)
    near = st.fixed_dictionaries({name: _LIKELY[name] for name in fields if name in _LIKELY})
    odd = st.fixed_dictionaries({}, optional={name: _SHAPED[name] for name in fields if name in _SHAPED})
    return st.tuples(near, odd, wild, st.booleans()).map(
        lambda parts: {**parts[0], **parts[1], **parts[2]} if parts[3] else {**parts[1], **parts[2]}
    )


def send(client: httpx.Client, spec: RouteSpec, path: str, method: str, body: Any, query: str = "") -> httpx.Response:
    filled = re.sub(r"\{[^}]*\}", "x", path)
    content = b"" if body is None else json.dumps(body).encode("utf-8", "surrogatepass")
    return client.request(
        method, filled + query, content=content if method in ("POST", "PUT") else None,
        headers={"content-type": "application/json"},
    )  # fmt: skip


@pytest.mark.parametrize(("spec", "path", "method"), ROUTE_CASES)
def test_no_body_is_too_strange(client: httpx.Client, spec: RouteSpec, path: str, method: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(body=body_of(spec.body), query=st.sampled_from(["", "?include=x", "?format=%00", "?timeout=-1", "?a=%ff&b"]))
    def run(body: Any, query: str) -> None:
        response = send(client, spec, path, method, body, query)
        check(response, echoes=json.dumps(body))

    run()


RAW = [
    b"", b"\x00", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a":' * 2000, b"[" * 50_000, b'{"text": 1e999}',
    b'{"text": "\\ud800"}', b"a=b&c=d", b"0" * 90_000, b"x" * 150_000,
]  # fmt: skip


@pytest.mark.parametrize(("spec", "path", "method"), ROUTE_CASES)
def test_raw_bytes(client: httpx.Client, spec: RouteSpec, path: str, method: str) -> None:
    for raw in RAW if method != "GET" else RAW[:1]:  # a GET has no body
        response = client.request(method, re.sub(r"\{[^}]*\}", "x", path), content=raw if method != "GET" else None)
        try:
            check(response)
        except AssertionError as error:
            error.add_note(f"for {raw[:20]!r}, {len(raw)} bytes")
            raise
        if spec.body is not None and len(raw) > 100_000 and "multipart" not in spec.about:
            assert response.status_code in (400, 413, 200), path


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//", "/v1//models", "/v1/models/%00", "/v1/models/" + "a" * 8000,
     "/v1/models/..%2f..%2fetc", "/ui/../../pyproject.toml", "/ui/%2e%2e%2f%2e%2e%2fapp.py", "/docs/../metrics", "/\x7f",
     "/v1/models/<script>", "/generate/", "/GENERATE", "/v1/chat/completions;x=1", "/openapi.json?x=/etc/passwd"],
)  # fmt: skip
def test_strange_paths(client: httpx.Client, path: str) -> None:
    """As they are: no client library tidies them up."""
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=60) as raw:
        head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer boss\r\nconnection: close\r\n\r\n"
        raw.sendall(head.encode("latin-1"))
        answer = b""
        while part := raw.recv(65_536):
            answer += part
    status, text = int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode()
    check(httpx.Response(status, text=text), echoes=path)
    assert "root:" not in text
    assert "[project]" not in text
    assert "import " not in text


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    name=st.sampled_from(["host", "origin", "authorization", "content-type", "x-trace", "traceparent", "x-deadline-ms",
                          "x-request-id", "accept", "content-encoding", "x-api-key", "range", "expect", "x-forwarded-for"]),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=80),
)  # fmt: skip
def test_strange_headers(client: httpx.Client, name: str, value: str) -> None:
    for path in ("/v1/models", "/health"):
        response = client.get(path, headers=[(name.encode(), value.strip().encode("latin-1"))])
        check(response, echoes=value)


def test_every_route_was_tried() -> None:
    hints = typing.get_type_hints(RouteSpec)
    assert "body" in hints
    assert len(ROUTE_CASES) >= sum(len(spec.paths) for spec in ROUTES)


@pytest.mark.parametrize("server", [None], ids=["scripted"])
def test_the_leak_search_finds_leaks(server: FakeServer | None) -> None:
    for leak in ("at 0x7f00deadbeef", "/root/x", 'File "a.py", line 3, in f', "<object at 0x1>"):
        assert LEAKS.search(leak)
