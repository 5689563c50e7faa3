"""The API workers and the detokenizer alone, with an engine that computes nothing: requests per second, streamed tokens
per second.

    bough bench frontend --seconds 5

Beside it, in the same run and with the same clients, a bare uvicorn: it echoes a body, or sends as many events as a
stream has tokens. This shows which share of its rate remains when requests are checked, tokenised, sent through three
processes, detokenised and rendered. The load generator runs on the same machine; what one request and one token cost
the API process in CPU time does not depend on that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection as Pipe
from typing import Any, TypeVar

import msgspec
import psutil

from bough.bench.http_stream import StreamingClient
from bough.config.command_line import CommandParser
from bough.config.server_args import build_config
from bough.core.errors import BoughError

FLOORS = {"requests_per_s": 700.0, "streamed_tokens_per_s": 25_000.0, "share_of_echoed_stream": 1 / 3}
"""Minimum rates of the front end on two cores, beside its load generator."""

T = TypeVar("T")
_PROMPT = (
    "The quick brown fox jumps over the lazy dog and then it sleeps in the warm sun until the evening comes again. "
)
_START_S = 120.0
_EVENT = b"data: " + b'{"text": " again"}'.ljust(300) + b"\n\n"
"""About as long as an event of a short answer."""


# -- servers, each a process of its own -----------------------------------------------------------


def _serve_echo(pipe: Pipe) -> None:
    """A bare uvicorn that returns the body it reads, or one event per token."""
    import uvicorn

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/stream":
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            for _ in range(int(scope["query_string"])):
                await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(2048)
    config = uvicorn.Config(echo, http="httptools", ws="none", lifespan="off", log_level="error", access_log=False)
    pipe.send(sock.getsockname()[1])
    _run(uvicorn.Server(config).serve([sock]))


def _serve_bough(pipe: Pipe, settings: dict[str, Any], tick_s: float) -> None:
    """bough's own server, with the fake engine in the engine's place."""
    from bough.entrypoints.http.sockets import bind
    from bough.entrypoints.http.worker import Worker
    from bough.launch import Programs, start

    config = build_config(**settings)
    sock = bind("127.0.0.1", 0)
    programs = Programs(engine=("-m", "bough.bench.fake_engine", str(tick_s)))

    async def serve() -> None:
        with start(config, num_api_workers=1, programs=programs) as running:
            worker = Worker(running.config, running.endpoints, 0, sock)
            ready = asyncio.to_thread(running.wait_ready, None, _START_S)
            await worker.run(ready, lambda _: pipe.send(sock.getsockname()[1]), warm_up=True)

    _run(serve())


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class ServedFrontend:
    """A server process for the length of a `with`."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._ours, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(theirs, *arguments))

    def __enter__(self) -> ServedFrontend:
        self._process.start()
        if not self._ours.poll(_START_S):
            self.__exit__()
            raise BoughError(what="the server to be measured did not start", why="see the lines above")
        self.url = f"http://127.0.0.1:{self._ours.recv()}"
        self._cpu = psutil.Process(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def cpu_s(self) -> float:
        """CPU time of the API process so far."""
        times = self._cpu.cpu_times()
        return float(times.user + times.system)


# -- load -----------------------------------------------------------------------------------------


class Tally:
    """Counts of responses."""

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.bytes = 0
        self.events = 0

    def data(self, piece: bytes) -> None:
        self.bytes += len(piece)
        self.events += piece.count(b"data: ")


async def load(url: str, path: str, body: bytes, *, clients: int, seconds: float) -> tuple[Tally, float]:
    """Runs `clients` clients that send one request after the other for `seconds`. Returns the counts and the time
    taken."""
    tally = Tally()
    client = StreamingClient(url)
    give_up = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < give_up:
            status = await client.request("POST", path, body, tally.data)
            tally.requests += 1
            tally.failed += status != 200

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(clients)))
    client.close()
    return tally, time.monotonic() - began


def _measured(
    server: ServedFrontend, path: str, fields: dict[str, Any], *, clients: int, seconds: float
) -> tuple[Tally, float, float]:
    """Tally, wall seconds and the API process's CPU seconds; a short run goes ahead, to warm up."""
    body = msgspec.json.encode(fields)
    _run(load(server.url, path, body, clients=min(clients, 8), seconds=min(1.0, seconds)))
    before = server.cpu_s()
    tally, wall = _run(load(server.url, path, body, clients=clients, seconds=seconds))
    if tally.failed or not tally.requests:
        raise BoughError(
            what=f"{tally.failed} of {tally.requests} requests to {path} failed",
            why="the front end refused or broke under the load",
            fix="try fewer --clients",
        )
    return tally, wall, server.cpu_s() - before


def measure(
    *, seconds: float = 5.0, clients: int = 64, streams: int = 128, tokens: int = 256, tick_ms: float = 2.0,
    path: str = "/generate", dp_size: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Runs everything; numbers by name."""
    asked = _fields(path, tokens=16, stream=False)
    with ServedFrontend(_serve_echo) as echo:
        tally, wall, cpu = _measured(echo, "/", asked, clients=clients, seconds=seconds)
        echo_rate, per_echo = tally.requests / wall, cpu / tally.requests
        tally, wall, _ = _measured(echo, f"/stream?{tokens}", {}, clients=streams, seconds=seconds)
        echo_events = tally.events / wall
    settings = {"log_level": "warning", "max_queued_requests": 100_000, "dp_size": dp_size}
    with ServedFrontend(_serve_bough, settings, tick_ms / 1e3) as server:
        tally, wall, cpu = _measured(server, path, asked, clients=clients, seconds=seconds)
        rate, per_request = tally.requests / wall, cpu / tally.requests
        request_fields = _fields(path, tokens=tokens, stream=True)
        tally, wall, cpu = _measured(server, path, request_fields, clients=streams, seconds=seconds)
        streamed = tally.requests * tokens
    pace = streamed / wall
    return {
        "path": path,
        "dp_size": dp_size,
        "clients": clients,
        "streams": streams,
        "cores": psutil.cpu_count(),
        "echo_requests_per_s": round(echo_rate, 1),
        "requests_per_s": round(rate, 1),
        "share_of_echo": round(rate / echo_rate, 3),
        "echo_cpu_us_per_request": round(1e6 * per_echo, 1),
        "api_cpu_us_per_request": round(1e6 * per_request, 1),
        "echo_events_per_s": round(echo_events, 1),
        "streamed_tokens_per_s": round(pace, 1),
        "share_of_echoed_stream": round(pace / echo_events, 3),
        "events_per_s": round(tally.events / wall, 1),
        "api_cpu_us_per_streamed_token": round(1e6 * cpu / streamed, 2),
    }


def _fields(path: str, *, tokens: int, stream: bool) -> dict[str, Any]:
    if path == "/generate":
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"text": _PROMPT, "sampling_params": sampling, "stream": stream}
    shared = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    if path == "/v1/completions":
        return {"prompt": _PROMPT, **shared}
    return {"messages": [{"role": "user", "content": _PROMPT}], **shared}


def verdict(numbers: dict[str, Any]) -> list[str]:
    """The rates below their minimum, as text."""
    return [
        f"{name} is {numbers[name]:g}, its floor {floor:.4g}" for name, floor in FLOORS.items() if numbers[name] < floor
    ]


def main() -> int:
    parser = CommandParser(
        prog="bough bench frontend", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per measurement (%(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="clients that wait for whole answers (%(default)s)")
    parser.add_argument("--streams", type=int, default=128, help="concurrent streams (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per stream (%(default)s)")
    parser.add_argument(
        "--tick-ms", type=float, default=2.0, help="milliseconds between tokens of the fake engine (%(default)s)"
    )
    parser.add_argument(
        "--path", default="/generate", choices=["/generate", "/v1/completions", "/v1/chat/completions"], help="route"
    )
    parser.add_argument("--dp-size", type=int, default=1, help="replicas of the fake engine (%(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 below the floors")
    options = parser.parse_args()
    numbers = measure(
        seconds=options.seconds, clients=options.clients, streams=options.streams, tokens=options.tokens,
        tick_ms=options.tick_ms, path=options.path, dp_size=options.dp_size,
    )  # fmt: skip
    print(json.dumps(numbers, indent=1))
    missed = verdict(numbers)
    for line in missed:
        print(line)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
