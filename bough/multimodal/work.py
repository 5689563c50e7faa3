"""What an API process and its workers say to each other: frames over a socket pair, features as descriptors beside them."""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from bough.core.media import MediaKind
from bough.multimodal.processor import Options, Processed

MAX_FRAME = 512 * 2**20
_LENGTH = struct.Struct("<Q")
T = TypeVar("T")


class MediaWorkerStart(Struct, frozen=True, kw_only=True):
    """First message to a worker."""

    config: dict[str, Any]
    """The checkpoint's config, from which the worker makes the processor."""
    max_pixels: int
    max_frames: int
    """Frames that are taken of a video, whatever the processor would take."""
    max_audio_s: float
    """Seconds of a sound that is only decoded."""
    memory_bytes: int
    """Memory that work may take beyond what the worker has when it is ready."""
    cpu_s: float
    """Time of a processor that one medium may take."""


class UnencodedPixels(Struct, frozen=True):
    """Pixels that were never encoded."""

    width: int
    height: int
    mode: str
    """As Pillow names it."""


class Stills(Struct, frozen=True, kw_only=True):
    """Frames of a video that were taken out before, one behind the other."""

    sizes: tuple[int, ...]
    """Bytes of each."""
    fps: float
    """Of the video."""
    indices: tuple[int, ...]
    """Their numbers in the video."""
    total: int
    """Frames that the video has."""


class Work(Struct, frozen=True, kw_only=True):
    """A medium to prepare. Its bytes follow."""

    kind: MediaKind
    options: Options
    digest: bytes
    num_bytes: int
    raw: UnencodedPixels | None = None
    """None: the bytes are a file, or files."""
    form: str = ""
    """Of a video's file: its container."""
    stills: Stills | None = None
    """None: it is no video, or a video's file."""
    decode_only: bool = False
    """Of a sound its samples are wanted, float32 at the family's rate, and no features."""


class MediaResult(Struct, frozen=True, kw_only=True):
    """What became of it. With `processed`, a descriptor of the features comes along."""

    processed: Processed | None = None
    error: str = ""
    """What is wrong with the medium; empty: nothing."""
    why: str = ""
    fix: str = ""
    code: str = "media_unsupported"


def send(sock: socket.socket, message: Struct, descriptor: int = -1, data: bytes | memoryview = b"") -> None:
    payload = msgspec.msgpack.encode(message)
    head = _LENGTH.pack(len(payload)) + payload
    if descriptor >= 0:
        sent = socket.send_fds(sock, [head], [descriptor])
        head = head[sent:]
    if head:
        sock.sendall(head)
    if data:
        sock.sendall(data)


def receive(sock: socket.socket, kind: type[T]) -> tuple[T, int]:
    """The next message, and the descriptor that came with it (-1: none). Raises `EOFError` if the other side is gone."""
    head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    if not head:
        raise EOFError
    try:
        head += receive_bytes(sock, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME:
            raise EOFError("the other side sends nonsense")
        message = msgspec.msgpack.decode(receive_bytes(sock, length), type=kind)
    except BaseException:
        for each in descriptors:
            socket.close(each)
        raise
    return message, descriptors[0] if descriptors else -1


def receive_bytes(sock: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(buffer)
