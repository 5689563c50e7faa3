"""Memory that the process has freed goes back to the system."""

from __future__ import annotations

import ctypes


def trim_memory() -> None:
    """Returns what the C library holds free. Takes milliseconds, in which other threads run; does nothing where the library
    has no such function."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
