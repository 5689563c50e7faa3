"""Linux futexes: sleep until a word in shared memory changes, and wake the sleepers."""

from __future__ import annotations

import ctypes
import errno
import math
import platform

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), -1)
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF

STORES_STAY_IN_ORDER = platform.machine() == "x86_64"
"""Whether other processors see stores in program order, so that Python code can publish data by writing a flag after
it."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_futex = _libc.syscall
_futex.restype = ctypes.c_long
_futex.argtypes = (  # number, address, operation, value, timeout, second address, third value
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int,
)  # fmt: skip


_wake = ctypes.PyDLL(None).syscall
"""Waking does not wait: other threads must not get the interpreter meanwhile, and keep the one that wakes from it."""
_wake.restype = ctypes.c_long
_wake.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)  # number, address, operation, value


def futex_wait(address: int, expected: int, timeout_s: float) -> bool:
    """Sleeps until the 32-bit word at `address` is woken, at most `timeout_s`. Returns immediately if the word is not
    `expected`.

    Returns False if the time is over. True means that the word must be read again; it may be unchanged, because signals
    end the sleep, too.
    """
    fraction, whole = math.modf(timeout_s)
    limit = _Timespec(int(whole), int(fraction * 1e9))
    result = _futex(_NUMBER, address, _WAIT, expected, ctypes.addressof(limit), None, 0)
    return result == 0 or ctypes.get_errno() != errno.ETIMEDOUT


def futex_wake(address: int, most: int = _EVERYBODY) -> int:
    """Wakes at most `most` sleepers at `address` and returns their number."""
    woken: int = _wake(_NUMBER, address, _WAKE, most)
    return woken
