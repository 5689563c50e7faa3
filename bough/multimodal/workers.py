"""Worker processes on a leash: one thread each, started when needed, ended when they take too long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bough.core.errors import BoughError, RequestFailed, Unavailable
from bough.core.media import Features
from bough.ipc.features import check_features, features_path
from bough.multimodal.errors import MediaTooLarge, MediaUnsupported
from bough.multimodal.processor import Processed
from bough.multimodal.work import MediaResult, MediaWorkerStart, Work, receive, send

_START_LIMIT_S = 60.0
_PATIENCE = 4
"""Times the CPU time of a medium that may pass on the clock, because the machine may be busy."""
_BASE_BYTES = 256 * 2**20
_BYTES_PER_PIXEL = 16
"""Memory of a worker: this, and for each pixel that a medium may have its decoded forms and copies."""


class _Worker:
    """One process. Not for several threads."""

    def __init__(self, start: MediaWorkerStart) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(self, work: Work, data: bytes) -> tuple[Processed, int]:
        """What became of a medium, and the descriptor of its features. Raises `MediaError`, `RequestFailed`."""
        sock = self._ready()
        sock.settimeout(_PATIENCE * self._start.cpu_s)
        try:
            send(sock, work, data=data)
            done, descriptor = receive(sock, MediaResult)
        except (OSError, EOFError):
            self.stop()
            raise MediaTooLarge(
                what="this medium takes too long, or too much memory",
                why=f"{self._start.cpu_s:g} s and {self._start.memory_bytes // 2**20} MiB are allowed to prepare it",
                fix="send a smaller one",
            ) from None
        if done.processed is None or descriptor < 0:
            if descriptor >= 0:
                os.close(descriptor)
            kind = MediaTooLarge if done.code == MediaTooLarge.code else MediaUnsupported
            raise kind(what=done.error, why=done.why, fix=done.fix)
        return done.processed, descriptor

    def _ready(self) -> socket.socket:
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._socket
        self.stop()
        ours, theirs = socket.socketpair()
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MALLOC_ARENA_MAX": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bough.multimodal.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        self._socket = ours
        ours.settimeout(_START_LIMIT_S)
        try:
            send(ours, self._start)
            receive(ours, MediaResult)
        except (OSError, EOFError) as error:
            self.stop()
            raise RequestFailed(what="media can't be prepared", why="no worker starts") from error
        return ours

    def stop(self) -> None:
        """Ends the process at once, if there is one."""
        process, self._process = self._process, None
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
        if process is not None:
            process.kill()
            process.wait()


class Workers:
    """Prepares media in as many processes as it has threads. For one event loop."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        count: int,
        max_pixels: int,
        cpu_s: float,
        max_frames: int = 768,
        max_audio_s: float = 3600.0,
    ) -> None:
        self._start = MediaWorkerStart(
            config=dict(config),
            max_pixels=max_pixels,
            max_frames=max_frames,
            max_audio_s=max_audio_s,
            memory_bytes=_BASE_BYTES + _BYTES_PER_PIXEL * max_pixels,
            cpu_s=cpu_s,
        )
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="media")
        self._mine = threading.local()
        self._all: list[_Worker] = []
        self._closed = False

    async def run(self, work: Work, data: bytes) -> tuple[Processed, Features, int]:
        """What became of a medium, where its features lie, and the descriptor that holds them, which the caller closes.
        Raises `MediaError`, `RequestFailed`, `Unavailable`."""
        if self._closed:
            raise Unavailable(what="the server is shutting down")
        processed, descriptor = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work, data)
        features = Features(
            path=features_path(descriptor), digest=work.digest, dtype=processed.dtype, shape=processed.shape
        )
        try:
            check_features(descriptor, features)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise RequestFailed(what="media could not be prepared", why=str(error)) from error
        return processed, features, descriptor

    def warm(self) -> None:
        """Starts a worker in the background, so that the first medium need not wait for one."""
        with contextlib.suppress(RuntimeError):
            self._threads.submit(self._warm)

    def close(self) -> None:
        """Ends the processes."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.stop()

    def _run(self, work: Work, data: bytes) -> tuple[Processed, int]:
        return self._worker().run(work, data)

    def _warm(self) -> None:
        with contextlib.suppress(BoughError):
            self._worker()._ready()

    def _worker(self) -> _Worker:
        if not hasattr(self._mine, "worker"):
            self._mine.worker = _Worker(self._start)
            self._all.append(self._mine.worker)
        worker: _Worker = self._mine.worker
        return worker
