"""A host's addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""A host's addresses. Raises OSError if it has none."""


async def look_up(host: str, port: int) -> list[str]:
    """What the system's resolver says."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[4][0]) for place in found))
