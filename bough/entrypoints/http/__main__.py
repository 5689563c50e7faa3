"""`python -m bough.entrypoints.http DIRECTORY INDEX`: a further API worker. Started by the launcher, never by hand."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from bough.entrypoints.http.worker import Worker
from bough.ipc import Launch, read_status, run_child


def main(directory: str, index: int) -> int:
    return run_child(f"api{index}", directory, lambda launch: run_loop(launch, index))


def run_loop(launch: Launch, index: int) -> None:
    """Serves until the launcher ends it."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(launch, index))
    else:
        uvloop.run(_serve(launch, index))


async def _serve(launch: Launch, index: int) -> None:
    sock = socket.socket(fileno=launch.listen_fds[index - 1])
    worker = Worker(launch.config, launch.endpoints, index, sock)
    asked = 0

    def on_terminate() -> None:
        nonlocal asked
        asked += 1
        worker.drain(now=asked > 1)

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_terminate)
    # Worker 0 answers probes meanwhile; a connection that came here would not be answered.
    await worker.run(_facts(launch), probes=False)


async def _facts(launch: Launch) -> Mapping[str, Any]:
    """Workers are started when the engine is ready, so its facts are there."""
    return read_status(launch.endpoints).facts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
