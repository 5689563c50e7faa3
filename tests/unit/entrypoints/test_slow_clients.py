"""Clients that send nothing, almost nothing, or for ever: each is told so and loses its connection; others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from scripted_server import FakeServer, serving, wait_until

from bough.entrypoints.http.body import Bodies
from bough.entrypoints.http.protocol import LEAST_BYTES_A_SECOND

PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def impatient() -> Iterator[FakeServer]:
    with serving(client_timeout_s=PATIENCE_S) as running:
        yield running


def connect(server: FakeServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=60)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def rest(raw: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    parts = []
    while True:
        try:
            part = raw.recv(65_536)
        except ConnectionResetError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


def check(answer: bytes, status: int, code: str | None) -> None:
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower()
    error = json.loads(content)["error"]
    assert error["code"] == code
    assert len(error["message"].split("; ")) >= 2


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HT",
        b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        b'POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{"text"',
        b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
def test_half_a_request_is_not_waited_for(impatient: FakeServer, sent: bytes) -> None:
    began = time.monotonic()
    with connect(impatient) as raw:
        raw.sendall(sent)
        answer = rest(raw)
        assert PATIENCE_S * 0.8 < time.monotonic() - began < 30
        check(answer, 408, "request_timeout")


def drips_until_cut_off(raw: socket.socket, drop: bytes) -> bool:
    """Sends a little again and again, and never enough for a timeout that begins anew with each. False: to no end."""
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        try:
            raw.sendall(drop)
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_dripping_headers_do_not_help(impatient: FakeServer) -> None:
    """Slowloris: one header line after another, for ever."""
    with connect(impatient) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        assert drips_until_cut_off(raw, b"x-more: please\r\n")


def test_a_body_that_drips_is_cut_off(impatient: FakeServer) -> None:
    with connect(impatient) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n\r\n")
        assert drips_until_cut_off(raw, b" ")


class Clock:
    """A connection's event loop with a time of the test's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = 1000.0
        self._loop = loop

    def time(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def in_loop(server: FakeServer, work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return work()

    return asyncio.run_coroutine_threadsafe(run(), server._loop).result(60)


@pytest.mark.parametrize(
    ("a_second", "cut_after_s"),
    [
        (LEAST_BYTES_A_SECOND, None),
        (4 * LEAST_BYTES_A_SECOND, None),
        (LEAST_BYTES_A_SECOND // 2, 60),
        (0, 30),
        (1, 31),
    ],
)
def test_a_body_has_a_pace(server: FakeServer, a_second: int, cut_after_s: int | None) -> None:
    """Whoever keeps it may take for ever, who stops has the timeout, and who is slower has little more."""
    assert server.config.server.client_timeout_s == 30
    head = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10000000\r\n\r\n "
    others = set(server._server._server.server_state.connections)
    with connect(server) as raw:
        raw.sendall(head)
        (ours,) = among(server, others)
        wait_until(lambda: ours._body_bytes == 1)
        clock = Clock(server._loop)

        def swap() -> None:
            ours.loop, ours._paced_s = clock, clock.now

        in_loop(server, swap)
        while clock.now < 1100 and not ours.transport.is_closing():
            clock.now += 1.0
            raw.sendall(b" " * a_second)
            wait_until(lambda: ours._body_bytes == 1 + (clock.now - 1000) * a_second)
            in_loop(server, ours._look)
        assert (clock.now - 1000 if ours.transport.is_closing() else None) == cut_after_s
        if cut_after_s is not None:
            check(rest(raw), 408, "request_timeout")


def test_a_fast_part_buys_no_long_rest(server: FakeServer) -> None:
    """The credit is never more than the timeout."""
    others = set(server._server._server.server_state.connections)
    with connect(server) as raw:
        raw.sendall(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 10000000\r\n\r\n")
        raw.sendall(b" " * 3_000_000)
        (ours,) = among(server, others)
        wait_until(lambda: ours._body_bytes == 3_000_000)
        clock = Clock(server._loop)

        def swap() -> None:
            ours.loop, ours._paced_s = clock, clock.now

        in_loop(server, swap)
        for late_s, closed in ((29.9, False), (30.1, True)):
            clock.now = 1000.0 + late_s
            in_loop(server, ours._look)
            assert ours.transport.is_closing() == closed


def among(server: FakeServer, others: set[Any]) -> set[Any]:
    """The connections besides those."""
    wait_until(lambda: server._server._server.server_state.connections - others)
    return server._server._server.server_state.connections - others


def test_a_head_without_end_is_refused_before_it_ends(server: FakeServer) -> None:
    with connect(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)  # this end runs no more ahead than that
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        sent = 0
        try:
            while sent < 4_000_000:
                raw.sendall(b"x-filler: " + b"y" * 4000 + b"\r\n")
                sent += 4012
        except OSError:
            pass
        answer = rest(raw)
        assert sent < 3_000_000, "the connection was closed meanwhile"
        if answer:  # the refusal may be lost with the connection
            check(answer, 431, "headers_too_large")


def test_what_is_not_http_gets_the_usual_error(server: FakeServer) -> None:
    with connect(server) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4)
        check(rest(raw), 400, None)


def test_idle_connections_and_long_answers_are_left_alone(impatient: FakeServer) -> None:
    with httpx.Client(base_url=impatient.url) as client:
        assert client.get("/health").status_code == 200
        time.sleep(1.5 * PATIENCE_S)  # between requests a client may rest
        assert client.get("/health").status_code == 200


def test_bodies_that_are_being_received_have_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow uploads hold no more than it together; small requests get through beside them, and what has left frees it."""
    most, part = 1_000_000, 300_000
    head = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 900000\r\n\r\n"
    bodies = Bodies(most)

    def make(given: int) -> Bodies:
        assert given == most
        return bodies

    monkeypatch.setattr("bough.entrypoints.http.app.Bodies", make)
    limits = {"max_body_bytes": 900_000, "max_body_bytes_in_flight": most, "client_timeout_s": 60}
    with serving(**limits) as full, contextlib.ExitStack() as open_ones:
        slow = [open_ones.enter_context(connect(full)) for _ in range(3)]
        for raw in slow:
            raw.sendall(head + b" " * part)
        wait_until(lambda: bodies.num_bytes == 3 * part)
        with connect(full) as raw:
            raw.sendall(head + b" " * part)
            answer = rest(raw)
            check(answer, 503, "bodies_in_flight")
            assert b"retry-after: " in answer
        assert bodies.num_bytes == 3 * part
        assert httpx.post(f"{full.url}/generate", json={"text": "Hi"}, timeout=30).status_code == 200
        slow[0].close()
        wait_until(lambda: bodies.num_bytes == 2 * part)
        whole = {"text": "Hi", "x": "y" * part}
        assert httpx.post(f"{full.url}/generate", json=whole, timeout=30).status_code == 200
        wait_until(lambda: bodies.num_bytes == 2 * part)


def test_many_lazy_clients_do_not_keep_others_out(impatient: FakeServer) -> None:
    lazy = []
    for _ in range(200):
        lazy.append(connect(impatient))
        lazy[-1].sendall(b"POST /generate HTTP/1.1\r\n")
    assert httpx.post(f"{impatient.url}/generate", json={"text": "Hi"}, timeout=30).status_code == 200
    answers = []
    for raw in lazy:
        answers.append(rest(raw))
        raw.close()
    assert all(answer.startswith(b"HTTP/1.1 408") for answer in answers)


def chunked(head: bytes = b"") -> bytes:
    return (
        b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
        + head
        + b'\r\ne\r\n{"text": "Hi"}\r\n0\r\n'
    )


def test_trailers_are_no_headers() -> None:
    """What was checked is what came before the body."""
    with serving(api_key="s3cret") as locked:
        for head, trailer, status in (
            (b"", b"authorization: Bearer s3cret\r\n", 401),
            (b"", b"x-api-key: s3cret\r\n", 401),
            (b"authorization: Bearer s3cret\r\n", b"authorization: Bearer wrong\r\nx-note: fine\r\n", 200),
        ):
            with connect(locked) as raw:
                raw.sendall(chunked(head) + trailer + b"\r\n")
                assert rest(raw).startswith(b"HTTP/1.1 %d " % status), trailer
        assert len(locked.engine.seen) == 1


@pytest.mark.parametrize("filler", [b"x-filler: " + b"y" * 4000 + b"\r\n", b"x-one: " + b"y" * 5000, b"y" * 5000])
def test_trailers_without_end_are_refused(filler: bytes) -> None:
    """Many of them, one that never ends, or bytes that are none: with and without a key, and nothing is kept."""
    with serving(api_key="s3cret") as locked:
        for head in (b"", b"authorization: Bearer s3cret\r\n"):
            with connect(locked) as raw:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
                sent = 0
                with contextlib.suppress(OSError):
                    raw.sendall(chunked(head))
                    while sent < 16_000_000:
                        raw.sendall(filler)
                        sent += len(filler)
                assert sent < 8_000_000, "the connection was closed meanwhile"


def test_a_large_head_in_one_write_is_refused_and_the_connection_closed(server: FakeServer) -> None:
    for head in (
        b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"x-filler: %s\r\n" % (b"y" * 1000) * 80 + b"\r\n",
        b"GET /v1/models?%s HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" % (b"y" * 70_000),
    ):
        with connect(server) as raw:
            raw.sendall(head + b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            answer = rest(raw)
            check(answer, 431, "headers_too_large")
            assert answer.count(b"HTTP/1.1") == 1, "nothing behind it is read"


def test_an_upgrade_is_one_line_in_the_log(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    asked = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13", "sec-websocket-key": "a"}
    with caplog.at_level(logging.INFO, logger="bough"):
        assert httpx.get(f"{server.url}/v1/models", headers=asked).status_code == 200
    assert len([record for record in caplog.records if "protocol" in record.getMessage().lower()]) == 1
    assert "WebSocket" not in caplog.text
