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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import bough
from bough.cli.progress import Progress
from bough.config.check import check_exposure, has_keys, is_loopback
from bough.config.concerns import Config, MediaConfig
from bough.config.default_model import BETTER_MODELS, DEFAULT_MODEL_NAME
from bough.config.keys import load_keys
from bough.config.memory_plan import show_bytes
from bough.core.errors import BoughError
from bough.entrypoints.http.sockets import bind, bind_server, network_address
from bough.entrypoints.http.tls import Certificates
from bough.ipc.group import GroupEnded
from bough.launch import ServerProcesses, located, start
from bough.observability.json_lines import JsonText
from bough.observability.switches import Reload, tell_all

if TYPE_CHECKING:
    from bough.entrypoints.http.node import NodeDoor
    from bough.entrypoints.http.worker import Worker
    from bough.entrypoints.served_model import ServedModel
from bough.entrypoints.service import Service

_log = logging.getLogger(__name__)

_SAME_SIGNAL_S = 0.3
"""Seconds within which repeated signals count as one: `timeout` and some shells signal both the process and its
group."""


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
        """`sockets`: bound sockets, one per API worker, which this server closes. Raises `ConfigError` before any
        process is started if the address cannot be bound, or must not be used without a key."""
        check_exposure(config)
        check_media(config)
        load_keys(config.server)
        Certificates.wanted(config.server)
        self.config = config
        if config.server.grpc_port:
            # A taken port is found out now.
            bind(config.server.host, config.server.grpc_port, flag="--grpc-port").close()
        self._owns_socket_file = bool(config.server.uds) and sockets is None
        self._sockets = sockets or bind_server(config.server)
        self.port: int = 0 if config.server.uds else self._sockets[0].getsockname()[1]
        for sock in self._sockets:
            sock.set_inheritable(True)
        self._began = time.perf_counter()
        stream = JsonText("api0") if config.log.log_format == "json" else None
        self._progress = None if quiet else Progress(stream)
        progress = (
            None
            if self._progress is None
            else self._progress.reporting(f"downloading {config.model.model or DEFAULT_MODEL_NAME}")
        )
        found, checkpoint = located(config, progress)
        self.config = replace(config, parallel=found.parallel)
        self._running: ServerProcesses = start(
            found,
            listen_fds=[sock.fileno() for sock in self._sockets[1:]],
            quarantine=quarantine,
            checkpoint=checkpoint,
        )
        self._worker: Worker | NodeDoor | None = None
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
        """The server's URL, without the path of a Unix socket."""
        server = self.config.server
        host, scheme = server.host, "https" if server.ssl_certfile else "http"
        if server.uds:
            return f"{scheme}://localhost"
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    async def run(self, opened: Callable[[Service | None], None]) -> None:
        """Serves until `stop`. Raises the error with which the server failed. `opened` is called when requests are
        accepted, with None on a machine that does not accept requests."""
        self._loop = asyncio.get_running_loop()
        try:
            if self.config.parallel.node_rank:
                from bough.entrypoints.http.node import NodeDoor

                self._worker = door = NodeDoor(self._running.config, self._sockets[0])
                self._running.on_failure(self._failed)
                await door.run(self._ready(), lambda: opened(None))
            else:
                from bough.entrypoints.http.worker import Worker

                self._worker = worker = Worker(self._running.config, self._running.endpoints, 0, self._sockets[0])
                self._running.on_failure(self._failed)
                await worker.run(self._ready(), opened, warm_up=not self.config.server.skip_server_warmup)
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

    def reload(self) -> None:
        """Makes every process reload its files (keys, certificates, log files). Returns immediately."""
        directory = self._running.endpoints.path("")

        def pass_on() -> None:
            heard = tell_all(directory, Reload())
            _log.info("SIGHUP was passed on to: %s", ", ".join(heard) or "no process")

        threading.Thread(target=pass_on, name="reload", daemon=True).start()

    def stop(self) -> None:
        """Drains; a second call ends at once. Safe in signal handlers and other threads."""
        now = time.monotonic()
        if self._asked and now - self._last_asked < _SAME_SIGNAL_S:
            return
        self._asked += 1
        self._last_asked = now
        self._leave_sockets()
        drain_s = self.config.server.drain_timeout_s if self._asked == 1 else 0.0
        self._stopper = threading.Thread(target=self._running.stop, args=(drain_s,), daemon=True)
        self._stopper.start()
        if self._loop is not None and self._worker is not None:
            worker, at_once = self._worker, self._asked > 1
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(lambda: worker.drain(now=at_once))

    def _leave_sockets(self) -> None:
        """Closes this process's copies of the other API workers' sockets; until then, they can be passed to a
        replacement of a dead worker."""
        for sock in self._sockets[1:]:
            sock.close()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    async def _ready(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._running.wait_ready, self._progress)

    def _failed(self, error: BoughError) -> None:
        """Called in another thread when a process has died, or the group of machines has ended."""
        if isinstance(error, GroupEnded):
            self.stop_now()
            return
        self._error = error
        if self._loop is not None and self._worker is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                asyncio.run_coroutine_threadsafe(self._worker.fail(error), self._loop)

    def _end(self) -> None:
        self._leave_sockets()
        if self._owns_socket_file:
            Path(self.config.server.uds).expanduser().unlink(missing_ok=True)
        self._running.stop()
        if self._stopper is not None:
            self._stopper.join()


def check_media(config: Config) -> None:
    """Raises `ConfigError` if the media settings can't be meant."""
    if config.media != MediaConfig():
        from bough.multimodal import Door

        Door(config.media)


def banner(server: LocalServer, service: Service | None) -> str:
    """The text printed at the end of start-up: addresses, the model, who may connect, and a command to try it."""
    config = server.config
    if service is None:
        parallel = config.parallel
        return f"machine {parallel.node_rank} of {parallel.nnodes} is ready; requests go to machine 0"
    served = service.served
    facts = served.facts
    url = server.url
    place = f"{facts.get('device', 'cpu')}, {facts.get('dtype', '')}".rstrip(", ")
    pools = (facts.get("pooling") or {}).get("task", "")
    native = "/generate" if not pools else "/classify" if pools == "classify" else "/encode"
    rows = [
        ("API", f"{url}/v1  (OpenAI), {url}{native}  (native)"),
        ("docs", f"{url}/docs" if config.server.ui else f"{url}/openapi.json"),
        ("model", f"{served.name} on {place}; context {served.context_length:,} tokens"),
        ("weights", _weights(served)),
        ("key", _key_state(config)),
    ]
    if config.server.grpc_port:
        rows.insert(1, ("gRPC", f"{config.server.host}:{config.server.grpc_port}  (bough.v1.Bough, with reflection)"))
    if config.log.metrics:
        rows.insert(2, ("metrics", f"{url}/metrics"))
    if config.server.ui:
        rows.insert(1, ("playground", f"{url}/ui"))
    kept = facts.get("kv_tokens", 0)
    if kept and not pools:
        rows.insert(-1, ("KV cache", f"{kept:,} tokens  (-v shows the memory plan and how settings were decided)"))
    reachable = "" if is_loopback(config.server.host) else network_address()
    if reachable and config.server.host in ("0.0.0.0", "::"):
        scheme = url.partition("://")[0]
        rows.insert(1, ("network", f"{scheme}://{reachable}:{server.port}  (this machine's address for others)"))
    if served.sampling_defaults:
        shown = ", ".join(f"{name} {value}" for name, value in served.sampling_defaults.items())
        rows.append(("sampling", f"the model's own defaults: {shown}  (--sampling-defaults openai for OpenAI's)"))
    if not config.model.model:
        better = BETTER_MODELS.get(facts.get("device", "cpu"), BETTER_MODELS["cpu"])
        rows.append(("next", f"a better model: bough serve {better}"))
    header = '-H "authorization: Bearer $BOUGH_API_KEY" ' if has_keys(config.server) else ""
    route, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    if served.tokenizer is None or served.tokenizer.chat_template is None:
        route, body = "/v1/completions", '{"prompt": "The sky is blue because", "max_tokens": 32}'
    if served.tokenizer is None:
        route, body = "/generate", '{"input_ids": [1, 2, 3]}'
    if pools:
        route, body = "/v1/classify" if pools == "classify" else "/v1/embeddings", '{"input": "The sky is blue."}'
    if config.server.uds:
        rows.insert(0, ("socket", config.server.uds))
    lines = [f"bough {bough.__version__} is ready after {server.seconds:.1f} s", ""]
    lines += [f"  {name:<10} {text}" for name, text in rows]
    how = f"--unix-socket {config.server.uds} " if config.server.uds else ""
    lines += ["", f"  curl {how}{url}{route} {header}-H 'content-type: application/json' -d '{body}'", ""]
    return "\n".join(lines)


def _weights(served: ServedModel) -> str:
    """The format of the weights' files, and how they are quantised, or the type of most of them."""
    if not served.stored_as:
        return "none read: they are drawn at random"
    name = "GGUF" if served.format == "gguf" else served.format
    size = next((row[1] for row in served.facts.get("memory", ()) if row[0] == "weights"), 0)
    kept_as = served.facts.get("weight_format") or served.stored_as
    return f"{name}, {kept_as}" + (f", {show_bytes(size)} in memory" if size else "")


def _key_state(config: Config) -> str:
    if has_keys(config.server):
        return "required (Authorization: Bearer ...)"
    if is_loopback(config.server.host):
        return "none: only this machine can connect"
    return "none, and open to the network (--insecure)"


class Runs(Protocol):
    """A server, or a supervisor of servers."""

    async def run(self, opened: Callable[[Service | None], None]) -> None: ...

    def stop(self) -> None: ...

    def reload(self) -> None: ...


def run_until_signalled(server: Runs, opened: Callable[[Service | None], None]) -> int:
    """Serves in the main thread; Ctrl-C and SIGTERM drain, a second one ends at once; SIGHUP reloads files. Returns the
    exit status."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        loop.add_signal_handler(signal.SIGHUP, server.reload)
        await server.run(opened)

    run_in_loop(main())
    return 0


def run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in the fastest available event loop."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
