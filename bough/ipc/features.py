"""Features of media in shared memory: written once, sealed, and read by any process of this machine and user.

A segment is never used again for anything else: a process that has opened it keeps it, however long its owner does. It
begins with the digest of what it holds, because the path of one that its owner let go of may come to mean another.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bough.core.media import KEY_BYTES, Features

_MAGIC: Final = b"bough-f1"
_HEAD: Final = 64
"""Bytes before the array: magic and digest, padded so that the array is aligned."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_DTYPES: Final[dict[str, type[np.generic]]] = {"uint8": np.uint8, "float32": np.float32}


def write_features(array: npt.NDArray[Any], digest: bytes) -> int:
    """A descriptor of a sealed segment that holds the array. The caller closes it."""
    if array.dtype.name not in _DTYPES or len(digest) != KEY_BYTES:
        raise ValueError(f"features of {array.dtype} can't be shared")
    descriptor = os.memfd_create("bough-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write(descriptor, memoryview((_MAGIC + digest).ljust(_HEAD, b"\0")))
        _write(descriptor, np.ascontiguousarray(array).data.cast("B") if array.size else memoryview(b""))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def features_path(descriptor: int) -> str:
    """Where other processes find a segment that this one holds open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def check_features(descriptor: int, features: Features) -> None:
    """Raises `ValueError` unless the segment is sealed, as large as the array, and begins with its digest."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the segment is not sealed")
    if os.fstat(descriptor).st_size != _HEAD + features.num_bytes:
        raise ValueError("the segment has another size")
    if os.pread(descriptor, len(_MAGIC) + KEY_BYTES, 0) != _MAGIC + features.digest:
        raise ValueError("the segment holds something else")


def open_features(features: Features) -> npt.NDArray[np.generic]:
    """The array, which stays as long as something refers to it. Raises `OSError` or `ValueError` if it is gone."""
    descriptor = os.open(features.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        check_features(descriptor, features)
        memory = mmap.mmap(descriptor, _HEAD + features.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return np.ndarray(features.shape, _DTYPES[features.dtype], memory, _HEAD)


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
