"""Memory that processes of one machine share, without a name in any file system: it is gone with the last of them."""

from __future__ import annotations

import ctypes
import mmap
import os


class Segment:
    """A mapping of shared memory. Pages exist once they are written to."""

    def __init__(self, descriptor: int) -> None:
        """Maps what `descriptor` refers to, and keeps the descriptor."""
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
        """Where other processes of this machine find it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Lets go of the descriptor. The mapping stays as long as something of this process refers to it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
