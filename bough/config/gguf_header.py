"""Reads the header of a GGUF file: metadata and where each tensor lies. No tensor data is touched.

The format (version 2 and 3, little endian): magic, version, number of tensors, number of metadata pairs, the pairs, one
record per tensor, then the tensors' data from the next multiple of `general.alignment` on. Every length is checked
against the file's size before it is believed, so a broken file is an error and never a huge allocation.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from bough.core.errors import ConfigError

_SCALARS: Final[dict[int, struct.Struct]] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_ARRAYS: Final[dict[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMS: Final = 4
_MAX_NESTING: Final = 3

# ggml type -> name, weights per block, bytes per block.
_KINDS: Final[dict[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

BLOCK_SIZES: Final[dict[str, tuple[int, int]]] = {name: (weights, size) for name, weights, size in _KINDS.values()}
"""Kind -> weights per block, bytes per block."""
KEPT_BITS: Final[dict[str, float]] = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
}
"""Kinds whose weights stay packed in memory, and the bits that each then takes: those of the file, or at most 3 % more
because small scales become bytes. Others are dequantised."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the file."""

    kind: str
    """ggml's name of the type: F32, BF16, Q4_1, Q6_K ..."""
    shape: tuple[int, ...]
    """Outermost dimension first, as torch counts (the file stores it the other way round)."""
    offset: int
    """From the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the data."""

    metadata: dict[str, Any]
    """Scalars as Python values, arrays as lists (of numbers, strings or lists)."""
    tensors: dict[str, TensorInfo]
    data_offset: int


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Reads and checks the header of `path`. Raises ConfigError for anything that is not a sound GGUF file."""
    with open(path, "rb") as file:
        try:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError) as error:  # an empty file, or something that can't be mapped
            raise ConfigError(what=f"{path} is no GGUF file", why=str(error), fix="download it again") from error
        with view:
            return _Reader(view, Path(path)).header()


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self.view = view
        self.path = path
        self.at = 0
        self.end = len(view)

    def header(self) -> GgufHeader:
        if self.view[:4] != b"GGUF":
            self._broken("it does not start with 'GGUF'")
        self.at = 4
        version = self._scalar(4)
        if version not in (2, 3):
            self._broken(f"its version is {version}; 2 and 3 (little endian) are known")
        num_tensors, num_pairs = self._scalar(10), self._scalar(10)
        self._check_count(num_tensors, 24)
        self._check_count(num_pairs, 13)
        metadata = {self._string(): self._value(self._scalar(4), 0) for _ in range(num_pairs)}
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._broken(f"general.alignment is {alignment!r}, which is no power of two")
        records = [self._record() for _ in range(num_tensors)]
        data_offset = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset, nbytes in records:
            if name in tensors:
                self._broken(f"tensor {name!r} is listed twice")
            if data_offset + offset + nbytes > self.end:
                self._broken(f"tensor {name!r} ends beyond the file, which may be cut short")
            tensors[name] = TensorInfo(kind, shape, data_offset + offset, nbytes)
        return GgufHeader(metadata, tensors, data_offset)

    def _record(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar(4)
        if not 1 <= num_dims <= _MAX_DIMS:
            self._broken(f"tensor {name!r} has {num_dims} dimensions")
        dims = [self._scalar(10) for _ in range(num_dims)]
        kind_id, offset = self._scalar(4), self._scalar(10)
        if kind_id not in _KINDS:
            self._broken(f"tensor {name!r} has the unknown type {kind_id}")
        kind, per_block, block_bytes = _KINDS[kind_id]
        if dims[0] % per_block:
            self._broken(f"tensor {name!r} has rows of {dims[0]} weights, not whole {kind} blocks of {per_block}")
        num_weights = 1
        for dim in dims:
            num_weights *= dim
        nbytes = num_weights // per_block * block_bytes
        if nbytes > self.end:
            self._broken(f"tensor {name!r} would be larger than the file")
        return name, kind, tuple(reversed(dims)), offset, nbytes

    def _scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        if self.at + layout.size > self.end:
            self._broken("it ends inside its header")
        (value,) = layout.unpack_from(self.view, self.at)
        self.at += layout.size
        return value

    def _string(self) -> str:
        length = self._scalar(10)
        if length > self.end - self.at:
            self._broken("a string runs beyond the end")
        start, self.at = self.at, self.at + length
        return self.view[start : self.at].decode("utf-8", errors="replace")

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(nesting)
        if kind not in _SCALARS:
            self._broken(f"a metadata value has the unknown type {kind}")
        return self._scalar(kind)

    def _array(self, nesting: int) -> list[Any]:
        if nesting >= _MAX_NESTING:
            self._broken("arrays are nested too deep")
        kind, length = self._scalar(4), self._scalar(10)
        if kind == _STRING:
            self._check_count(length, 8)
            return self._strings(length)
        if kind == _ARRAY:
            self._check_count(length, 12)
            return [self._array(nesting + 1) for _ in range(length)]
        if kind not in _ARRAYS:
            self._broken(f"an array holds the unknown type {kind}")
        dtype = np.dtype(_ARRAYS[kind])
        self._check_count(length, dtype.itemsize)
        values: list[Any] = np.frombuffer(self.view[self.at : self.at + length * dtype.itemsize], dtype).tolist()
        self.at += length * dtype.itemsize
        return values

    def _strings(self, length: int) -> list[str]:
        """Vocabularies have a few hundred thousand strings, so this loop is the header's whole cost."""
        view, at, end = self.view, self.at, self.end
        read_length = _SCALARS[10].unpack_from
        strings = []
        for _ in range(length):
            start = at + 8
            if start > end:
                self._broken("an array of strings runs beyond the end")
            at = start + read_length(view, start - 8)[0]
            if at > end:
                self._broken("an array of strings runs beyond the end")
            strings.append(view[start:at].decode("utf-8", errors="replace"))
        self.at = at
        return strings

    def _check_count(self, count: int, least_bytes: int) -> None:
        if count * least_bytes > self.end - self.at:
            self._broken(f"it announces {count} entries, more than it has bytes for")

    def _broken(self, why: str) -> NoReturn:
        raise ConfigError(what=f"{self.path} is no sound GGUF file", why=why, fix="download it again")
