"""Memory in pages of 2 MiB: data that is read once from end to end, like weights, is read up to twice as fast."""

from __future__ import annotations

import ctypes
import mmap
import sys

PAGE_BYTES = 2 * 1024 * 1024


def prefer_huge_pages(address: int, num_bytes: int) -> bool:
    """Asks the system to use huge pages for this memory, which must not have been written to yet. Returns whether it
    agreed.

    Applies to whole pages within the range; a system without huge pages is not an error.
    """
    if not sys.platform.startswith("linux"):
        return False
    first = -(-address // PAGE_BYTES) * PAGE_BYTES
    last = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES
    if last <= first:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    advise = libc.madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return int(advise(first, last - first, mmap.MADV_HUGEPAGE)) == 0
