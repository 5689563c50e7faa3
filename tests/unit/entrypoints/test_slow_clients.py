"""Clients that send nothing, almost nothing, or for ever: each is told so and loses its connection; others are served."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import FakeServer, serving, wait_until

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


@pytest.mark.parametrize(("a_second", "status"), [(LEAST_BYTES_A_SECOND, 200), (LEAST_BYTES_A_SECOND - 1, 408)])
def test_a_slow_but_steady_upload_is_taken(server: FakeServer, a_second: int, status: int) -> None:
    """Three times the patience in all. Whenever it ends, another such part has come; the clock is the test's."""
    part = round(a_second * server.config.server.client_timeout_s)
    text = json.dumps({"text": "x" * 3000, "sampling_params": {"max_new_tokens": 2}}).encode().ljust(3 * part + 1)
    head = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(text)
    others = set(server._server._server.server_state.connections)
    with connect(server) as raw:
        raw.sendall(head)
        (ours,) = among(server, others)
        for at in range(0, 3 * part, part):
            raw.sendall(text[at : at + part])
            wait_until(lambda: ours._body_bytes == part or ours.transport.is_closing())
            server._loop.call_soon_threadsafe(ours._look)
            wait_until(lambda: ours._body_bytes == 0 or ours.transport.is_closing())
            if ours.transport.is_closing():
                break
        else:
            raw.sendall(text[3 * part :])
        assert rest(raw).startswith(b"HTTP/1.1 %d " % status)


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
