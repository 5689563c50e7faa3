"""The flight recorder: shapes and request ids of the last steps, in a shared file that outlives the engine. No text.

The engine records a step before it is launched and marks it when it has settled. If the engine dies, the file shows
what was running: the recorded steps that did not settle.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_HEAD = struct.Struct("<8sIIqqq")
"""magic, rows per record, records, records written, last step settled, unused"""
_MAGIC = b"boughrec"
_START = 64
_WRITTEN_AT = 2
_SETTLED_AT = 3
"""Positions of these two numbers in the head, in words of eight bytes."""

NUM_RECORDS = 64

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


def _record_type(rows: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("index", "<i8"),
            ("at_s", "<f8"),
            ("num_rows", "<i4"),
            ("num_tokens", "<i4"),
            ("num_decodes", "<i4"),
            ("constrained", "<i4"),
            ("request", "<i8", (rows,)),
            ("print", "<u8", (rows,)),
            ("num_query", "<i4", (rows,)),
            ("context", "<i4", (rows,)),
        ]
    )


_FACTS = struct.Struct("<qdiiii")
"""A record up to its columns: index, at_s, num_rows, num_tokens, num_decodes, constrained."""


class FlightRecorder:
    """The writing end."""

    def __init__(self, path: Path, max_rows: int) -> None:
        kind = _record_type(max_rows)
        size = _START + NUM_RECORDS * kind.itemsize
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._map[: _HEAD.size] = _HEAD.pack(_MAGIC, max_rows, NUM_RECORDS, 0, -1, 0)
        self._words = memoryview(self._map)[:_START].cast("q")
        records: Any = np.frombuffer(self._map, kind, NUM_RECORDS, _START)
        self._requests, self._prints = records["request"], records["print"]
        self._num_query, self._context = records["num_query"], records["context"]
        self._record_bytes = kind.itemsize
        self._max_rows = max_rows
        self._written = 0

    def note(
        self, index: int, at_s: float, *, num_tokens: int, num_decodes: int, constrained: int,
        requests: I64, prints: U64, num_query: I32, context: I32,
    ) -> None:  # fmt: skip
        """Records a step that is about to be launched."""
        rows = min(len(requests), self._max_rows)
        at = self._written % NUM_RECORDS
        start = _START + at * self._record_bytes
        _FACTS.pack_into(self._map, start, index, at_s, rows, num_tokens, num_decodes, constrained)
        self._requests[at, :rows] = requests[:rows]
        self._prints[at, :rows] = prints[:rows]
        self._num_query[at, :rows] = num_query[:rows]
        self._context[at, :rows] = context[:rows]
        self._written += 1
        self._words[_WRITTEN_AT] = self._written

    def settled(self, index: int) -> None:
        """Marks the step, and all before it, as settled."""
        self._words[_SETTLED_AT] = index


@dataclass(frozen=True, slots=True)
class RecordedStep:
    index: int
    at_s: float
    """time.monotonic() of its launch."""
    num_tokens: int
    num_decodes: int
    constrained: int
    settled: bool
    requests: tuple[int, ...]
    prints: tuple[int, ...]
    num_query: tuple[int, ...]
    context: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.index,
            "launched_s": self.at_s,
            "settled": self.settled,
            "rows": len(self.requests),
            "tokens": self.num_tokens,
            "decodes": self.num_decodes,
            "constrained": self.constrained,
            "request_ids": list(self.requests),
            "fingerprints": [f"{each:016x}" for each in self.prints],
            "num_query": list(self.num_query),
            "context": list(self.context),
        }


def read_flight(path: Path) -> list[RecordedStep]:
    """The recorded steps, oldest first; none if there is no recording."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    if len(data) < _START:
        return []
    magic, rows, records, written, settled, _ = _HEAD.unpack_from(data)
    kind = _record_type(rows)
    if magic != _MAGIC or records != NUM_RECORDS or len(data) < _START + records * kind.itemsize:
        return []
    table: Any = np.frombuffer(data, kind, records, _START)
    steps = []
    for number in range(max(0, written - records), written):
        record = table[number % records]
        count = int(record["num_rows"])
        steps.append(
            RecordedStep(
                index=int(record["index"]),
                at_s=float(record["at_s"]),
                num_tokens=int(record["num_tokens"]),
                num_decodes=int(record["num_decodes"]),
                constrained=int(record["constrained"]),
                settled=int(record["index"]) <= settled,
                requests=tuple(record["request"][:count].tolist()),
                prints=tuple(record["print"][:count].tolist()),
                num_query=tuple(record["num_query"][:count].tolist()),
                context=tuple(record["context"][:count].tolist()),
            )
        )
    return steps


def suspects(steps: list[RecordedStep]) -> frozenset[int]:
    """Fingerprints of the requests whose step never came back."""
    return frozenset(each for step in steps if not step.settled for each in step.prints)
