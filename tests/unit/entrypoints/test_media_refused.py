"""A model that reads text is asked about a picture: every dialect says so, before anything is fetched."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import FakeServer


@pytest.fixture(scope="module")
def trap() -> Iterator[tuple[str, list[str]]]:
    """A web server that nobody must call."""
    callers: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            callers.append("somebody")
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/cat.png", callers
    listener.close()


def openai(url: str, kind: str = "image_url") -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, kind: {"url": url}}
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, part]}],
    }


DIALECTS = {
    "chat": ("/v1/chat/completions", openai),
    "chat, stream": ("/v1/chat/completions", lambda url: {**openai(url), "stream": True}),
    "chat, video": ("/v1/chat/completions", lambda url: openai(url, "video_url")),
    "chat, audio": ("/v1/chat/completions", lambda url: openai(url, "input_audio")),
    "invocations": ("/invocations", openai),
    "responses": (
        "/v1/responses",
        lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    ),
    "responses, tool": (
        "/v1/responses",
        lambda url: {
            "input": [
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": url}]},
            ]
        },
    ),
    "anthropic": (
        "/v1/messages",
        lambda url: {
            "model": "fake",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
        },
    ),
    "anthropic, counting": (
        "/v1/messages/count_tokens",
        lambda url: {
            "model": "fake",
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
        },
    ),
    "ollama chat": (
        "/api/chat",
        lambda url: {"model": "fake", "messages": [{"role": "user", "content": "x", "images": [url]}]},
    ),
    "ollama generate": ("/api/generate", lambda url: {"model": "fake", "prompt": "x", "images": [url]}),
    "native": ("/generate", lambda url: {"text": "x", "image_data": url}),
    "native, list": ("/generate", lambda url: {"text": ["x", "y"], "image_data": [[url], [url]]}),
    "native, video": ("/generate", lambda url: {"text": "x", "video_data": [url]}),
    "native, audio": ("/generate", lambda url: {"text": "x", "audio_data": url}),
    "completions": ("/v1/completions", lambda url: {"model": "fake", "prompt": "x", "image_data": url}),
    "tokenize": ("/tokenize", openai),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_picture_for_a_model_that_reads_text(server: FakeServer, trap: tuple[str, list[str]], dialect: str) -> None:
    url, callers = trap
    path, body = DIALECTS[dialect]
    before = len(server.engine.seen)
    response = httpx.post(server.url + path, json=body(url))
    assert response.status_code == 400, response.text
    assert "text only" in response.text or "takes media" in response.text, response.text
    assert url not in response.text
    assert callers == []
    assert len(server.engine.seen) == before, "nothing was computed"
