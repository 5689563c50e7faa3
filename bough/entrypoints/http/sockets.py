"""Sockets to serve on: bound before anything is started, so that a taken port is found out at once."""

from __future__ import annotations

import socket

from bough.core.errors import ConfigError


def bind(host: str, port: int, *, shared: bool = False, flag: str = "--port") -> socket.socket:
    """A socket bound to the address; it starts to listen when it is served. Raises `ConfigError`, which names `flag`.

    `shared`: other sockets may be bound to the same port, and those that listen share its connections. It is checked
    first that nobody else has the port.
    """
    if shared and port:
        bind(host, port).close()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
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


def bind_all(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets for `count` processes on one port (chosen by the system if 0)."""
    first = bind(host, port, shared=count > 1)
    chosen = first.getsockname()[1]
    sockets = [first]
    for _ in range(1, count):
        again = socket.socket(first.family, socket.SOCK_STREAM)
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        again.bind((host.strip("[]"), chosen))
        again.setblocking(False)
        sockets.append(again)
    return sockets
