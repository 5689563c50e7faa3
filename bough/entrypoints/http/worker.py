"""One API worker: from a bound socket to serving requests, and back.

    worker = Worker(config, endpoints, index, socket)
    await worker.run(ready)        # `ready` gives the engine's facts once it takes requests

Probes are answered while the engine loads; the tokenizer is loaded meanwhile. `drain` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bough.config.concerns import Config
from bough.core.errors import BoughError, ConfigError, Unavailable
from bough.core.sampling import SamplingParams
from bough.engine_client import EngineClient, Request
from bough.entrypoints.http.app import handlers, known_paths, make_app, make_peer_app
from bough.entrypoints.http.batches import start_batches
from bough.entrypoints.http.metrics import open_metrics_port
from bough.entrypoints.http.peers import Peers
from bough.entrypoints.http.server import Front, HttpServer
from bough.entrypoints.http.sockets import bind
from bough.entrypoints.http.tls import Certificates
from bough.entrypoints.keyring import Keyring
from bough.entrypoints.quota import Rates
from bough.entrypoints.served_model import load_tokenizer_side, make_served
from bough.entrypoints.service import Service, make_admission
from bough.entrypoints.telemetry import Telemetry
from bough.ipc import Endpoints, read_checkpoint
from bough.multimodal.desk import MediaInput, RawPixels
from bough.multimodal.media import media_of
from bough.multimodal.work import UnencodedPixels
from bough.observability.health import Heartbeat, Pulse, Pulses, State
from bough.observability.trace import OtlpExporter

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""Seconds for clients to read the error of their answer, after the engine has gone or the drain timeout has passed."""
_LATE_S = 2.0
"""Seconds to wait after the drain timeout for the engine to end the remaining requests."""
_LOOK_EVERY_S = 0.2
_BEAT_EVERY_S = 0.5

_YOUNG_OBJECTS = 20_000
"""Objects: after this many, some are searched for cycles. A wave of requests has thousands, and nearly all die without."""

_WARM_PIXELS = 448
"""Along a side of the first image: its patches are several windows, and several tiles of attention."""

Facts = Mapping[str, Any]


class Worker:
    """Serves one socket. Everything runs in the event loop that `run` is called in."""

    def __init__(self, config: Config, endpoints: Endpoints, index: int, sock: socket.socket) -> None:
        self._config = config
        self._endpoints = endpoints
        self._index = index
        self._exporter = _exporter(config)
        self._front = Front()
        self._certificates = Certificates.wanted(config.server)
        self._server = HttpServer(
            self._front,
            [sock],
            client_timeout_s=config.server.client_timeout_s,
            tls=None if self._certificates is None else self._certificates.context,
        )
        port = config.server.metrics_port if index == 0 else 0
        self._metrics_socket = bind(config.server.host, port, flag="--metrics-port") if port else None
        self._service: Service | None = None
        self._stopping = asyncio.Event()
        self._winding_up: asyncio.Future[None] | None = None

    async def run(
        self,
        ready: Awaitable[Facts],
        opened: Callable[[Service], None] | None = None,
        *,
        warm_up: bool = False,
        probes: bool = True,
    ) -> None:
        """Serves until `drain`. Calls `opened` when requests are accepted. Raises the error that start-up failed with.
        `probes`: answer probes from the beginning; otherwise the worker does not listen until requests are accepted.
        """
        opening = asyncio.ensure_future(self._open(ready, warm_up))
        serving = asyncio.ensure_future(self._serve(None if probes else opening))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((opening, serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                service = opening.result()
                if opened is not None:
                    opened(service)
                await serving
        finally:
            await _cancel(opening, stopping, *([self._winding_up] if self._winding_up is not None else []))
            self._server.stop(now=self._service is None)
            await asyncio.gather(serving, return_exceptions=True)
            if self._service is not None:
                await self._service.close()
            if self._exporter is not None:
                await asyncio.to_thread(self._exporter.close)

    async def _serve(self, after: asyncio.Future[Service] | None) -> None:
        if after is not None:
            await asyncio.wait((after,))
            if after.cancelled() or after.exception() is not None:
                return
        await self._server.run()

    def drain(self, *, now: bool = False) -> None:
        """Ends `run` when the running requests have ended, or their time is up; new ones get 503 until then. `now`:
        running ones get it, too."""
        self._front.drain()
        if self._service is None:
            self._close(now=now)
            return
        if not now and self._service.engine_client.num_live:
            _log.info(
                "stopping: requests under way (%d) get %g s to end (--drain-timeout-s), a second signal ends them now",
                self._service.engine_client.num_live,
                self._config.server.drain_timeout_s,
            )
        self._service.drain(now=now)
        if now and self._winding_up is not None:
            self._winding_up.cancel()
        patience_s = 0.0 if now else self._config.server.drain_timeout_s + _LATE_S
        self._winding_up = asyncio.ensure_future(self._wind_up(self._service, patience_s, now=now))

    async def _wind_up(self, service: Service, patience_s: float, *, now: bool) -> None:
        """Waits for what is under way, then closes the port."""
        give_up_s = time.monotonic() + patience_s
        ended = asyncio.ensure_future(asyncio.gather(self._front.rest(), service.drained()))
        try:
            await asyncio.wait((ended,), timeout=min(patience_s, _LOOK_EVERY_S))
            # An engine that has ended answers nothing any more, and gets no more time for it.
            while not ended.done() and time.monotonic() < give_up_s and service.health().alive:
                await asyncio.wait((ended,), timeout=_LOOK_EVERY_S)
            if not ended.done():
                service.engine_client.fail_all(
                    Unavailable(
                        what="the answer was cut off", why="the server is shutting down", fix="send the request again"
                    )
                )
                await asyncio.wait((ended,), timeout=_LAST_WORDS_S)
        finally:
            ended.cancel()
            self._close(now=now)

    def _close(self, *, now: bool) -> None:
        self._stopping.set()
        self._server.stop(now=now)

    async def fail(self, error: BoughError) -> None:
        """The engine is gone: requests that wait get the error, then `run` ends."""
        if self._service is not None:
            self._service.engine_client.fail_all(error)
            await asyncio.sleep(_LAST_WORDS_S)
        self.drain(now=True)

    async def _open(self, ready: Awaitable[Facts], warm_up: bool) -> Service:
        waiting = asyncio.ensure_future(ready)
        try:
            checkpoint = await asyncio.to_thread(read_checkpoint, self._endpoints)
            tokenizer = await asyncio.to_thread(load_tokenizer_side, self._config, checkpoint)
            gc.unfreeze()
            gc.collect()  # while the engine loads: what a worker before this one left is to go before the next freeze
            facts = await waiting
        except BaseException:
            await _cancel(waiting)
            raise
        media = media_of(
            self._config, checkpoint, tokenizer, kinds=facts.get("media", ()), context_length=facts["context_length"],
            width=facts.get("media_width", 0),
        )  # fmt: skip
        served = make_served(self._config, checkpoint, tokenizer, facts, media)
        replicas = self._endpoints.replicas(self._config.parallel.num_schedulers)
        pulse = Pulses([each.heartbeat for each in replicas])
        admission = make_admission(self._config, facts, pulse)
        engine_client = EngineClient.from_facts(
            self._endpoints, facts, tokenizer,
            worker=self._index, gate=admission, truncate=self._config.server.allow_auto_truncate,
            parallel=self._config.parallel, media=media,
        )  # fmt: skip
        await engine_client.start()
        telemetry = Telemetry(self._endpoints, self._index, known_paths())
        telemetry.exporter = self._exporter
        keyring = Keyring(self._config.server, Rates(self._endpoints.rates))
        self._service = Service(
            self._config, served, engine_client, pulse, admission, telemetry, keyring, self._others()
        )
        if self._certificates is not None:
            self._service.reloads.add("certificates", self._certificates.reload)
        self._service.keeper.keep("heartbeat", self._beat)
        self._service.follow_switches(self._endpoints.path(""), f"api{self._index}")
        if warm_up:
            await _warm_up(engine_client, images=facts["device"] == "cuda")
        if self._index == 0:
            start_batches(self._service, handlers(self._service))
            if self._config.server.grpc_port:
                await _open_grpc(self._service)
            if self._metrics_socket is not None:
                await open_metrics_port(self._service, self._metrics_socket)
        if self._config.server.api_workers > 1:
            await self._meet_peers(self._service)
        self._front.open(make_app(self._service))
        # What start-up leaves behind stays: no collection needs to look at it.
        gc.freeze()
        gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
        return self._service

    async def _meet_peers(self, service: Service) -> None:
        """Takes requests that the other workers pass on, and passes on to them, until the service closes."""
        others = [index for index in range(self._config.server.api_workers) if index != self._index]
        service.peers = Peers(self._index, {index: self._endpoints.peer(index) for index in others})
        address = self._endpoints.peer(self._index)
        Path(address).unlink(missing_ok=True)  # an earlier process may have had this place
        server = HttpServer(make_peer_app(service), [], uds=address)
        serving = asyncio.ensure_future(server.run())

        async def stop() -> None:
            server.stop(now=True)
            await asyncio.gather(serving, return_exceptions=True)

        service.at_close(stop)
        await server.started()

    def _others(self) -> dict[str, Pulse]:
        """The processes besides the engine that the server needs."""
        names = [f"api{index}" for index in range(self._config.server.api_workers) if index != self._index]
        if not self._config.model.skip_tokenizer_init:
            names.append("detokenizer")
        return {name: Pulse(self._endpoints.beat(name)) for name in names}

    async def _beat(self) -> None:
        """Writes the heartbeat, by which other processes see that this event loop is running."""
        heart = Heartbeat(self._endpoints.beat(f"api{self._index}"))
        for turn in itertools.count(1):
            heart.beat(turn, State.READY)
            await asyncio.sleep(_BEAT_EVERY_S)


async def _open_grpc(service: Service) -> None:
    """Serves gRPC beside HTTP, until the service closes."""
    try:
        from bough.entrypoints.grpc.server import GrpcServer
    except ImportError as error:
        raise ConfigError(
            what="this installation has no gRPC",
            why=f"the module {error.name} is missing",
            fix="install it with `pip install 'bough[grpc]'`, or leave out --grpc-port",
            param="grpc_port",
        ) from error
    server = GrpcServer(service, service.config.server.host, service.config.server.grpc_port)
    await server.start()
    service.at_drain(server.drain)
    service.at_close(server.close)


def _exporter(config: Config) -> OtlpExporter | None:
    """Created first, so that a missing dependency is reported at once."""
    endpoint = config.log.otlp_endpoint
    version = import_module("bough").__version__
    return OtlpExporter(endpoint, service="bough", version=version) if endpoint else None


async def _warm_up(engine_client: EngineClient, *, images: bool) -> None:
    """Runs one short request through all processes, so that the first client does not pay for first times. `images`: and one
    with an image, if the model takes them: kernels of towers are compiled when they are first used."""
    length = min(16, max(1, engine_client.context_length - 4))
    request = Request(
        prompt=[index % engine_client.vocab_size for index in range(1, length + 1)],
        sampling=SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True),
        room="at_most",
        pool="embed" if engine_client.pools else "",
    )
    await engine_client.collect(request)
    media = engine_client.media
    if not images or media is None or "image" not in media.kinds or engine_client.pools:
        return
    side = _WARM_PIXELS
    blank = RawPixels(UnencodedPixels(side, side, "RGB"), bytes(3 * side * side))
    try:
        await engine_client.collect(replace(request, media=(MediaInput(kind="image", source=blank),)))
    except BoughError as error:  # a context or limits that leave no room for it
        _log.info("the first image will take longer than others: %s", error)


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*futures, return_exceptions=True)
