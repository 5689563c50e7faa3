"""Several requests on one connection, and what is left of those that end badly."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import Answer, FakeServer, endless, serving, wait_until

from bough.core.messages import End
from bough.engine_client import Request
from tests.covers import cover


def request(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def connect(server: FakeServer) -> socket.socket:
    address = httpx.URL(server.url)
    return socket.create_connection((address.host, address.port or 80), timeout=60)


@pytest.mark.parametrize("later", [False, True], ids=["in one packet", "later"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_has_asked_again_and_leaves_frees_what_it_had(stream: bool, later: bool) -> None:
    asked = request({"text": "a", "stream": stream})
    with serving(endless()) as server:
        with connect(server) as connection:
            connection.sendall(asked if later else 2 * asked)
            wait_until(lambda: server.engine.seen)
            if later:
                connection.sendall(asked)
                time.sleep(0.05)
        wait_until(lambda: not server.service.engine_client.num_live, within_s=10)


def test_a_request_that_is_not_read_yet_is_not_late() -> None:
    """The server reads no further while it streams an answer, and writes nothing of another one into it."""
    more = request({"text": "b", "x": "y" * 1_500_000})
    with serving(endless(), client_timeout_s=1) as server, connect(server) as connection:
        connection.sendall(request({"text": "a", "stream": True}))
        connection.settimeout(0.05)
        sent, got, until_s = 0, b"", time.monotonic() + 2.5
        while time.monotonic() < until_s:
            try:
                sent += connection.send(more[sent : sent + 65_536]) if sent < len(more) else 0
            except TimeoutError:
                pass
            try:
                piece = connection.recv(65_536)
                assert piece, "closed"
                got += piece
            except TimeoutError:
                pass
    assert got.startswith(b"HTTP/1.1 200")
    assert got.count(b"HTTP/1.1 ") == 1
    assert got.count(b"data: ") > 50


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/generate", {"text": "a"}),
    "two": ("/generate", {"text": ["a", "b"]}),
    "completions": ("/v1/completions", {"prompt": "a"}),
    "chat": ("/v1/chat/completions", CHAT),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"input": "a"}),
    "ollama": ("/api/generate", {"model": "fake", "prompt": "a"}),
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(("asked", "stream"), cover(BODIES, {"whole": False, "stream": True}))
def test_a_request_that_ends_badly_is_gone_at_once(asked: tuple[str, dict[str, Any]], stream: bool) -> None:
    """Without a collection: an error that holds the frames that hold it would keep prompts by the hundred."""
    path, fields = asked

    def held() -> list[Request]:
        return [each for each in gc.get_objects() if type(each) is Request]

    bad = Answer(pieces=[], end=End(reason="error", message="too late", status=504, code="deadline_exceeded"))
    with serving(bad) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        before = len(held())
        for _ in range(3):
            assert "too late" in client.post(path, json={**fields, "stream": stream}).text
        wait_until(lambda: len(held()) <= before, within_s=5)
