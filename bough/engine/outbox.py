"""Where the engine's messages go: to the detokenizer, or straight to the API process where nothing is detokenised."""

from __future__ import annotations

from bough.core.messages import Began, ToDetokenizer
from bough.engine.inbox import MessageSink as Ends
from bough.ipc import Launch, Outbox


class Straight:
    """To the only API process. It knows its own requests: their beginnings are no news."""

    def __init__(self, home: Outbox) -> None:
        self._home = home

    def send(self, message: ToDetokenizer) -> None:
        if not isinstance(message, Began):
            self._home.send(message)


def open_outbox(launch: Launch) -> Ends:
    endpoints = launch.server
    return Outbox(endpoints.detokenizer) if launch.detokenizes else Straight(Outbox(endpoints.api(0)))
