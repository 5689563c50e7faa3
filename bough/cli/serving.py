"""A server run by this process: its children, its own API worker, signals, progress and the banner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

import bough
from bough.cli.progress import Progress
from bough.config.check import check_exposure, is_loopback
from bough.config.concerns import Config, MediaConfig
from bough.core.errors import BoughError
from bough.entrypoints.http.sockets import bind, bind_all
from bough.launch import Running, located, start

if TYPE_CHECKING:
    from bough.entrypoints.http.worker import Worker
    from bough.entrypoints.service import Service

_log = logging.getLogger(__name__)

_SAME_SIGNAL_S = 0.3
"""`timeout` and some shells send a signal to the process and to its group: that is one wish, not two."""


class LocalServer:
    """Starts at once and serves in the event loop of `run`. `stop` may be called from any thread."""

    def __init__(
        self,
        config: Config,
        *,
        quiet: bool = False,
        sockets: list[socket.socket] | None = None,
        quarantine: frozenset[int] = frozenset(),
    ) -> None:
        """`sockets`: already bound, one for each API worker, to be closed by this server. Raises `ConfigError` before any
        process is started if the address can't be had or must not be."""
        check_exposure(config)
        check_media(config)
        self.config = config
        if config.server.grpc_port:
            # A taken port is found out now.
            bind(config.server.host, config.server.grpc_port, flag="--grpc-port").close()
        self._sockets = sockets or bind_all(config.server.host, config.server.port, config.server.api_workers)
        self.port: int = self._sockets[0].getsockname()[1]
        for sock in self._sockets:
            sock.set_inheritable(True)
        self._began = time.perf_counter()
        self._progress = None if quiet else Progress()
        progress = None if self._progress is None else self._progress.downloading(config.model.model)
        self._running: Running = start(
            located(config, progress), listen_fds=[sock.fileno() for sock in self._sockets[1:]], quarantine=quarantine
        )
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BoughError | None = None
        self._asked = 0
        self._last_asked = 0.0
        self._stopper: threading.Thread | None = None

    @property
    def suspects(self) -> frozenset[int]:
        """Once it has failed: fingerprints of the requests that the engine was computing."""
        return self._running.suspects

    @property
    def url(self) -> str:
        host = self.config.server.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def run(self, opened: Callable[[Service], None]) -> None:
        """Serves until `stop`. Raises the error that the server failed with."""
        from bough.entrypoints.http.worker import Worker

        self._loop = asyncio.get_running_loop()
        self._worker = Worker(self._running.config, self._running.endpoints, 0, self._sockets[0])
        self._running.on_failure(self._failed)
        try:
            await self._worker.run(self._ready(), opened, warm_up=not self.config.server.skip_server_warmup)
        finally:
            if self._progress is not None:
                self._progress.done()
            await asyncio.to_thread(self._end)
        if self._error is not None:
            raise self._error

    def stop_now(self) -> None:
        """Ends at once, without draining."""
        self._asked, self._last_asked = max(1, self._asked), 0.0
        self.stop()

    def stop(self) -> None:
        """Drains; a second call ends at once. Safe in signal handlers and other threads."""
        now = time.monotonic()
        if self._asked and now - self._last_asked < _SAME_SIGNAL_S:
            return
        self._asked += 1
        self._last_asked = now
        drain_s = self.config.server.drain_timeout_s if self._asked == 1 else 0.0
        self._stopper = threading.Thread(target=self._running.stop, args=(drain_s,), daemon=True)
        self._stopper.start()
        if self._loop is not None and self._worker is not None:
            worker, at_once = self._worker, self._asked > 1
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(lambda: worker.drain(now=at_once))

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    async def _ready(self) -> dict[str, Any]:
        facts = await asyncio.to_thread(self._running.wait_ready, self._progress)
        for sock in self._sockets[1:]:
            sock.close()  # the workers have inherited them
        return facts

    def _failed(self, error: BoughError) -> None:
        """Called in another thread when a process has died."""
        self._error = error
        if self._loop is not None and self._worker is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                asyncio.run_coroutine_threadsafe(self._worker.fail(error), self._loop)

    def _end(self) -> None:
        self._running.stop()
        if self._stopper is not None:
            self._stopper.join()


def check_media(config: Config) -> None:
    """Raises `ConfigError` if the media settings can't be meant."""
    if config.media != MediaConfig():
        from bough.multimodal import Door

        Door(config.media)


def banner(server: LocalServer, service: Service) -> str:
    """The last thing printed at start-up: what runs where, who may use it, and a line to try it with."""
    config, served = server.config, service.served
    facts = served.facts
    url = server.url
    place = f"{facts.get('device', 'cpu')}, {facts.get('dtype', '')}".rstrip(", ")
    pools = (facts.get("pooling") or {}).get("task", "")
    native = "/generate" if not pools else "/classify" if pools == "classify" else "/encode"
    rows = [
        ("API", f"{url}/v1  (OpenAI), {url}{native}  (native)"),
        ("docs", f"{url}/docs" if config.server.ui else f"{url}/openapi.json"),
        ("model", f"{served.name} on {place}; context {served.context_length:,} tokens"),
        ("key", _key_state(config)),
    ]
    if config.server.grpc_port:
        rows.insert(1, ("gRPC", f"{config.server.host}:{config.server.grpc_port}  (bough.v1.Bough, with reflection)"))
    if config.log.metrics:
        rows.insert(2, ("metrics", f"{url}/metrics"))
    if config.server.ui:
        rows.insert(1, ("playground", f"{url}/ui"))
    if served.sampling_defaults:
        told = ", ".join(f"{name} {value}" for name, value in served.sampling_defaults.items())
        rows.append(("sampling", f"the model's own defaults: {told}  (--sampling-defaults openai for OpenAI's)"))
    header = '-H "authorization: Bearer $BOUGH_API_KEY" ' if config.server.api_key else ""
    route, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    if served.tokenizer is None or served.tokenizer.chat_template is None:
        route, body = "/v1/completions", '{"prompt": "The sky is blue because", "max_tokens": 32}'
    if served.tokenizer is None:
        route, body = "/generate", '{"input_ids": [1, 2, 3]}'
    if pools:
        route, body = "/v1/classify" if pools == "classify" else "/v1/embeddings", '{"input": "The sky is blue."}'
    lines = [f"bough {bough.__version__} is ready after {server.seconds:.1f} s", ""]
    lines += [f"  {name:<10} {text}" for name, text in rows]
    lines += ["", f"  curl {url}{route} {header}-H 'content-type: application/json' -d '{body}'", ""]
    return "\n".join(lines)


def _key_state(config: Config) -> str:
    if config.server.api_key:
        return "required (Authorization: Bearer ...)"
    if is_loopback(config.server.host):
        return "none: only this machine can connect"
    return "none, and open to the network (--insecure)"


class Runs(Protocol):
    """A server, or whoever runs several."""

    async def run(self, opened: Callable[[Service], None]) -> None: ...

    def stop(self) -> None: ...


def run_until_signalled(server: Runs, opened: Callable[[Service], None]) -> int:
    """Serves in the main thread; Ctrl-C and SIGTERM drain, a second one ends at once. Returns the exit status."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        await server.run(opened)

    run_in_loop(main())
    return 0


def run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
