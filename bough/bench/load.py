"""Sends requests at their scheduled times and records the results: in this process, or divided among several.

`drive` starts `python -m bough.bench.load` for each of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from bough.bench.dialects import AnswerProgress, Dialect
from bough.bench.http_stream import StreamingClient
from bough.core.errors import BoughError

T = TypeVar("T")

_TICK_S = 0.005
_LEAD_S = 0.05
"""Seconds between the start signal and the start, so that it reaches all client processes."""


class BenchRequest(Struct):
    """A request, ready to be sent."""

    at_s: float
    """Seconds from the start at which it is sent."""
    body: msgspec.Raw
    input_len: int


class RequestResult(Struct):
    """The result of a request. Times are relative to the start of the run; `gaps_s` are those between tokens after the
    first."""

    due_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: list[float] = []
    arrivals: list[tuple[float, int]] = []
    """When tokens arrived, and how many at once."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class ClientShare(Struct):
    """What one client process does."""

    base_url: str
    headers: dict[str, str]
    dialect: Dialect
    calls: list[BenchRequest]
    max_concurrency: int
    """0: no limit."""
    begin_s: float
    """On this machine's monotonic clock; 0: now."""


class ShareResult(Struct):
    """The results of one client process. `busy`: its CPU seconds per second; `lag_ms`: how late its timers fired."""

    outcomes: list[RequestResult]
    busy: float
    lag_ms: float
    wall_s: float


def arrivals(count: int, rate: float, kind: str, seed: int) -> list[float]:
    """When each request is due. `rate` per second (infinite: all at once), `kind` is poisson or fixed."""
    if math.isinf(rate):
        return [0.0] * count
    if kind == "fixed":
        return [at / rate for at in range(count)]
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def run_share(share: ClientShare) -> ShareResult:
    """Sends a share's calls and waits for their ends."""
    client = StreamingClient(share.base_url, share.headers)
    places = asyncio.Semaphore(share.max_concurrency) if share.max_concurrency else None
    begin_s = share.begin_s or time.monotonic()
    await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
    lags: list[float] = []
    ticking = asyncio.create_task(_tick(lags))
    cpu_s, wall_s = time.process_time(), time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_ask(client, share.dialect, call, places, begin_s)) for call in share.calls]
    finally:
        ticking.cancel()
        client.close()
    wall_s = time.monotonic() - wall_s
    return ShareResult(
        outcomes=[task.result() for task in tasks],
        busy=(time.process_time() - cpu_s) / max(wall_s, 1e-9),
        lag_ms=1000 * float(np.percentile(lags, 90)) if lags else 0.0,
        wall_s=wall_s,
    )


async def _tick(lags: list[float]) -> None:
    """Measures how late a timer fires: what this process's own work adds to every time it takes."""
    while True:
        due = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lags.append(max(0.0, time.monotonic() - due))


async def _ask(
    client: StreamingClient, dialect: Dialect, call: BenchRequest, places: asyncio.Semaphore | None, begin_s: float
) -> RequestResult:
    delay_s = begin_s + call.at_s - time.monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
    async with places or contextlib.nullcontext():
        reading = Reading(dialect, RequestResult(due_s=call.at_s), begin_s)
        reading.outcome.sent_s = time.monotonic() - begin_s
        try:
            status = await client.request("POST", dialect.path, bytes(call.body), reading.feed)
            reading.end(status)
        except (OSError, TimeoutError) as error:
            reading.outcome.error = f"{type(error).__name__}: {error}"
    outcome = reading.outcome
    outcome.ended_s = outcome.ended_s or time.monotonic() - begin_s
    outcome.input_tokens = outcome.input_tokens or call.input_len
    return outcome


class Reading:
    """Parses an answer's bytes as they arrive and records the arrival times of tokens."""

    def __init__(self, dialect: Dialect, outcome: RequestResult, begin_s: float) -> None:
        self.outcome = outcome
        self._dialect = dialect
        self._begin_s = begin_s
        self._rest = b""
        self._progress = AnswerProgress()
        self._last_s = 0.0

    def feed(self, data: bytes) -> None:
        self._rest += data
        if not self._dialect.stream:
            return
        now_s = time.monotonic() - self._begin_s
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and not event.endswith(b"[DONE]"):
                self._note(event[5:], now_s)

    def end(self, status: int) -> None:
        now_s = time.monotonic() - self._begin_s
        if status != 200:
            self._progress.error = f"status {status}: {self._rest.decode(errors='replace')[:300]}"
        elif not self._dialect.stream:
            self._dialect.read(self._rest, self._progress)
        outcome, progress = self.outcome, self._progress
        outcome.ended_s = now_s
        outcome.input_tokens = progress.prompt_tokens
        outcome.output_tokens = progress.output_tokens
        outcome.cached_tokens = progress.cached_tokens
        outcome.error = progress.error or ("" if progress.output_tokens else "the answer has no tokens")

    def _note(self, event: bytes, now_s: float) -> None:
        new = self._dialect.read(event, self._progress)
        if new <= 0:
            return
        if not self.outcome.first_s:
            self.outcome.first_s = now_s
        else:
            self.outcome.gaps_s += [(now_s - self._last_s) / new] * new
        self.outcome.arrivals.append((now_s, new))
        self._last_s = now_s


def drive(share: ClientShare, processes: int = 1) -> ShareResult:
    """Runs a share, in this process or divided among several. Raises `BoughError` if one of them fails."""
    if processes == 1:
        return run_async(run_share(share))
    caps = _divide(share.max_concurrency, processes)
    shares = [
        msgspec.structs.replace(share, calls=share.calls[number::processes], max_concurrency=cap)
        for number, cap in enumerate(caps)
    ]
    children = [_Child(each) for each in shares]
    for child in children:
        child.wait_ready()
    begin_s = time.monotonic() + _LEAD_S
    for child in children:
        child.begin(begin_s)
    return _merged([child.result() for child in children])


class _Child:
    """A client process. It reports `ready` when it has its share, and then waits for the start signal."""

    def __init__(self, share: ClientShare) -> None:
        command = [sys.executable, "-m", "bough.bench.load"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._write(msgspec.json.encode(share))

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise self._failed()

    def begin(self, begin_s: float) -> None:
        self._write(str(begin_s).encode())

    def result(self) -> ShareResult:
        said, _ = self._process.communicate()
        if self._process.returncode:
            raise self._failed()
        try:
            return msgspec.json.decode(said, type=ShareResult)
        except msgspec.DecodeError as error:
            raise self._failed(f"{len(said)} bytes of results came, which are no results: {error}") from error

    def _failed(self, why: str = "it left no results") -> BoughError:
        return BoughError(what="a client process failed", why=f"it ended with status {self._process.wait()}: {why}")


def _divide(cap: int, processes: int) -> list[int]:
    """A cap's parts; 0 stays no cap."""
    return [cap // processes + (number < cap % processes) for number in range(processes)]


def _merged(parts: Sequence[ShareResult]) -> ShareResult:
    return ShareResult(
        outcomes=sorted((each for part in parts for each in part.outcomes), key=lambda each: each.due_s),
        busy=max(part.busy for part in parts),
        lag_ms=max(part.lag_ms for part in parts),
        wall_s=max(part.wall_s for part in parts),
    )


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the fastest available event loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: T = uvloop.run(work)
    return result


def _child() -> None:
    share = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientShare)
    # Not sys.stdout: with PYTHONUNBUFFERED one write of that may write only a part.
    with open(1, "wb", closefd=False) as out:
        out.write(b"ready\n")
        out.flush()
        share.begin_s = float(sys.stdin.buffer.readline())
        out.write(msgspec.json.encode(run_async(run_share(share))))


if __name__ == "__main__":
    _child()
