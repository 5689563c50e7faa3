"""`--dump-dir`: every request's body in a file, text included, so that the same traffic can be sent again.

Off unless the operator asks for it. One JSON object a line: time, path, status, duration, body. Headers are left out
because they contain keys; so are media in bodies, unless --dump-media is set. Only the owner can read the files, and a
thread writes them, so that a slow disk does not delay requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import MutableMapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from bough.core.errors import ConfigError
from bough.entrypoints.http.body import PARSED
from bough.entrypoints.http.security import App, Receive, Scope, Send

_log = logging.getLogger(__name__)

FILE_BYTES = 64 * 1024 * 1024
"""Bytes after which a new file is started."""
_MOST_WAITING = 10_000
"""Maximum number of requests that wait for the disk; above it, lines are dropped and counted."""
_PATIENCE_S = 10.0
_encode = msgspec.json.Encoder().encode
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
"""Line breaks within JSON stand between its parts only."""


_BASE64 = rb"(?:[A-Za-z0-9+/_=-]|\\/)"
_MEDIA = re.compile(
    rb"(data:[\w/+.;=\\-]{0,200};base64,)((?:" + _BASE64 + rb"|,)*)|(\")(" + _BASE64 + rb'{1024,})(?=")', re.IGNORECASE
)
"""Media in JSON: data: URLs wherever they stand, and whole strings of at least 1,024 characters of base64: text of that
length has spaces."""


def without_media(body: bytes) -> bytes:
    """The JSON of a body with its media replaced by their size and digest."""

    def replaced(found: re.Match[bytes]) -> bytes:
        head, data = (found[1], found[2]) if found[1] is not None else (found[3], found[4])
        return b"%s(%d characters, sha256 %s)" % (head, len(data), sha256(data).hexdigest().encode())

    return _MEDIA.sub(replaced, body)


class Recorded(msgspec.Struct, kw_only=True):
    """One line."""

    time: float
    path: str
    status: int
    seconds: float
    body: Any
    """The JSON object that the client sent."""
    request_id: str = ""


class DumpFiles:
    """The files of one process."""

    def __init__(self, directory: Path, name: str, *, file_bytes: int = FILE_BYTES, media: bool = False) -> None:
        """`media`: keep media in bodies. Raises `ConfigError` if the directory is not writable."""
        self._media = media
        self.dropped = 0
        self._directory = directory
        self._name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}-{os.getpid()}"
        self._file_bytes = file_bytes
        self._number = 0
        self._warned = False
        """A failure to write was logged."""
        self._waiting: queue.Queue[Recorded | None] = queue.Queue(_MOST_WAITING)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file, self._size = self._open(), 0
        except OSError as error:
            raise ConfigError(
                what=f"can't write to {directory}",
                why=error.strerror or "it can't be written",
                fix="give --dump-dir a directory that can be",
                param="dump_dir",
            ) from error
        self._thread = threading.Thread(target=self._write, name="dump", daemon=True)
        self._thread.start()

    def add(self, line: Recorded) -> None:
        """Queues a line; never waits."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes the remaining lines, for a few seconds at most."""
        give_up_s = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=_PATIENCE_S)
            self._thread.join(max(0.0, give_up_s - time.monotonic()))

    def _open(self) -> int:
        self._number += 1
        path = self._directory / f"requests-{self._name}-{self._number:04d}.jsonl"
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                if not self._media and isinstance(line.body, msgspec.Raw):
                    line.body = msgspec.Raw(without_media(bytes(line.body)))
                self._append(_encode(line) + b"\n")
            except OSError as error:
                self.dropped += 1
                if not self._warned:
                    self._warned = True
                    _log.error("requests are not being dumped: %s", error)
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        """A line, whole or not at all."""
        if self._size and self._size + len(data) > self._file_bytes:
            following = self._open()
            os.close(self._file)
            self._file, self._size = following, 0
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)
        self._warned = False


class Dump:
    """ASGI middleware inside the guard, so it sees only allowed requests. Bodies that no route has parsed are not
    recorded."""

    def __init__(self, app: App, files: DumpFiles) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            await self._app(scope, receive, send)
            return
        began, began_s = time.time(), time.monotonic()
        body = bytearray()
        status = 0

        async def receive_and_keep() -> MutableMapping[str, Any]:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
            return message

        async def send_and_note(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive_and_keep, send_and_note)
        finally:
            if scope.get(PARSED):
                self._files.add(
                    Recorded(
                        time=began,
                        path=scope["path"],
                        status=status,
                        seconds=time.monotonic() - began_s,
                        body=msgspec.Raw(body.translate(_ONE_LINE)),
                        request_id=scope.get("bough.request_id", ""),
                    )
                )
