"""The shared state of all routes: the served model, the engine client, and the engine's health."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bough.config.concerns import Config
from bough.core import bounds
from bough.core.errors import InvalidRequest
from bough.core.messages import Delta, End
from bough.core.sampling import SamplingParams
from bough.engine_client import DeltaStream, EngineClient, Pooler, Request
from bough.engine_client.endings import raise_if_failed
from bough.entrypoints.admission import Admission
from bough.entrypoints.keyring import Keyring
from bough.entrypoints.served_model import ServedModel
from bough.entrypoints.telemetry import Telemetry
from bough.observability.health import Beat, Pulse, Pulses, State
from bough.observability.keeper import Keeper
from bough.observability.log import set_log_level
from bough.observability.reload import Reloads
from bough.observability.switches import LogListener, LogSwitch, tell_all

if TYPE_CHECKING:
    from bough.entrypoints.http.peers import Peers
    from bough.entrypoints.http.responses.store import ResponseStore

_log = logging.getLogger(__name__)
_DEFAULT = SamplingParams()
_LOGGED = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "seed", "n", "ignore_eos", "beam_width",
)  # fmt: skip

_LATE_AFTER_S = 3.0
"""Seconds without a heartbeat after which a process is reported as late; each writes one per second, even when idle."""

T = TypeVar("T")
News = tuple[int, DeltaStream, Delta]
"""(index of the request, index of its answer, delta)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The server's health, by the heartbeats of its processes alone."""

    alive: bool
    ready: bool
    why: str
    """The problem, if there is one."""
    num_running: int = 0
    num_waiting: int = 0
    late: Mapping[str, str] = field(default_factory=dict)
    """Processes with a late heartbeat that are not yet considered stuck."""


class Service:
    """One API worker's view of the server."""

    def __init__(
        self,
        config: Config,
        served: ServedModel,
        engine_client: EngineClient,
        pulse: Pulse | Pulses,
        admission: Admission | None = None,
        telemetry: Telemetry | None = None,
        keyring: Keyring | None = None,
        others: Mapping[str, Pulse] | None = None,
    ) -> None:
        """`pulse`: the engine's. `others`: those of the other processes that the server needs, by name."""
        self.config = _with_media(config) if served.facts.get("media") else config
        self.served = served
        self.engine_client = engine_client
        self.admission = admission or make_admission(config, served.facts)
        self.telemetry = telemetry or Telemetry()
        self.keyring = keyring or Keyring(config.server)
        self.keyring.usage = self.telemetry.keys
        self.telemetry.keys.know(self.keyring.names)
        self.reloads = Reloads()
        """Functions that reload files on SIGHUP."""
        self.reloads.add("keys", self.keyring.reload)
        self.keeper = Keeper(self.telemetry.task_failed)
        """Runs background tasks."""
        self.draining = False
        self.log_requests = config.log.log_requests
        self.responses: ResponseStore | None = None
        """Created by the route that uses it."""
        self.peers: Peers | None = None
        """The other API workers; None: there are none."""
        self._drainers: list[Callable[[bool], Coroutine[Any, Any, None]]] = []
        self._draining: list[asyncio.Future[None]] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._log_directory: Path | None = None
        self._pulse = pulse
        self._others = others or {}

    @functools.cached_property
    def pooler(self) -> Pooler:
        """Embeds, classifies and reranks for every route that does. Raises `ConfigError` if the rerank template can't be
        used."""
        return Pooler(
            self.engine_client,
            self.served.facts,
            model=f"{self.served.name} {self.config.model.model}",
            rerank_template=self.config.server.rerank_template,
            embedding_template=self.config.server.embedding_template,
            delimiter=self.config.server.multi_item_scoring_delimiter,
        )

    async def run(self, requests: Sequence[Request]) -> AsyncGenerator[News, None]:
        """The deltas of all requests as they arrive, until all have ended. Closing it early aborts the remaining
        requests. Raises `BoughError` before the first delta if a request can't be accepted; a failed answer is reported
        in its last delta.
        """
        streams = await self._submit(requests)
        try:
            if len(streams) == 1:
                only = streams[0][1]
                async for delta in only:
                    if delta.end is not None and self.log_requests:
                        log_end(only, delta.end)
                    yield 0, only, delta
            else:
                async for news in _side_by_side(streams):
                    if news[2].end is not None and self.log_requests:
                        log_end(news[1], news[2].end)
                    yield news
        finally:
            for _, stream in streams:
                stream.abort()

    async def collect(self, requests: Sequence[Request]) -> list[News]:
        """Complete answers in the order of the requests, one delta each. Raises `BoughError` if a request can't be
        accepted, or the error of the first failed answer; the others are then aborted.
        """
        streams = await self._submit(requests)
        try:
            whole = [request.caller.whole for request in requests]
            if len(streams) == 1:
                return [await self._whole(*streams[0], whole[0])]
            return await _all(self._whole(at, stream, whole[at]) for at, stream in streams)
        finally:
            for _, stream in streams:
                stream.abort()

    async def _submit(self, requests: Sequence[Request]) -> list[tuple[int, DeltaStream]]:
        """The streams of all requests, each with the index of its request."""
        groups = await self.engine_client.submit_batch(requests)
        if self.log_requests:
            for request, group in zip(requests, groups, strict=True):
                log_request(request, group, self.config.log.log_requests_level)
        return [(at, stream) for at, group in enumerate(groups) for stream in group]

    async def _whole(self, at: int, stream: DeltaStream, whole: bool) -> News:
        """A stream's answer. `whole`: one that was cut off is an error."""
        delta = await stream.collect()
        assert delta.end is not None, "it has ended"
        if self.log_requests:
            log_end(stream, delta.end)
        raise_if_failed(delta.end, whole=whole)
        return at, stream, delta

    def drain(self, *, now: bool = False) -> None:
        """Starts draining: no new requests are accepted; `now`: running ones are aborted."""
        self.draining = True
        self._draining += [asyncio.ensure_future(drainer(now)) for drainer in self._drainers]

    async def drained(self) -> None:
        """Returns when everything registered with `at_drain` has finished its work."""
        await asyncio.gather(*self._draining, return_exceptions=True)

    def at_drain(self, drainer: Callable[[bool], Coroutine[Any, Any, None]]) -> None:
        """`drainer` is called when draining begins, and returns when its work is finished; it is called (again) with
        True if draining is cut short."""
        self._drainers.append(drainer)

    def at_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """`closer` is awaited when the worker ends, before the engine client closes."""
        self._closers.append(closer)

    async def close(self) -> None:
        """Ends background tasks, then the engine client."""
        for closer in reversed(self._closers):
            await closer()
        await self.keeper.close()
        await self.engine_client.close()

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts, long ones off the event loop."""
        tokenizers = self.engine_client.tokenizers
        if tokenizers is None:
            raise InvalidRequest(
                what="this server has no tokenizer",
                why="it was started with --skip-tokenizer-init",
                fix="tokenise on your side",
            )
        bounds.at_most("tokenize_chars", sum(map(len, texts)), "prompt")
        return await tokenizers.encode_batch(texts, add_special_tokens)

    async def beside_the_loop(self, work: Callable[[], T], size: int) -> T:
        """Runs work on texts of `size` characters (or ids) in total; in a thread, unless it is short."""
        tokenizers = self.engine_client.tokenizers
        return work() if tokenizers is None else await tokenizers.run(work, size)

    def follow_switches(self, directory: Path, process: str) -> None:
        """Makes this process follow `/configure_logging` of any worker, and reload its files on request, until the
        service closes."""
        listener = LogListener(directory, process, self._switched, self.reloads.run)
        loop = asyncio.get_running_loop()
        loop.add_reader(listener.fileno(), listener.answer)
        self._log_directory = directory

        async def stop() -> None:
            loop.remove_reader(listener.fileno())
            listener.close()

        self.at_close(stop)

    async def switch_logging(self, switch: LogSwitch) -> list[str]:
        """Changes what all processes of the server log, and returns the names of those that have confirmed it."""
        if self._log_directory is not None:
            return await asyncio.to_thread(tell_all, self._log_directory, switch)
        if switch.log_level is not None:
            set_log_level(switch.log_level)
        self._switched(switch)
        return []

    def _switched(self, switch: LogSwitch) -> None:
        if switch.log_requests is not None:
            self.log_requests = switch.log_requests

    def start_counting(self) -> None:
        """Counts requests from now on, as requests of clients."""
        self.engine_client.meter = self.telemetry.meter
        self.engine_client.quota = self.keyring if self.keyring.names else None
        self.admission.changed = self.telemetry.admission_changed

    def beat(self) -> Beat:
        """The engine's last heartbeat."""
        return self._pulse.read()

    def health(self) -> Health:
        """Reads the heartbeats, without asking another process; takes microseconds."""
        beat = self._pulse.read()
        if beat.pid and not _is_running(beat.pid):
            return Health(alive=False, ready=False, why="the engine has died")
        others = {name: pulse.read() for name, pulse in self._others.items()}
        return judge(beat, others, stuck_after_s=self.config.server.watchdog_timeout_s, draining=self.draining)


def log_request(request: Request, streams: Sequence[DeltaStream], level: int = 1) -> None:
    """One line about a request, never its text: its numbers (level 0), and its sampling parameters too (1)."""
    sampling = request.sampling
    changed = {name: getattr(sampling, name) for name in _LOGGED if getattr(sampling, name) != getattr(_DEFAULT, name)}
    if level == 0:
        changed = {}
    _log.info(
        "request",
        extra={
            "rid": streams[0].rid,
            "prompt_tokens": len(streams[0].prompt),
            "stream": request.stream,
            "constrained": sampling.grammar.kind if sampling.grammar is not None else "no",
            "tools": request.tool_parser or "no",
            **changed,
        },
    )


def log_end(stream: DeltaStream, end: End) -> None:
    """One line about how a request ended and where its time went."""
    _log.info(
        "request ended",
        extra={
            "rid": stream.rid,
            "index": stream.index,
            "finish_reason": end.reason,
            "completion_tokens": end.completion_tokens,
            "cached_tokens": end.cached_tokens,
            "retractions": end.retractions,
            "queue_s": round(end.queued_s, 4),
            "prefill_s": round(end.prefill_s, 4),
            "decode_s": round(end.decode_s, 4),
        },
    )


def judge(
    beat: Beat, others: Mapping[str, Beat] | None = None, *, stuck_after_s: float, draining: bool = False
) -> Health:
    """The health from the heartbeats of the engine and of the other processes."""
    numbers: dict[str, Any] = {"num_running": beat.num_running, "num_waiting": beat.num_waiting}
    started = {name: each for name, each in (others or {}).items() if each.state is not State.STARTING}
    if beat.state is State.ENDED:
        return Health(alive=False, ready=False, why="the engine has ended")
    if beat.state is State.STARTING:
        return Health(alive=True, ready=False, why="the engine is starting")
    if beat.age_s > stuck_after_s:
        return Health(alive=False, ready=False, why=f"the engine has not moved for {beat.age_s:.0f} s", **numbers)
    if draining or beat.state is State.DRAINING:
        return Health(alive=True, ready=False, why="the server is draining", **numbers)
    for name, each in started.items():
        if each.age_s > stuck_after_s:
            why = f"the {name} process has not moved for {each.age_s:.0f} s"
            return Health(alive=False, ready=False, why=why, **numbers)
    late = {
        name: f"has not moved for {each.age_s:.0f} s" for name, each in started.items() if each.age_s > _LATE_AFTER_S
    }
    why = "the engine is paused" if beat.state is State.PAUSED else ""
    return Health(alive=True, ready=True, why=why, late=late, **numbers)


def _with_media(config: Config) -> Config:
    """The settings of a server whose requests may have media in them."""
    server = config.server
    largest = max(server.max_body_bytes, server.max_media_body_bytes)
    in_flight = max(largest, server.max_body_bytes_in_flight)
    return replace(config, server=replace(server, max_body_bytes=largest, max_body_bytes_in_flight=in_flight))


def make_admission(config: Config, facts: Mapping[str, Any], pulse: Pulse | Pulses | None = None) -> Admission:
    """This worker's part of the server's bounds. `pulse`: the engine's."""
    workers = max(1, config.server.api_workers)
    running = int(facts.get("max_running_requests", 0))
    return Admission(
        max_requests=max(1, (config.scheduler.max_queued_requests + running) // workers),
        max_tokens=max(1, config.scheduler.max_queued_tokens // workers),
        max_wait_s=config.scheduler.max_queue_wait_s,
        look=pulse.read if pulse is not None else None,
    )


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all coroutines and returns their results. The first error cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()  # one of them may hold an error whose traceback has this frame


async def _side_by_side(streams: Sequence[tuple[int, DeltaStream]]) -> AsyncGenerator[News, None]:
    """Deltas of several streams in the order of arrival. The first error ends all of them."""
    queue: asyncio.Queue[News | BaseException | None] = asyncio.Queue()

    async def feed(at: int, stream: DeltaStream) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((at, stream, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(feed(at, stream)) for at, stream in streams]
    try:
        remaining = len(tasks)
        while remaining:
            news = await queue.get()
            if news is None:
                remaining -= 1
            elif isinstance(news, BaseException):
                try:
                    raise news
                finally:
                    del news  # or its traceback and this frame would hold each other
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_running(pid: int) -> bool:
    """Whether the process exists and has not died; a dead one may linger until its parent looks."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
