"""Names the compiled kernels in a profile: torch's profiler sees torch's own operators only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch.profiler import record_function


def mark_kernels(loaded: ctypes.CDLL) -> Callable[[], None]:
    """Records a range of torch's profiler around each call of a kernel. Returns a function that ends this.

    Callers look the functions up at each call, so the change reaches all of them. Both must happen between two steps.
    """
    plain = {name: function for name, function in vars(loaded).items() if name.startswith("bough_")}
    for name, function in plain.items():
        setattr(loaded, name, _marked(name, function))

    def unmark() -> None:
        for name, function in plain.items():
            setattr(loaded, name, function)

    return unmark


def _marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with record_function(name):
            return function(*arguments)

    return call
