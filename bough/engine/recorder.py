"""A runner around the runner that keeps the flight record, and what is done with the records of crashes."""

from __future__ import annotations

import time
from zlib import crc32

import msgspec
import numpy as np

from bough.core.errors import Quarantined
from bough.core.messages import Generate
from bough.core.step import Launched, Mask, Outcome, Runner, Step
from bough.observability.flight import FlightRecorder
from bough.scheduler.queues import Queues

_encode = msgspec.msgpack.Encoder().encode


def fingerprint(ask: Generate) -> int:
    """64 bits that a client's second try of the same request has too: half of them for the prompt, half for its length and
    the sampling. Made before each first launch, so it is quick rather than hard to forge."""
    return crc32(ask.prompt) << 32 | crc32(_encode(ask.sampling), len(ask.prompt))


class Quarantine:
    """Refuses requests that were running when the engine died, more than once."""

    def __init__(self, prints: frozenset[int]) -> None:
        self._prints = prints

    def check(self, ask: Generate) -> None:
        """Raises `Quarantined`."""
        if self._prints and fingerprint(ask) in self._prints:
            raise Quarantined(
                what="this request is not served any more",
                why="the engine died twice while it computed it",
                fix="change the request, or restart the server; its crash bundles say more",
            )


class RecordingRunner:
    """A `Runner` that notes every step before it is launched."""

    def __init__(self, inner: Runner, queues: Queues, recorder: FlightRecorder) -> None:
        self._inner = inner
        self._queues = queues
        self._recorder = recorder
        self._prints = np.zeros(queues.limits.num_slots, np.uint64)

    def launch(self, step: Step) -> Launched:
        queues = self._queues
        for setup in step.setups:
            row = queues.prefilling.get(setup.slot) or queues.running.get(setup.slot)
            if row is not None:
                self._prints[setup.slot] = fingerprint(row.job.ask)
        self._recorder.note(
            step.index,
            time.monotonic(),
            num_tokens=step.num_tokens,
            num_decodes=step.num_decodes,
            constrained=len(step.constrained),
            requests=queues.slots.request_id.take(step.slots),
            prints=self._prints.take(step.slots),
            num_query=step.num_query,
            context=step.context,
        )
        return _Recorded(self._inner.launch(step), self._recorder)

    def clear(self) -> None:
        self._inner.clear()


class _Recorded:
    """A launched step that marks the record when it has come back."""

    __slots__ = ("_inner", "_recorder")

    def __init__(self, inner: Launched, recorder: FlightRecorder) -> None:
        self._inner = inner
        self._recorder = recorder

    @property
    def step(self) -> Step:
        return self._inner.step

    @property
    def needs_masks(self) -> bool:
        return self._inner.needs_masks

    def sample(self, masks: Mask) -> None:
        self._inner.sample(masks)

    def wait(self) -> Outcome:
        outcome = self._inner.wait()
        self._recorder.settled(self._inner.step.index)
        return outcome
