"""Waiting for what is to happen, instead of for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil


def until(true: Callable[[], Any], within_s: float = 60, every_s: float = 0.02) -> Any:
    """What the condition gives once it holds; its last value if it does not hold in time."""
    give_up = time.monotonic() + within_s
    while True:
        value = true()
        if value or time.monotonic() > give_up:
            return value
        time.sleep(every_s)


def gone(pid: int, within_s: float) -> bool:
    """Whether the process ends in time."""

    def ended() -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    return bool(until(ended, within_s))
