"""Sockets to serve on: bound before anything is started, so that a taken port is found out at once."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from bough.config.concerns import ServerConfig
from bough.core.errors import ConfigError


def bind(host: str, port: int, *, shared: bool = False, flag: str = "--port") -> socket.socket:
    """A socket bound to the address; it starts to listen when it is served. Raises `ConfigError`, which names `flag`.

    `shared`: other sockets may be bound to the same port, and those that listen share its connections. It is checked
    first that no other process has the port.
    """
    if shared and port:
        bind(host, port).close()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio turns Nagle off only if it is named
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host.strip("[]"), port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            what=f"can't listen on {host}:{port}",
            why=error.strerror or str(error),
            fix=f"choose another port, for example {flag} {port + 1 if port < 65_535 else 30_000}, or another --host",
            param=flag.removeprefix("--").replace("-", "_"),
        ) from error
    return sock


def bind_unix(path: str) -> socket.socket:
    """A Unix socket at `path`; one that a server before this has left behind is replaced. Raises `ConfigError`."""
    place = Path(path).expanduser()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if place.is_socket():
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
                contextlib.suppress(ConnectionRefusedError),
            ):
                probe.connect(str(place))
                raise OSError(errno.EADDRINUSE, "another server listens there")
            place.unlink()
        sock.bind(str(place))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            what=f"can't listen on {place}",
            why=error.strerror or str(error),
            fix="choose another --uds, a path of at most 107 characters in a directory that you may write to",
            param="uds",
        ) from error
    return sock


def bind_server(server: ServerConfig) -> list[socket.socket]:
    """Sockets for the API workers: on the Unix socket if one is wanted, which they share, else on the address."""
    if not server.uds:
        return bind_all(server.host, server.port, server.api_workers)
    first = bind_unix(server.uds)
    return [first, *(first.dup() for _ in range(1, server.api_workers))]


def network_address() -> str:
    """This machine's address in its network, or "" if it has none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: only the route to it is looked up
            found: str = probe.getsockname()[0]
        except OSError:
            return ""
    return "" if found.startswith("127.") else found


def bind_all(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets for `count` processes on one port (chosen by the system if 0)."""
    first = bind(host, port, shared=count > 1)
    chosen = first.getsockname()[1]
    sockets = [first]
    for _ in range(1, count):
        again = socket.socket(first.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        again.bind((host.strip("[]"), chosen))
        again.setblocking(False)
        sockets.append(again)
    return sockets
