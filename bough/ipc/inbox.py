"""The reading end of a channel: one reader binds a Unix socket, and many writers send to it.

A frame that cannot be decoded is dropped and counted, not raised: one broken writer must not stop the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from bough.ipc.codec import FRAME_HEAD, MAX_MESSAGE_BYTES, Codec

T = TypeVar("T")

_log = logging.getLogger(__name__)

_MOST_PER_DRAIN = 4096
"""Maximum number of messages per `drain`, so that a flood does not keep the reader from its other work."""
_DOOR_PAUSE_S = 0.001
"""Seconds between two attempts to accept a connection if no file descriptor is free: nothing signals when one becomes
free."""
_READ_BYTES = 1 << 18


class _Connection:
    """The connection of one writer, and the bytes of a frame that has not arrived completely."""

    __slots__ = ("have", "partial", "socket")

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.partial = bytearray()
        self.have = 0
        """Bytes of `partial` that have arrived, once `partial` has the length of its frame."""


class _Reader(ABC, Generic[T]):
    """A bound socket, its connections and their decoder."""

    def __init__(self, address: str, message_type: Any, max_bytes: int) -> None:
        self.num_malformed = 0
        self._codec: Codec[T] = Codec(message_type)
        self._max_bytes = max_bytes
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._connections: dict[int, _Connection] = {}
        self._told_of_door = False
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        self._door.bind(address)
        self._door.listen(128)

    @abstractmethod
    def _watch(self, descriptor: int) -> None:
        """Registers a descriptor: from now on `_look` is called when it is readable."""

    @abstractmethod
    def _unwatch(self, descriptor: int) -> None: ...

    def _look(self, descriptor: int, messages: list[T]) -> bool:
        """Reads once from a descriptor that may be readable. Returns whether there may be more."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            return self._read_one(connection, messages)
        return descriptor == self._door.fileno() and self._accept()

    def _accept(self) -> bool:
        """Accepts a connection, if one is waiting."""
        try:
            connected, _ = self._door.accept()
        except (BlockingIOError, ConnectionError):
            return False
        except OSError as error:  # no descriptor is left: it stays in the backlog, and open connections continue
            if not self._told_of_door:
                self._told_of_door = True
                _log.warning("a writer can't be let in yet: %s", error)
            time.sleep(_DOOR_PAUSE_S)
            return False
        connected.setblocking(False)
        self._connections[connected.fileno()] = _Connection(connected)
        self._watch(connected.fileno())
        return True

    def _read_one(self, connection: _Connection, messages: list[T]) -> bool:
        """Reads once from a connection; the rest of a large frame is read directly into its buffer.

        Returns whether there may be more.
        """
        large = connection.have > 0
        target = memoryview(connection.partial)[connection.have :] if large else self._buffer
        try:
            count = connection.socket.recv_into(target)
        except BlockingIOError:
            return False
        except ConnectionError:
            count = 0
        if not count:
            self._part(connection, "a writer ended within a message" if connection.partial else "")
            return False
        if large:
            connection.have += count
            if connection.have == len(connection.partial):
                frame, connection.partial, connection.have = connection.partial, bytearray(), 0
                self._decode(memoryview(frame)[FRAME_HEAD.size :], messages)
            return True
        data = target[:count]
        if connection.partial:
            connection.partial += data
            data = memoryview(bytes(connection.partial))
            connection.partial = bytearray()
        self._split(connection, data, messages)
        return count == len(target)

    def _split(self, connection: _Connection, data: memoryview, messages: list[T]) -> None:
        begin, size = 0, len(data)
        while size - begin >= FRAME_HEAD.size:
            (length,) = FRAME_HEAD.unpack_from(data, begin)
            if length > self._max_bytes:
                self._part(connection, f"{length} bytes, at most {self._max_bytes} are taken")
                return
            end = begin + FRAME_HEAD.size + length
            if end > size:
                break
            self._decode(data[begin + FRAME_HEAD.size : end], messages)
            begin = end
        if begin < size:
            rest = data[begin:]
            if size - begin >= FRAME_HEAD.size and end - begin > _READ_BYTES:
                connection.partial = bytearray(end - begin)
                connection.partial[: len(rest)] = rest
                connection.have = len(rest)
            else:
                connection.partial = bytearray(rest)

    def _decode(self, frame: memoryview, messages: list[T]) -> None:
        try:
            messages.append(self._codec.decode(frame))
        except ValueError as error:
            self._drop(str(error))

    def _part(self, connection: _Connection, why: str) -> None:
        """Closes a connection. `why` is not empty if a message was lost."""
        descriptor = connection.socket.fileno()
        self._unwatch(descriptor)
        del self._connections[descriptor]
        connection.socket.close()
        if why:
            self._drop(why)

    def _drop(self, why: str) -> None:
        self.num_malformed += 1
        if self.num_malformed <= 10:
            _log.warning("dropped a message: %s", why)

    def _free(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._door.close()


class Inbox(_Reader[T]):
    """The reading end for a process with its own loop. Only `close` may be called from other threads."""

    def __init__(
        self, address: str, message_type: Any, *, max_bytes: int = MAX_MESSAGE_BYTES, spin_s: float = 0.0
    ) -> None:
        """`spin_s`: `drain` polls without sleeping until this many seconds after the last message or the last `drain`
        that did not wait. A writer that writes again soon then finds the reader awake, with its code and data in the
        CPU's caches."""
        super().__init__(address, message_type, max_bytes)
        self.closed = False
        self._spin_s = spin_s
        self._busy_s = 0.0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._watch(self._door.fileno())
        self._watch(self._wake)

    def drain(self, block_s: float = 0.0) -> list[T]:
        """Returns the messages that have arrived. Waits at most `block_s` seconds for a first one; `close` ends the
        wait."""
        messages = self._read(self._epoll.poll(0))
        if not messages and block_s > 0 and not self.closed:
            messages = self._wait(block_s)
        if self._spin_s and (messages or block_s <= 0):
            self._busy_s = time.monotonic()
        return messages

    def _watch(self, descriptor: int) -> None:
        self._epoll.register(descriptor, select.EPOLLIN)

    def _unwatch(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)

    def _read(self, ready: list[tuple[int, int]]) -> list[T]:
        messages: list[T] = []
        while ready:
            more = False
            for descriptor, _ in ready:
                more |= self._look(descriptor, messages)
            if not more or len(messages) >= _MOST_PER_DRAIN:
                break
            ready = self._epoll.poll(0)
        return messages

    def _wait(self, block_s: float) -> list[T]:
        now = time.monotonic()
        give_up_s = now + block_s
        spin_until_s = min(self._busy_s + self._spin_s, give_up_s)
        while now < give_up_s and not self.closed:
            ready = self._epoll.poll(0 if now < spin_until_s else give_up_s - now)
            if ready:
                messages = self._read(ready)
                if messages:
                    return messages
            now = time.monotonic()
        return []

    def close(self) -> None:
        """Marks the inbox closed and wakes `drain`. Safe in signal handlers and from any thread."""
        self.closed = True
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def release(self) -> None:
        """Frees the socket. Call it in the reader's thread, after its loop."""
        self.closed = True
        self._free()
        self._epoll.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)


class AsyncInbox(_Reader[T]):
    """The reading end for one asyncio loop: messages are delivered in the iteration of the loop that reads them."""

    def __init__(
        self, address: str, message_type: Any, hear: Callable[[list[T]], None], *, max_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """`hear` is called in the loop with messages as they arrive, in the order of each writer."""
        super().__init__(address, message_type, max_bytes)
        self.closed = False
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._watch(self._door.fileno())

    def _watch(self, descriptor: int) -> None:
        self._loop.add_reader(descriptor, self._arrived, descriptor)

    def _unwatch(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)

    def _arrived(self, descriptor: int) -> None:
        """Reads once. If there is more, the next iteration of the loop reads it, so that other work runs in between."""
        messages: list[T] = []
        self._look(descriptor, messages)
        if messages:
            self._hear(messages)

    def close(self) -> None:
        """Frees the socket; no more messages are delivered. Call it in the loop's thread."""
        if not self.closed:
            self.closed = True
            for descriptor in (self._door.fileno(), *self._connections):
                self._unwatch(descriptor)
            self._free()
