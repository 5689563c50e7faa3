"""Runs without gradients, at no cost where they are off already."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_gradients(run: Callable[P, T]) -> Callable[P, T]:
    """`torch.inference_mode()` for a function that is called for every step: entering the mode takes longer than much of
    what such a function does, so the engine's thread stays in it, and only other callers pay."""

    @wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return run(*args, **kwargs)
        with torch.inference_mode():
            return run(*args, **kwargs)

    return wrapped
