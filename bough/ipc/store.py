"""A small key-value store through which ranks find each other: one process holds it, the others set, read, add and wait
for keys.

The server belongs to one generation of a group of ranks. A client states its generation when it connects; a process of
an earlier start is refused.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from bough.core.errors import BoughError, Unavailable
from bough.ipc.link import Link, Listener, NotTrusted, connect

Operation = Literal["hello", "set", "get", "add", "wait", "check", "compare_set", "delete", "count"]

ANY_GENERATION = -1


class StaleRank(BoughError):
    """A process of an earlier start of the group tried to join this one."""

    code = "stale_rank"


class _Ask(Struct, array_like=True):
    do: Operation
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    number: int = 0
    timeout_s: float = 0.0


class _Answer(Struct, array_like=True):
    ok: bool = True
    value: bytes = b""
    number: int = 0
    error: str = ""


_asks = msgspec.msgpack.Decoder(_Ask)
_answers = msgspec.msgpack.Decoder(_Answer)
_encode = msgspec.msgpack.Encoder().encode


class StoreServer:
    """Holds the values. One thread per connection: there are as many as ranks, and they are idle once all ranks have
    joined."""

    def __init__(self, listeners: Sequence[Listener], *, generation: int = 0) -> None:
        """Serves from now on, until `close`."""
        self.generation = generation
        self._listeners = list(listeners)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._links: set[Link] = set()
        self._closed = False
        for listener in self._listeners:
            threading.Thread(target=self._listen, args=(listener,), name="store", daemon=True).start()

    def local(self) -> LocalStore:
        """Access to the same values from this process."""
        return LocalStore(self)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            links = list(self._links)
            self._changed.notify_all()
        for listener in self._listeners:
            listener.close()
        for link in links:
            link.close()

    def _listen(self, listener: Listener) -> None:
        while not self._closed:
            try:
                connected = listener.accept_unproven()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(listener, connected), name="store-link", daemon=True).start()

    def _serve(self, listener: Listener, connected: socket.socket) -> None:
        try:
            link = listener.greet(connected)
        except (OSError, NotTrusted):
            return
        with self._changed:
            self._links.add(link)
        try:
            while True:
                link.send(_encode(self.answer(_asks.decode(link.receive()))))
        except (OSError, NotTrusted, msgspec.DecodeError):
            return
        finally:
            with self._changed:
                self._links.discard(link)
            link.close()

    def answer(self, ask: _Ask) -> _Answer:
        with self._changed:
            match ask.do:
                case "hello":
                    if ask.number not in (ANY_GENERATION, self.generation):
                        return _Answer(
                            ok=False,
                            error=f"it is of generation {ask.number}, the group is of generation {self.generation}",
                        )
                    return _Answer(number=self.generation)
                case "set":
                    self._values[ask.keys[0]] = ask.value
                    self._changed.notify_all()
                    return _Answer()
                case "get" | "wait":
                    ok = self._changed.wait_for(lambda: self._closed or self._has(ask.keys), ask.timeout_s or None)
                    if not ok or self._closed:
                        return _Answer(ok=False)
                    return _Answer(value=self._values[ask.keys[0]] if ask.do == "get" else b"")
                case "add":
                    number = int(self._values.get(ask.keys[0], b"0")) + ask.number
                    self._values[ask.keys[0]] = str(number).encode()
                    self._changed.notify_all()
                    return _Answer(number=number)
                case "check":
                    return _Answer(ok=self._has(ask.keys))
                case "compare_set":
                    return _Answer(value=self._compare_set(ask.keys[0], ask.expected, ask.value))
                case "delete":
                    return _Answer(ok=self._values.pop(ask.keys[0], None) is not None)
                case "count":
                    return _Answer(number=len(self._values))

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        held = self._values.get(key)
        if held == expected or (held is None and not expected):
            self._values[key] = held = value
            self._changed.notify_all()
        return expected if held is None else held


class _Calls:
    """The calls, common to both ways of access."""

    def __init__(self, ask: Callable[[_Ask], _Answer]) -> None:
        self._ask = ask

    def set(self, key: str, value: bytes) -> None:
        self._ask(_Ask("set", (key,), value))

    def get(self, key: str, timeout_s: float = 0.0) -> bytes:
        """Waits until the key is set (`timeout_s` 0: without limit). Raises TimeoutError."""
        answer = self._ask(_Ask("get", (key,), timeout_s=timeout_s))
        if not answer.ok:
            raise TimeoutError(f"{key} was not set within {timeout_s:g} s")
        return answer.value

    def wait(self, keys: Sequence[str], timeout_s: float = 0.0) -> bool:
        """Waits until all keys are set. Returns False if they are not within `timeout_s` (0: without limit)."""
        return self._ask(_Ask("wait", tuple(keys), timeout_s=timeout_s)).ok

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(_Ask("check", tuple(keys))).ok

    def add(self, key: str, amount: int) -> int:
        """Adds to the number at `key`, initially 0, and returns the sum."""
        return self._ask(_Ask("add", (key,), number=amount)).number

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Sets the value if it is `expected` (or, if `expected` is empty, not set). Returns the value afterwards."""
        return self._ask(_Ask("compare_set", (key,), value, expected)).value

    def delete(self, key: str) -> bool:
        return self._ask(_Ask("delete", (key,))).ok

    def count(self) -> int:
        return self._ask(_Ask("count")).number


class LocalStore(_Calls):
    """Access to the store in the process that holds it."""

    def __init__(self, server: StoreServer) -> None:
        super().__init__(server.answer)


class Store(_Calls):
    """Access to the store from another process. Threads may share it; calls are executed one after another."""

    def __init__(
        self,
        address: str,
        *,
        secret: str = "",
        generation: int = ANY_GENERATION,
        timeout_s: float = 600.0,
        answer_s: float | None = None,
    ) -> None:
        """Connects. Raises `Unavailable` if there is no answer, `StaleRank` if the group is of another generation.

        `answer_s`: maximum seconds for an answer, for calls that do not wait for a key; None: no limit.
        """
        super().__init__(self._exchange)
        self._lock = threading.Lock()
        self._address = address
        try:
            self._link = connect(address, secret, timeout_s)
        except TimeoutError as error:
            raise Unavailable(
                what=f"the ranks' meeting place {address} can't be reached",
                why=str(error),
                fix="check --dist-init-addr, that node 0 runs, and that its port is open",
            ) from error
        hello = self._exchange(_Ask("hello", number=generation))
        if not hello.ok:
            self._link.close()
            raise StaleRank(what="this process belongs to an earlier start of the group", why=hello.error)
        self.generation = hello.number
        self._link.set_timeout(answer_s)

    def close(self) -> None:
        self._link.close()

    def _exchange(self, ask: _Ask) -> _Answer:
        with self._lock:
            try:
                self._link.send(_encode(ask))
                return _answers.decode(self._link.receive())
            except OSError as error:
                raise Unavailable(what=f"the ranks' meeting place {self._address} is gone", why=str(error)) from error


AnyStore = LocalStore | Store


def wait_for_all(
    store: AnyStore, keys: dict[str, str], timeout_s: float, tell: Callable[[list[str]], None], every_s: float = 10.0
) -> list[str]:
    """Waits until all keys are set. The values of `keys` name who sets each key. Missing ones are reported to `tell`
    every few seconds, and returned when the time is over."""
    give_up_s = time.monotonic() + timeout_s
    missing = dict(keys)
    while True:
        store.wait(list(missing), max(0.01, min(every_s, give_up_s - time.monotonic())))
        missing = {key: who for key, who in missing.items() if not store.check([key])}
        if not missing or time.monotonic() >= give_up_s:
            return list(missing.values())
        tell(list(missing.values()))
