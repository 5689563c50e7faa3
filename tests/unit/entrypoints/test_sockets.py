"""Sockets to serve on: small answers are sent at once, and a taken port is found out before anything starts."""

from __future__ import annotations

import asyncio
import socket

import pytest

from bough.core.errors import ConfigError
from bough.entrypoints.http.sockets import bind, bind_all


@pytest.mark.parametrize("count", [1, 2])
async def test_connections_send_small_packets_at_once(count: int) -> None:
    """Without TCP_NODELAY a body behind its head waits for the client's delayed acknowledgement: 40 ms."""
    for sock in bind_all("127.0.0.1", 0, count):
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, told: asyncio.Future[int] = told
        ) -> None:
            told.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        address = sock.getsockname()
        async with await asyncio.start_server(accepted, sock=sock):
            _, writer = await asyncio.open_connection(*address)
            assert await told
            writer.close()


def test_a_taken_port_is_an_error_with_a_remedy() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        for shared in (False, True):
            with pytest.raises(ConfigError, match="can't listen on") as caught:
                bind("127.0.0.1", port, shared=shared)
            assert "--port" in caught.value.fix
