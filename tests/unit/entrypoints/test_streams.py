"""Event streams: early errors are HTTP errors, silence is filled, and a client that goes away takes its request along."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from scripted_server import Answer, FakeServer, endless, serving, wait_until

from bough.core.errors import InvalidRequest
from bough.core.messages import End
from bough.entrypoints.http.errors import error_event
from bough.entrypoints.http.server import Front
from bough.entrypoints.stream import KEEP_ALIVE, Client, ClientGone, send_events


class Wire:
    """Both ends of an ASGI connection."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.client = Client()
        self.spoken = asyncio.Event()
        """Something of the body was sent."""

    async def receive(self) -> dict[str, Any]:
        raise AssertionError("there is no body")

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))
        if message.get("body"):
            self.spoken.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def deliver(wire: Wire, events: AsyncGenerator[bytes, None], keep_alive_s: float = 60) -> None:
    await send_events(
        events,
        headers=[],
        client=wire.client,
        send=wire.send,
        failed=lambda error: error_event(error, "/generate"),
        keep_alive_s=keep_alive_s,
    )


async def test_events_then_the_end() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        yield b"b"

    wire = Wire()
    await deliver(wire, events())
    assert [message["type"] for message in wire.sent] == ["http.response.start", *["http.response.body"] * 3]
    assert wire.body == b"ab"
    assert wire.sent[-1]["more_body"] is False


async def test_an_error_before_the_first_event_is_raised() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise InvalidRequest(what="no")
        yield b""

    wire = Wire()
    with pytest.raises(InvalidRequest):
        await deliver(wire, events())
    assert wire.sent == []


async def test_an_error_later_becomes_an_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise InvalidRequest(what="no")

    wire = Wire()
    await deliver(wire, events())
    assert wire.body.startswith(b'adata: {"error":')
    assert wire.body.endswith(b"data: [DONE]\n\n")


async def test_silence_is_filled_and_opens_the_stream() -> None:
    wire = Wire()

    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.wait_for(wire.spoken.wait(), 30)
        yield b"a"

    await deliver(wire, events(), keep_alive_s=0.03)
    assert wire.sent[0]["type"] == "http.response.start"
    assert wire.body.startswith(KEEP_ALIVE)
    assert wire.body.endswith(b"a")
    assert len([1 for message in wire.sent if message["type"] == "http.response.start"]) == 1


async def test_a_client_that_goes_closes_the_source() -> None:
    closed = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.sleep(60)
        finally:
            closed.set()

    wire = Wire()
    task = asyncio.ensure_future(deliver(wire, events()))
    await asyncio.wait_for(wire.spoken.wait(), 30)
    wire.client.leave()
    await asyncio.wait_for(task, 30)
    assert closed.is_set()


async def test_work_is_cancelled_when_nobody_waits() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    client = Client()
    task = asyncio.ensure_future(client.wait_for(work()))
    await asyncio.wait_for(begun.wait(), 30)
    client.leave()
    with pytest.raises(ClientGone):
        await asyncio.wait_for(task, 30)
    assert cancelled.is_set()


async def test_a_client_that_goes_in_the_moment_of_the_answer_ends_nothing_else() -> None:
    client = Client()
    loop = asyncio.get_running_loop()
    answered = loop.create_future()

    async def work() -> int:
        return int(await answered)

    def both() -> None:
        answered.set_result(7)
        client.leave()

    loop.call_later(0.01, both)
    with pytest.raises(ClientGone):
        await client.wait_for(work())
    await asyncio.sleep(0.01)  # what a handler does next: it is not cancelled for a client that it needs no more


async def test_nothing_is_begun_for_a_client_that_has_gone() -> None:
    client = Client()
    client.leave()
    with pytest.raises(ClientGone):
        await client.wait_for(asyncio.sleep(60))


async def test_whoever_cancels_the_work_cancels_it_though_the_client_goes_too() -> None:
    client = Client()
    task = asyncio.ensure_future(client.wait_for(asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    task.cancel()
    client.leave()
    with pytest.raises(asyncio.CancelledError):
        await task


def leave_early(running: FakeServer, path: str, body: dict[str, Any], n: int) -> None:
    """Posts, and closes the connection once the engine is at it: in the middle of the stream, if there is one."""
    content = json.dumps(body).encode()
    address = httpx.URL(running.url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as raw:
        raw.sendall(f"POST {path} HTTP/1.1\r\nhost: {address.host}\r\ncontent-length: {len(content)}\r\n\r\n".encode())
        raw.sendall(content)
        wait_until(lambda: len(running.engine.seen) == n)
        if body["stream"]:
            assert raw.recv(10).startswith(b"HTTP/1.1 2")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_disconnecting_aborts(path: str, stream: bool, n: int) -> None:
    body: dict[str, Any] = {"stream": stream, "n": n}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "a"}]
    elif "v1" in path:
        body["prompt"] = "a"
    else:
        body = {"stream": stream, "text": "a", "sampling_params": {"n": n}}
    with serving(endless()) as running:
        leave_early(running, path, body, n)
        wait_until(lambda: running.service.engine_client.num_live == running.service.admission.requests == 0)
        assert len(running.engine.aborted) == n


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_an_answer_that_ends_badly_ends_the_others_of_its_batch(path: str) -> None:
    bad = Answer(pieces=[], end=End(reason="error", message="no luck", status=500, code="request_failed"))
    with serving(lambda _, prompt: bad if prompt == "b" else endless()) as running:
        field = "prompt" if "v1" in path else "text"
        reply = httpx.post(f"{running.url}{path}", json={field: ["a", "b", "c"]}, timeout=60)
        assert reply.status_code == 500
        assert "no luck" in reply.text
        assert running.service.engine_client.num_live == running.service.admission.requests == 0
        assert len(running.engine.aborted) == 2


def test_a_client_with_a_long_body_is_seen_to_leave() -> None:
    with serving(endless()) as running:
        leave_early(
            running, "/generate", {"stream": False, "text": "word " * 500, "rid": "a", "extra": "x" * 500_000}, 1
        )
        wait_until(lambda: running.service.engine_client.num_live == 0)
        assert len(running.engine.aborted) == 1


def test_a_client_that_leaves_in_the_middle_of_its_body(server: FakeServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
    assert httpx.get(f"{server.url}/health").status_code == 200


async def test_the_front_answers_while_the_engine_starts() -> None:
    front = Front()

    async def get(path: str) -> tuple[int, bytes]:
        wire = Wire()
        scope = {"type": "http", "path": path, "method": "GET", "headers": []}
        await front(scope, wire.receive, wire.send)
        return wire.sent[0]["status"], wire.body

    assert (await get("/livez"))[0] == 200
    for path in ("/readyz", "/health", "/v1/models"):
        status, body = await get(path)
        assert status == 503
        assert b"starting" in body
