"""Whatever is sent to the other dialects' routes, the answer is a 4xx in their shape, and the server goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from scripted_server import FakeServer, serving

LEAKS = re.compile(r"0x[0-9a-f]{6,}|/home/|/root/|/tmp/|Traceback|\.py\b|site-packages")
USER = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "fake", "max_tokens": 5, "messages": USER},
    "/v1/messages/count_tokens": {"model": "fake", "messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"model": "fake", "messages": USER},
    "/api/generate": {"model": "fake", "prompt": "Hi"},
    "/api/show": {"model": "fake"},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions"},
    "/open_session": {},
    "/close_session": {"session_id": "x"},
    "/generate": {"text": "Hi", "session_params": {"id": "x"}},
}
"""A good body of each (or one that is refused for what it names)."""
BROKEN = [
    b"", b"   ", b"{", b"null", b"[]", b'"x"', b"5", b'{"a": NaN}', b'{"a": "\xff\xfe"}', b"\x00\x01", b"[" * 100_000,
    b'{"messages": "\\ud800"}', b'{"input": ' + b"[" * 100 + b"]" * 100 + b"}", b'{"a": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory: Path = tmp_path_factory.mktemp("batches")
    with serving(batch_dir=str(directory)) as running, httpx.Client(base_url=running.url, timeout=60) as made:
        yield made


def check_error(path: str, response: httpx.Response) -> None:
    body = response.json()
    assert not LEAKS.search(response.text)
    if path.startswith("/v1/messages"):
        assert (set(body), body["type"]) == ({"type", "error"}, "error")
        assert set(body["error"]) == {"type", "message"}
    elif path.startswith("/api/"):
        assert set(body) == {"error"}
        assert body["error"]
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("raw", BROKEN)
def test_broken_bodies(client: httpx.Client, path: str, raw: bytes) -> None:
    response = client.post(path, content=raw)
    assert response.status_code == 400, response.text
    check_error(path, response)


def test_large_bodies() -> None:
    with serving(max_body_bytes=10_000) as running:
        for path in ROUTES:
            response = httpx.post(running.url + path, content=b"x" * 10_001)
            assert response.status_code in (400, 413)  # 400: no --batch-dir
            check_error(path, response)


@pytest.mark.parametrize(
    "path", [path for path in ROUTES if path not in ("/v1/batches", "/close_session", "/generate")]
)
def test_unknown_fields_warn_and_strict_refuses(path: str, client: httpx.Client) -> None:
    body = {**ROUTES[path], "zzz": 1}
    assert client.post(path, json=body).headers["x-bough-ignored-fields"] == "zzz"
    with serving(strict_api=True) as strict:
        refused = httpx.post(strict.url + path, json=body)
        assert refused.status_code == 400
        check_error(path, refused)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
BLOCK = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "input_text", "message", "function_call",
                                 "function_call_output", "reasoning", "item_reference", "image", "function"]),
        "text": JSON, "content": JSON, "id": JSON, "call_id": JSON, "name": JSON, "input": JSON, "role": JSON,
        "arguments": JSON, "output": JSON, "thinking": JSON, "tool_use_id": JSON, "function": JSON, "images": JSON,
    },
)  # fmt: skip
FIELDS = st.sampled_from(
    ["model", "messages", "input", "prompt", "system", "tools", "tool_choice", "thinking", "stop_sequences", "stream",
     "max_tokens", "temperature", "top_k", "text", "reasoning", "previous_response_id", "background", "store", "metadata",
     "include", "format", "options", "think", "suffix", "raw", "logprobs", "output_config", "instructions", "truncation",
     "input_file_id", "endpoint", "session_id", "timeout", "session_params", "capacity_of_str_len", "name"]
)  # fmt: skip
VALUES = (
    JSON | st.lists(BLOCK, max_size=3) | st.lists(st.fixed_dictionaries({"role": JSON, "content": st.lists(BLOCK)}))
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(list(ROUTES)), body=st.dictionaries(FIELDS, VALUES, max_size=4), real=st.booleans())
def test_no_body_breaks_the_server(client: httpx.Client, path: str, body: dict[str, Any], real: bool) -> None:
    response = client.post(path, content=json.dumps({**ROUTES[path], **body} if real else body).encode())
    assert response.status_code < 500, response.text
    assert not LEAKS.search(response.text)
    if response.status_code >= 400:
        check_error(path, response)


def test_the_server_is_still_there(client: httpx.Client, server: FakeServer) -> None:
    assert client.get("/health").status_code == 200
