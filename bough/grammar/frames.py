"""Messages between a queue and its worker process: length-prefixed msgpack over pipes."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import TypeVar

import msgspec
from msgspec import Struct

from bough.core.sampling import GrammarKind
from bough.grammar.backend import Program, Settings
from bough.grammar.vocabulary import WorkerVocabulary

MAX_FRAME = 64 * 2**20
_LENGTH = struct.Struct("<I")
T = TypeVar("T")


class CompilerStart(Struct, frozen=True):
    """First message to a worker."""

    settings: Settings
    tokens: WorkerVocabulary


class Ready(Struct, frozen=True):
    """The worker's first message."""

    error: str = ""


class CompileJob(Struct, frozen=True):
    kind: GrammarKind
    source: str


class CompileResult(Struct, frozen=True):
    """The result of a job: a program that compiles within the limits, or the reason why it does not."""

    program: Program | None = None
    error: str = ""


def write_frame(fd: int, message: Struct) -> None:
    payload = msgspec.msgpack.encode(message)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def read_frame(fd: int, kind: type[T], give_up_s: float | None = None) -> T:
    """The next message. Raises `EOFError` when the other side is gone, `TimeoutError` at `give_up_s` (monotonic)."""
    (length,) = _LENGTH.unpack(_read(fd, _LENGTH.size, give_up_s))
    if length > MAX_FRAME:
        raise EOFError("the other side sends nonsense")
    return msgspec.msgpack.decode(_read(fd, length, give_up_s), type=kind)


def _read(fd: int, count: int, give_up_s: float | None) -> bytes:
    parts = []
    while count:
        if give_up_s is not None:
            left = give_up_s - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise TimeoutError
        part = os.read(fd, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
