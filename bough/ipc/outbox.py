"""The writing end of a channel.

A writer's bytes go to the kernel in the thread that sends, and the reader takes them from there: no thread stands between
the two. What the kernel has no room for waits in the writer's memory, for a thread that lives as long as there is such.
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
"""How long a closing writer waits for its last messages to leave."""
_RETRY_S = (0.01, 0.2)
"""Between two tries to reach the reader: at first, and at most."""
_SOCKET_BYTES = 1 << 22
"""Asked of the kernel for each connection; it may give less."""
_FRAMES_PER_CALL = 256
_GATHERED = 32
"""Frames of one turn that wait for its end."""


class MessageTooLarge(BoughError):
    """A message exceeds what a channel carries."""

    status = 413
    type = "invalid_request_error"
    code = "message_too_large"


_open: weakref.WeakSet[Outbox] = weakref.WeakSet()
"""Writers that may still hold something, for `flush`."""


class Outbox:
    """The writing end. Never blocks: what the reader has not taken yet waits in memory. One thread at a time.

    News of requests need no bound here: however long the reader is stopped, they are those of the requests that it has
    let in. What clients send does: whoever gives up makes room for the next, so `max_held_bytes` is for that direction.
    """

    def __init__(self, address: str, *, max_bytes: int = MAX_MESSAGE_BYTES, max_held_bytes: int | None = None) -> None:
        """`max_held_bytes`: with more than so many waiting, `send_all` refuses; None: it never does."""
        self._address = address
        self._encode = encoder().encode
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._lock = threading.Lock()
        """Of everything below, between the sender and the pump."""
        self._socket: socket.socket | None = None
        self._held: deque[bytes] = deque()
        """Frames that have not left, heads included..."""
        self._begun = 0
        """...and how many bytes of the first have."""
        self._held_bytes = 0
        """Of all frames that are held."""
        self._pump: threading.Thread | None = None
        self._give_up_s = float("inf")
        self._closed = False
        _open.add(self)

    def send(self, message: Any) -> None:
        """Sends one struct, however much waits. Raises `MessageTooLarge` instead of breaking the reader's connection."""
        self._put([self._frame(message)])

    def send_encoded(self, frame: bytes) -> None:
        """Sends a struct that was encoded already, for several readers."""
        self._put([FRAME_HEAD.pack(len(frame)) + frame])

    def send_all(self, messages: Iterable[Any]) -> None:
        """Sends many; the reader may see them at once. Raises `Unavailable` if it takes nothing for long."""
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
        """Closes; in the background, the last messages get `wait_s` to leave."""
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
        """Gives the kernel what it takes, and the rest to the pump. The lock is held."""
        if self._pump is None and not self._write():
            pump = threading.Thread(target=self._keep_writing, name="outbox", daemon=True)
            pump.start()
            self._pump = pump

    def _write(self) -> bool:
        """Gives the kernel what it takes. Returns whether that was everything."""
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
                if self._begun:  # whoever would not take all of it must not get it again
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
        """So many bytes have left."""
        count += self._begun
        while self._held and count >= len(self._held[0]):
            count -= self._drop_first()
        self._begun = count

    def _drop_first(self) -> int:
        """Lets go of the first frame and returns its length."""
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
        except OSError:  # the reader is not there (yet), has many at its door, or no descriptor is left here
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
        """Until everything has left, or the writer was closed and its time is up."""
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
    """The writing end, for one asyncio loop. What a turn of it sends first leaves at once, so that the reader begins; of
    the rest, what is sent by `send_all` leaves together, when the turn ends or much has gathered."""

    def __init__(self, address: str, *, max_held_bytes: int | None = None) -> None:
        super().__init__(address, max_held_bytes=max_held_bytes)
        self._loop = asyncio.get_running_loop()
        self._gathering = False

    def send(self, message: Any) -> None:
        """Sends one struct at once, after those that were gathered: there may be no further turn."""
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
    """Closes every writer of this process and waits (at most two seconds) until what they held has left."""
    until_s = time.monotonic() + _LINGER_S
    writers = list(_open)
    for writer in writers:
        writer.close()
    for writer in writers:
        writer.join(until_s)
