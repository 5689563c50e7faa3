"""Bad input to a real server: a 4xx that says what, why, fix; and the server goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from default_server import default_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(base_url=default_server(), timeout=120) as client:
        yield client
        answer = client.post("/v1/completions", json={"prompt": "1, 2, 3,", "max_tokens": 3, "temperature": 0})
        assert answer.status_code == 200  # after all of it
        assert answer.json()["choices"][0]["text"].strip().startswith("4")


def check(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert len(error["message"].split("; ")) >= 2
    assert "Traceback" not in response.text
    return error


@pytest.mark.parametrize(
    "body",
    [
        {"messages": USER, "max_tokens": "ten"},
        {"messages": USER, "max_tokens": -1},
        {"messages": USER, "temperature": -1},
        {"messages": USER, "top_p": 2},
        {"messages": USER, "n": 0},
        {"messages": "Hi"},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "Hi"}]},
        {"messages": USER, "logit_bias": {"49152": 1}},
        {"messages": USER, "stop_token_ids": ["one"]},
        {"messages": USER, "stop_regex": "("},
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"messages": USER, "max_tokens": 10**9},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values(http: httpx.Client, body: dict[str, Any], stream: bool) -> None:
    check(http.post("/v1/chat/completions", json={**body, "stream": stream}))


def test_unknown_model(http: httpx.Client) -> None:
    error = check(http.post("/v1/chat/completions", json={"messages": USER, "model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found"
    assert "SmolLM2-135M-Instruct" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 9000}]}),
        ("/v1/completions", {"prompt": "word " * 9000}),
        ("/v1/completions", {"prompt": [5] * 9000}),
        ("/generate", {"input_ids": [5] * 8192}),
        ("/generate", {"text": "x" * 2_000_000}),
    ],
)
def test_too_long(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    error = check(http.post(path, json=body))
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"] or "8191" in error["message"]


@pytest.mark.parametrize("raw", [b'{"text": "\xff\xfe"}', b"{", b"", b"[1]", b'{"text": "\\ud800"}', b"\x00" * 100])
def test_broken_bytes(http: httpx.Client, raw: bytes) -> None:
    check(http.post("/generate", content=raw))


def test_huge_bodies(http: httpx.Client) -> None:
    check(http.post("/generate", content=b'{"text": "' + b"x" * 17_000_000 + b'"}'), 413)
    assert http.get("/health").status_code == 200
