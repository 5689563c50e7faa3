"""Channels over ZMQ: many writers push to one reader.

A frame that can't be decoded is dropped and counted, never raised: one broken writer must not stop the reader.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import zmq

from bough.core.errors import BoughError
from bough.ipc.codec import Codec, encoder

T = TypeVar("T")

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 512 * 1024 * 1024
_MOST_PER_DRAIN = 4096
"""Messages taken at once, so that a flood can't keep the reader from its own work."""
_LINGER_MS = 2000
"""How long a closing writer waits for its last messages to leave."""


class MessageTooLarge(BoughError):
    """A message exceeds what a channel carries."""

    status = 413
    type = "invalid_request_error"
    code = "message_too_large"


class _Reader(Generic[T]):
    """A bound socket and its decoder."""

    def __init__(self, address: str, message_type: Any, max_bytes: int) -> None:
        self.num_malformed = 0
        self._codec: Codec[T] = Codec(message_type)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self._socket.bind(address)

    def take(self) -> list[T]:
        """Everything that has arrived, without waiting."""
        messages: list[T] = []
        for _ in range(_MOST_PER_DRAIN):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if self._socket.getsockopt(zmq.RCVMORE):
                self._skip_rest()
                self._drop("more than one frame")
                continue
            try:
                messages.append(self._codec.decode(frame))
            except ValueError as error:
                self._drop(str(error))
        return messages

    def _skip_rest(self) -> None:
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv()

    def _drop(self, why: str) -> None:
        self.num_malformed += 1
        if self.num_malformed <= 10:
            _log.warning("dropped a message: %s", why)


class Inbox(_Reader[T]):
    """The reading end, for a process with a loop of its own. Only `close` may be called from other threads."""

    def __init__(self, address: str, message_type: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(address, message_type, max_bytes)
        self.closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    def drain(self, block_s: float = 0.0) -> list[T]:
        """What has arrived. Waits at most `block_s` for a first message; `close` ends the wait."""
        messages = self.take()
        if messages or block_s <= 0 or self.closed:
            return messages
        self._poller.poll(math.ceil(block_s * 1000))
        return self.take()

    def close(self) -> None:
        """Marks the inbox closed and wakes `drain`. Safe in signal handlers and from any thread."""
        self.closed = True
        os.eventfd_write(self._wake, 1)

    def release(self) -> None:
        """Frees the socket. The reader's own thread only, after its loop."""
        self.closed = True
        self._socket.close(0)


class AsyncInbox(_Reader[T]):
    """The reading end, for one asyncio loop."""

    def __init__(self, address: str, message_type: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(address, message_type, max_bytes)
        self.closed = False
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._arrived.set)

    async def drain(self) -> list[T]:
        """Waits for messages and returns all that have arrived; an empty list once closed."""
        while not self.closed:
            # The socket's descriptor is edge-triggered: look at the socket itself before each wait.
            self._arrived.clear()
            messages = self.take()
            if messages:
                return messages
            await self._arrived.wait()
        return []

    def close(self) -> None:
        """Ends `drain` and frees the socket. Call in the loop's thread."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._socket.FD)
            self._arrived.set()
            self._socket.close(0)


class Outbox:
    """The writing end. Never blocks: what the reader has not taken yet waits in memory. One thread at a time."""

    def __init__(self, address: str, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._encode = encoder().encode
        self._max_bytes = max_bytes
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(address)

    def send(self, message: Any) -> None:
        """Sends one struct. Raises `MessageTooLarge` instead of breaking the reader's connection."""
        frame = self._encode(message)
        if len(frame) > self._max_bytes:
            raise MessageTooLarge(
                what=f"a message of {len(frame)} bytes can't be sent between processes",
                why=f"the limit is {self._max_bytes} bytes",
                fix="ask for less at once (shorter prompt, fewer log-probabilities or hidden states)",
            )
        self._socket.send(frame)

    def send_all(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self.send(message)

    def close(self, wait_s: float = _LINGER_MS / 1000) -> None:
        """Closes; in the background, the last messages get `wait_s` to leave."""
        self._socket.close(round(wait_s * 1000))


def flush() -> None:
    """Closes every socket of this process and waits (at most two seconds) until what writers held has left."""
    zmq.Context.instance().destroy(linger=_LINGER_MS)
