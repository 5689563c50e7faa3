"""Encodes structs as msgpack and decodes them. Numpy arrays are sent as (dtype, shape, bytes) and decoded as read-only
views.

On a channel each encoded struct is a frame: its length, then its bytes. Messages that are sent so often that msgpack takes
too long are `OwnFrame`s.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from functools import reduce
from operator import or_
from typing import Any, Generic, Self, TypeVar, get_args, get_origin

import msgspec
import numpy as np

T = TypeVar("T")

FRAME_HEAD = struct.Struct("<Q")
"""Before each frame: its length in bytes."""
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
_KINDS = "biuf"
"""Kinds of array elements that can be sent: booleans, integers, floats."""


OWN_FRAME = 0xC1
"""First byte of the frames that a message makes itself; nothing in msgpack begins with it."""
_OWN_FRAME = bytes([OWN_FRAME])


class OwnFrame:
    """A message that makes its frame itself. A union of message types has one such type at most."""

    __slots__ = ()

    @abstractmethod
    def to_frame(self) -> bytes:
        """Begins with `OWN_FRAME`."""

    @classmethod
    @abstractmethod
    def from_frame(cls, frame: bytes | memoryview) -> Self:
        """Raises `ValueError` if no `to_frame` gives this."""


class Codec(Generic[T]):
    """Encodes any struct; decodes into `message_type` (a struct, or a union of tagged structs and an `OwnFrame`) or raises
    `ValueError`."""

    __slots__ = ("_decoder", "_encoder", "_own")

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        types = get_args(message_type)
        own = [each for each in types if isinstance(each, type) and issubclass(each, OwnFrame)]
        self._own = own[0] if own else None
        if own:
            message_type = reduce(or_, (each for each in types if each not in own))
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=_decode_array)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> T:
        if self._own is not None and frame[:1] == _OWN_FRAME:
            message: Any = self._own.from_frame(frame)
            return message  # type: ignore[no-any-return]
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"malformed message: {error}") from error


def encoder() -> msgspec.msgpack.Encoder:
    """An encoder for structs of any type, arrays included."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_array)


def _encode_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} can't cross a process border")
    if value.dtype.kind not in _KINDS:
        raise NotImplementedError(f"arrays of {value.dtype} can't cross a process border")
    return (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())


def _decode_array(wanted: Any, value: Any) -> Any:
    if (get_origin(wanted) or wanted) is not np.ndarray:
        raise NotImplementedError(f"no decoding for {wanted}")
    try:
        kind, shape, data = value
        dtype = np.dtype(kind)
        if dtype.kind not in _KINDS:
            raise ValueError(f"arrays of {dtype} are refused")
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not an array: {error}") from error
