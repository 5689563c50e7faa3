"""Starts a server's processes, wires them, watches them, and ends them. The only place that does.

    with start(config) as running:
        facts = running.wait_ready()
        ...                                 # this process is API worker 0

The engine's ranks, the detokenizer and further API workers are children in process groups of their own, so that Ctrl-C
reaches only this process. However this process ends, they end.
"""

from __future__ import annotations

from bough.launch.children import Programs
from bough.launch.model import located
from bough.launch.server import ServerProcesses, start

__all__ = ["Programs", "ServerProcesses", "located", "start"]
