"""Encodes structs as msgpack and decodes them. Numpy arrays are sent as (dtype, shape, bytes) and decoded as read-only
views.

On a channel each encoded struct is a frame: its length, then its bytes.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar, get_origin

import msgspec
import numpy as np

T = TypeVar("T")

FRAME_HEAD = struct.Struct("<Q")
"""Before each frame: its length in bytes."""
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
_KINDS = "biuf"
"""Kinds of array elements that can be sent: booleans, integers, floats."""


class Codec(Generic[T]):
    """Encodes any struct; decodes into `message_type` (a struct or a union of tagged structs) or raises `ValueError`."""

    __slots__ = ("_decoder", "_encoder")

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=_decode_array)

    def encode(self, message: Any) -> bytes:
        return self._encoder.encode(message)

    def decode(self, frame: bytes | memoryview) -> T:
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
