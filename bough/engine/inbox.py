"""The loop's two ends and its clock, as protocols. `bough.ipc` provides the real ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from bough.core.messages import ToDetokenizer, ToEngine


class MessageSource(Protocol):
    """Where messages come from."""

    @property
    def closed(self) -> bool:
        """Nothing will ever come again."""
        ...

    def drain(self, block_s: float) -> Sequence[ToEngine]:
        """Everything that has come, in order. Waits up to `block_s` for the first message."""
        ...


class MessageSink(Protocol):
    """Where messages go."""

    def send(self, message: ToDetokenizer) -> None:
        """Queues a message. Never waits."""
        ...


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, for durations and deadlines."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()
