"""The writing end of a channel.

The sending thread writes to the kernel, and the reader reads from it: there is no thread in between. What the kernel
does not accept is kept in the writer's memory, and a background thread writes it; the thread ends when nothing is left.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from bough.core.errors import BoughError, Unavailable
from bough.ipc.codec import FRAME_HEAD, MAX_MESSAGE_BYTES, encoder

_LINGER_S = 2.0
"""Seconds that a closing writer waits for its last messages to be written."""
_RETRY_S = (0.01, 0.2)
"""Seconds between two attempts to connect to the reader: at first, and at most."""
_SOCKET_BYTES = 1 << 22
"""Bytes of kernel buffer requested per connection; the kernel may give less."""
_FRAMES_PER_CALL = 256
_GATHERED = 32
"""Maximum number of frames that are gathered in one iteration of the loop before they are written."""


class MessageTooLarge(BoughError):
    """A message is larger than the channel allows."""

    status = 413
    type = "invalid_request_error"
    code = "message_too_large"


_open: weakref.WeakSet[Outbox] = weakref.WeakSet()
"""Writers that may still hold frames, for `flush`."""


class Outbox:
    """The writing end. Never blocks: frames that the reader has not taken yet are kept in memory. One thread at a time.

    Messages about running requests need no limit here: admission limits the requests, even if the reader is stopped for
    long. Messages of clients do need one, because a client that gives up makes room for another: `max_held_bytes` is
    for that direction.
    """

    def __init__(self, address: str, *, max_bytes: int = MAX_MESSAGE_BYTES, max_held_bytes: int | None = None) -> None:
        """`max_held_bytes`: `send_all` raises if more than this is held; None: no limit."""
        self._address = address
        self._encode = encoder().encode
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._lock = threading.Lock()
        """Protects the fields below, which the sender and the background thread share."""
        self._socket: socket.socket | None = None
        self._held: deque[bytes] = deque()
        """Frames that were not written completely, including their length fields."""
        self._begun = 0
        """Bytes of the first held frame that were written."""
        self._held_bytes = 0
        """Total size of the held frames."""
        self._pump: threading.Thread | None = None
        self._give_up_s = float("inf")
        self._closed = False
        _open.add(self)

    def send(self, message: Any) -> None:
        """Sends one struct, regardless of how much is held. Raises `MessageTooLarge` instead of breaking the reader's
        connection."""
        self._put([self._frame(message)])

    def send_encoded(self, frame: bytes) -> None:
        """Sends a struct that is already encoded (once for several readers)."""
        self._put([FRAME_HEAD.pack(len(frame)) + frame])

    def send_all(self, messages: Iterable[Any]) -> None:
        """Sends several structs; the reader may receive them at once. Raises `Unavailable` if the reader has not read
        for long."""
        if self._max_held_bytes is not None and self._held_bytes > self._max_held_bytes:
            raise Unavailable(
                what="the engine does not take requests",
                why=f"{self._held_bytes} bytes wait for it already: it is busy with a long step, or stuck",
                fix="try again later",
            )
        frames = []
        for message in messages:
            frames.append(self._frame(message))
            if len(frames) == _FRAMES_PER_CALL:
                self._put(frames)
                frames = []
        if frames:
            self._put(frames)

    def close(self, wait_s: float = _LINGER_S) -> None:
        """Closes the writer. The background thread writes the last messages for at most `wait_s` seconds."""
        with self._lock:
            self._closed = True
            self._give_up_s = min(self._give_up_s, time.monotonic() + wait_s)
            if self._pump is None:
                self._disconnect()

    def join(self, until_s: float) -> None:
        """Waits for the last messages of a closed writer."""
        pump = self._pump
        if pump is not None:
            pump.join(max(0.0, until_s - time.monotonic()))

    def _frame(self, message: Any) -> bytes:
        frame: bytes = self._encode(message)
        if len(frame) > self._max_bytes:
            raise MessageTooLarge(
                what=f"a message of {len(frame)} bytes can't be sent between processes",
                why=f"the limit is {self._max_bytes} bytes",
                fix="ask for less at once (shorter prompt, fewer log-probabilities or hidden states)",
            )
        return FRAME_HEAD.pack(len(frame)) + frame

    def _put(self, frames: list[bytes]) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("this writer was closed")
            self._held.extend(frames)
            self._held_bytes += sum(map(len, frames))
            self._begin_writing()

    def _begin_writing(self) -> None:
        """Writes what the kernel accepts and leaves the rest to the background thread. The caller holds the lock."""
        if self._pump is None and not self._write():
            pump = threading.Thread(target=self._keep_writing, name="outbox", daemon=True)
            pump.start()
            self._pump = pump

    def _write(self) -> bool:
        """Writes what the kernel accepts. Returns whether that was everything."""
        while self._held:
            if self._socket is None and not self._connect():
                return False
            assert self._socket is not None
            try:
                if len(self._held) == 1 and not self._begun:
                    count = self._socket.send(self._held[0], socket.MSG_NOSIGNAL)
                else:
                    count = self._socket.sendmsg(self._views(), (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                self._disconnect()
                if self._begun:  # a reader that got part of a frame must not get its beginning again
                    self._drop_first()
                    self._begun = 0
                continue
            self._forget(count)
        return True

    def _views(self) -> list[memoryview]:
        views = [memoryview(self._held[at]) for at in range(min(len(self._held), _FRAMES_PER_CALL))]
        views[0] = views[0][self._begun :]
        return views

    def _forget(self, count: int) -> None:
        """Removes `count` written bytes from the held frames."""
        count += self._begun
        while self._held and count >= len(self._held[0]):
            count -= self._drop_first()
        self._begun = count

    def _drop_first(self) -> int:
        """Removes the first frame and returns its length."""
        length = len(self._held.popleft())
        self._held_bytes -= length
        return length

    def _connect(self) -> bool:
        attempt: socket.socket | None = None
        try:
            attempt = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            attempt.setblocking(False)
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            attempt.connect(self._address)
        except OSError:  # the reader is not there (yet), its backlog is full, or no descriptor is left here
            if attempt is not None:
                attempt.close()
            return False
        self._socket = attempt
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _keep_writing(self) -> None:
        """Writes until nothing is left, or until the time after `close` is over."""
        pause_s = _RETRY_S[0]
        while True:
            with self._lock:
                done = self._write()
                if done or time.monotonic() >= self._give_up_s:
                    self._pump = None
                    if self._closed:
                        self._held.clear()
                        self._held_bytes = 0
                        self._disconnect()
                    return
                connected = self._socket
            if connected is None:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S[1])
            else:
                pause_s = _RETRY_S[0]
                room = select.poll()
                room.register(connected, select.POLLOUT)
                room.poll(50)


class AsyncOutbox(Outbox):
    """The writing end for one asyncio loop. The first frame of an iteration of the loop is written immediately, so that
    the reader can start. Further frames of `send_all` are gathered and written together, at the end of the iteration or
    when there are many."""

    def __init__(self, address: str, *, max_held_bytes: int | None = None) -> None:
        super().__init__(address, max_held_bytes=max_held_bytes)
        self._loop = asyncio.get_running_loop()
        self._gathering = False

    def send(self, message: Any) -> None:
        """Sends one struct immediately, after the gathered ones: there may be no further iteration of the loop."""
        super().send(message)
        with self._lock:
            super()._begin_writing()

    def _begin_writing(self) -> None:
        if not self._gathering:
            self._gathering = True
            self._loop.call_soon(self._end_turn)
            super()._begin_writing()
        elif len(self._held) >= _GATHERED:
            super()._begin_writing()

    def _end_turn(self) -> None:
        with self._lock:
            self._gathering = False
            super()._begin_writing()

    def close(self, wait_s: float = _LINGER_S) -> None:
        self._end_turn()
        super().close(wait_s)


def flush() -> None:
    """Closes every writer of this process and waits (at most two seconds) until all held frames are written."""
    until_s = time.monotonic() + _LINGER_S
    writers = list(_open)
    for writer in writers:
        writer.close()
    for writer in writers:
        writer.join(until_s)
