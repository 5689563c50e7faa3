"""A connection of whole frames between two processes, over a Unix socket or TCP.

Over TCP both ends prove that they know the same secret before anything else is read, and every frame carries a MAC over
its bytes and its number in the stream: others on the network can read frames but not forge, repeat or drop them
unnoticed. Over a Unix socket the permissions of the private directory protect the connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time

from bough.config.hosts import LEAST_SECRET
from bough.core.errors import BoughError, ConfigError

_HEAD = struct.Struct("<I")
_MOST_BYTES = 1 << 30
_CODE_BYTES = 16
_NONCE_BYTES = 32
_GREETING = b"bough link 1\n"
_GREETING_S = 10.0
"""Seconds that the other end has to prove that it knows the secret."""
_RETRY_S = 0.05


class NotTrusted(BoughError):
    """The other end of a connection does not know the secret, or a frame was changed on the way."""

    code = "not_trusted"


class Link:
    """One end of a connection. Calls block; one thread may send while another receives."""

    def __init__(self, connected: socket.socket, keys: tuple[bytes, bytes] | None) -> None:
        """`keys`: MAC keys of sent and of received frames."""
        self._socket = connected
        self._keys = keys
        self._sent = self._received = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """From now on `send` and `receive` raise TimeoutError if no byte is transferred for `timeout_s`."""
        self._socket.settimeout(timeout_s)

    def send(self, frame: bytes) -> None:
        """Raises OSError if the other end is gone."""
        head = _HEAD.pack(len(frame))
        if self._keys is not None:
            head += self._code(self._keys[0], self._sent, frame)
        self._sent += 1
        self._socket.sendall(head + frame if len(frame) < 1 << 16 else head)
        if len(frame) >= 1 << 16:
            self._socket.sendall(frame)

    def receive(self) -> bytes:
        """The next frame. Raises ConnectionError at the stream's end, `NotTrusted` if it was tampered with."""
        (length,) = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > _MOST_BYTES:
            raise NotTrusted(what=f"a frame of {length} bytes was announced")
        code = self._exactly(_CODE_BYTES) if self._keys is not None else b""
        frame = self._exactly(length)
        if self._keys is not None and not hmac.compare_digest(code, self._code(self._keys[1], self._received, frame)):
            raise NotTrusted(what="a frame was not made by the other end of the connection")
        self._received += 1
        return frame

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _code(self, key: bytes, number: int, frame: bytes) -> bytes:
        return hashlib.blake2b(frame, digest_size=_CODE_BYTES, key=key, salt=number.to_bytes(16, "little")).digest()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray(count)
        view, have = memoryview(parts), 0
        while have < count:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionResetError("the other end has closed the connection")
            have += got
        return bytes(parts)


class Listener:
    """Accepts links. `address` is a path, or host:port (port 0: any free port)."""

    def __init__(self, address: str, secret: str = "") -> None:
        """Raises `ConfigError` if the address cannot be bound, or if it is host:port and there is no secret."""
        self._secret = secret
        family, place = resolve(address)
        if family != socket.AF_UNIX:
            _check_secret(address, secret)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_UNIX:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                what=f"{address} can't be listened on",
                why=str(error.strerror or error),
                fix="choose another address or port",
            ) from error
        self._socket.listen(128)
        self.address = address
        if family != socket.AF_UNIX:
            host, port = self._socket.getsockname()[:2]
            self.address = show_address(host, port)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def set_timeout(self, timeout_s: float | None) -> None:
        """From now on `accept` raises TimeoutError if there is no connection for `timeout_s`."""
        self._socket.settimeout(timeout_s)

    def accept(self) -> Link:
        """The next connection that proved itself. Raises `NotTrusted` for one that did not, OSError once closed."""
        connected, _ = self._socket.accept()
        return self.greet(connected)

    def accept_unproven(self) -> socket.socket:
        """The next connection, for `greet` in another thread."""
        return self._socket.accept()[0]

    def greet(self, connected: socket.socket) -> Link:
        """A link over a connection that was accepted."""
        if connected.family == socket.AF_UNIX:
            return Link(connected, None)
        try:
            return _greet(connected, self._secret, is_server=True)
        except BaseException:
            connected.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread in `accept`
        self._socket.close()


def connect(address: str, secret: str = "", timeout_s: float = 30.0) -> Link:
    """Connects to a listener, which may start later. Raises `TimeoutError` if it does not start in time, `NotTrusted`
    if it does not know the secret."""
    family, place = resolve(address)
    if family != socket.AF_UNIX:
        _check_secret(address, secret)
    give_up_s = time.monotonic() + timeout_s
    while True:
        attempt = socket.socket(family, socket.SOCK_STREAM)
        try:
            attempt.settimeout(max(0.1, min(5.0, give_up_s - time.monotonic())))
            attempt.connect(place)
            if family == socket.AF_UNIX:
                attempt.settimeout(None)
                return Link(attempt, None)
            return _greet(attempt, secret, is_server=False)
        except OSError as error:
            attempt.close()
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{address} did not answer within {timeout_s:g} s: {error}") from error
            time.sleep(_RETRY_S)
        except BaseException:
            attempt.close()
            raise


def resolve(address: str) -> tuple[int, str | tuple[str, int]]:
    """The socket family of an address, and the argument for `socket.connect`. Raises `ConfigError` if the address is
    invalid."""
    if address.startswith("/"):
        return socket.AF_UNIX, address
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return family, (host, port)


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[host]:port` -> both. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535 or not host:
        raise ConfigError(
            what=f"{address!r} is no address", why="it must be host:port", fix="for example 10.0.0.1:20000"
        )
    return host.strip("[]"), int(port)


def show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_secret(address: str, secret: str) -> None:
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            what=f"a connection over the network ({address}) needs a secret of at least {LEAST_SECRET} characters",
            why="everybody who can reach the port could take part otherwise",
            fix="set the same BOUGH_DIST_SECRET (or --dist-secret) on every machine",
            param="dist_secret",
        )


def _greet(connected: socket.socket, secret: str, *, is_server: bool) -> Link:
    """Both ends send a nonce, and then a MAC of both nonces, which proves that they know the secret."""
    connected.settimeout(_GREETING_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain = Link(connected, None)
    mine = secrets.token_bytes(_NONCE_BYTES)
    try:
        connected.sendall(_GREETING + mine)
        head = plain._exactly(len(_GREETING))
        if head != _GREETING:
            raise NotTrusted(what="the other end is no bough", why=f"it said {head[:16]!r}", fix="check the address")
        theirs = plain._exactly(_NONCE_BYTES)
        nonces = mine + theirs if is_server else theirs + mine
        session = hmac.digest(secret.encode(), nonces, "sha256")
        keys = [hashlib.blake2b(session, digest_size=32, person=who).digest() for who in (b"of server", b"of client")]
        to, back = keys if is_server else keys[::-1]
        connected.sendall(hmac.digest(to, b"proof", "sha256"))
        proof = plain._exactly(32)
    except (ConnectionError, TimeoutError) as error:
        raise NotTrusted(
            what="the other end hung up before it proved itself",
            why=str(error),
            fix="check that BOUGH_DIST_SECRET is the same on every machine",
        ) from error
    if not hmac.compare_digest(proof, hmac.digest(back, b"proof", "sha256")):
        raise NotTrusted(
            what="the other end does not know the secret",
            why="BOUGH_DIST_SECRET (or --dist-secret) differs between the machines, or another program answers there",
            fix="set the same secret on every machine",
        )
    connected.settimeout(None)
    return Link(connected, (to, back))
