"""One API worker: from a bound socket to an open door, and back to a closed one.

    worker = Worker(config, endpoints, index, socket)
    await worker.run(ready)        # `ready` gives the engine's facts once it takes requests

Probes are answered while the engine loads; the tokenizer is loaded meanwhile. `drain` ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Any

from bough.config.concerns import Config
from bough.core.errors import BoughError, ConfigError
from bough.core.sampling import SamplingParams
from bough.entrypoints.http.app import handlers, known_paths, make_app
from bough.entrypoints.http.batches import start_batches
from bough.entrypoints.http.server import Front, HttpServer
from bough.entrypoints.served import load_model_side, make_served
from bough.entrypoints.service import Service, make_admission
from bough.entrypoints.telemetry import Telemetry
from bough.intake import Intake, Request
from bough.ipc import Endpoints
from bough.observability.health import Pulse
from bough.observability.trace import OtlpExporter

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""After the engine has gone, time for clients to read why."""

_YOUNG_OBJECTS = 20_000
"""After so many more, some are looked at for cycles. A wave of requests has thousands, and nearly all die without."""

Facts = Mapping[str, Any]


class Worker:
    """Serves one socket. Everything runs in the event loop that `run` is called in."""

    def __init__(self, config: Config, endpoints: Endpoints, index: int, sock: socket.socket) -> None:
        self._config = config
        self._endpoints = endpoints
        self._index = index
        self._exporter = _exporter(config)
        self._front = Front()
        self._server = HttpServer(
            self._front,
            [sock],
            drain_timeout_s=config.server.drain_timeout_s,
            client_timeout_s=config.server.client_timeout_s,
        )
        self._service: Service | None = None
        self._stopping = asyncio.Event()

    async def run(
        self,
        ready: Awaitable[Facts],
        opened: Callable[[Service], None] | None = None,
        *,
        warm_up: bool = False,
        probes: bool = True,
    ) -> None:
        """Serves until `drain`. `opened` hears when requests are taken. Raises what start-up failed with.

        `probes`: answers them from the first moment; otherwise nothing is listened to until requests are taken.
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
            await _cancel(opening, stopping)
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
        """Takes no new requests and ends `run` when those under way have ended; `now`: at once."""
        if self._service is not None:
            if not now and self._service.intake.num_live:
                _log.info(
                    "stopping: requests under way (%d) get %g s to end (--drain-timeout-s), a second signal ends them now",
                    self._service.intake.num_live,
                    self._config.server.drain_timeout_s,
                )
            self._service.drain(now=now)
        self._stopping.set()
        self._server.stop(now=now)

    async def fail(self, error: BoughError) -> None:
        """The engine is gone: whoever waits gets the error, then `run` ends."""
        if self._service is not None:
            self._service.intake.fail_all(error)
            await asyncio.sleep(_LAST_WORDS_S)
        self.drain(now=True)

    async def _open(self, ready: Awaitable[Facts], warm_up: bool) -> Service:
        waiting = asyncio.ensure_future(ready)
        try:
            checkpoint, tokenizer = await asyncio.to_thread(load_model_side, self._config)
            gc.unfreeze()
            gc.collect()  # while the engine loads: what a worker before this one left is to go before the next freeze
            facts = await waiting
        except BaseException:
            await _cancel(waiting)
            raise
        served = make_served(self._config, checkpoint, tokenizer, facts)
        admission = make_admission(self._config, facts)
        intake = Intake.from_facts(self._endpoints, facts, tokenizer, worker=self._index, gate=admission)
        await intake.start()
        telemetry = Telemetry(self._endpoints, self._index, known_paths())
        telemetry.exporter = self._exporter
        pulse = Pulse(self._endpoints.heartbeat)
        self._service = Service(self._config, served, intake, pulse, admission, telemetry)
        self._service.follow_log_switches(self._endpoints.path(""), f"api{self._index}")
        if warm_up:
            await _warm_up(intake)
        if self._index == 0:
            start_batches(self._service, handlers(self._service))
            if self._config.server.grpc_port:
                await _open_grpc(self._service)
        self._front.open(make_app(self._service))
        # What start-up leaves behind stays: no collection needs to look at it.
        gc.freeze()
        gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
        return self._service


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
    """Made before anything else: what is missing for it is found out at once."""
    endpoint = config.log.otlp_endpoint
    version = import_module("bough").__version__
    return OtlpExporter(endpoint, service="bough", version=version) if endpoint else None


async def _warm_up(intake: Intake) -> None:
    """Runs one short request through all processes, so that the first client does not pay for first times."""
    length = min(16, max(1, intake.context_length - 4))
    request = Request(
        prompt=[index % intake.vocab_size for index in range(1, length + 1)],
        sampling=SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True),
        room="at_most",
        pool="embed" if intake.pools else "",
    )
    await intake.collect(request)


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    for future in futures:
        future.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*futures, return_exceptions=True)
