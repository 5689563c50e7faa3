"""Memory shared by processes of one machine, without a name in a file system: it is freed when the last process
ends."""

from __future__ import annotations

import ctypes
import mmap
import os


class Segment:
    """A mapping of shared memory. Pages are allocated when they are first written."""

    def __init__(self, descriptor: int) -> None:
        """Maps the memory of `descriptor` and keeps the descriptor open."""
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """New memory, all zero."""
        descriptor = os.memfd_create("bough", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        return cls(descriptor)

    @classmethod
    def open(cls, path: str) -> Segment:
        """Memory that another process of this user has created and still maps; `path` is its `Segment.path`."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Path by which other processes of this machine open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Closes the descriptor. The mapping stays while this process refers to it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
