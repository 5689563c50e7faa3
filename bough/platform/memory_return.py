"""Returns freed memory of the process to the system."""

from __future__ import annotations

import ctypes


def trim_memory() -> None:
    """Returns the C library's free memory to the system. Takes milliseconds, in which other threads run; does nothing
    if the library has no such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
