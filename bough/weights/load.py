"""Fills a model from a checkpoint: fit names and shapes first, then read in parallel."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock

import torch
from torch import nn

from bough.config.hf import Checkpoint
from bough.core.errors import WeightsError
from bough.weights.from_gguf import open_gguf
from bough.weights.from_safetensors import open_safetensors
from bough.weights.mapping import Fit, Mapping
from bough.weights.slots import FinishesLoading, Slot, model_slots
from bough.weights.stored import Stored, stored_bytes

_MAX_READERS = 8

Progress = Callable[[int, int], None]
"""Hears of bytes done, and of bytes in all. Called from any thread, one call at a time."""


@torch.no_grad()
def load_weights(model: nn.Module, mapping: Mapping, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Fills every slot of `model`. Raises one WeightsError that lists all missing, extra and misshaped tensors."""
    slots = model_slots(model)
    source = (
        open_safetensors(checkpoint.files) if checkpoint.kind == "safetensors" else nullcontext(open_gguf(checkpoint))
    )
    with source as tensors:
        fit = mapping.fit(tensors, slots)
        if fit.missing or fit.extra or fit.misshaped:
            raise _misfit(fit, checkpoint)
        with ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1)) as readers:
            put = _put if progress is None else _Counted(fit.pairs, progress).put
            list(readers.map(put, fit.pairs))  # raises what a reader raised
            list(readers.map(_finish, [module for module in model.modules() if isinstance(module, FinishesLoading)]))


def _put(pair: tuple[Slot, Stored]) -> None:
    slot, stored = pair
    with torch.no_grad():  # a thread does not inherit it
        slot.put(stored)


class _Counted:
    """Fills slots, and tells how much of the checkpoint has been read."""

    def __init__(self, pairs: Iterable[tuple[Slot, Stored]], progress: Progress) -> None:
        self._progress = progress
        self._lock = Lock()
        self._done = 0
        self._total = sum(stored_bytes(stored) for _, stored in pairs)

    def put(self, pair: tuple[Slot, Stored]) -> None:
        _put(pair)
        with self._lock:
            self._done += stored_bytes(pair[1])
            self._progress(self._done, self._total)


def _finish(module: FinishesLoading) -> None:
    with torch.no_grad():
        module.finish_loading()


def _misfit(fit: Fit, checkpoint: Checkpoint) -> WeightsError:
    counts = {"missing": fit.missing, "extra": fit.extra, "misshaped": fit.misshaped}
    return WeightsError(
        what=f"the weights of {checkpoint.name} don't fit {checkpoint.facts.architecture}: "
        + ", ".join(f"{len(names)} {what}" for what, names in counts.items() if names),
        why="; ".join(f"{what}: {', '.join(by_layer(names))}" for what, names in counts.items() if names),
        fix="check that config.json belongs to these weights and that all files are there",
    )


def by_layer(names: Iterable[str]) -> list[str]:
    """Names that differ in their first number only become one: `layers.{0-3,7}.norm.weight`."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    order: dict[tuple[str, str], None] = {}
    for name in names:
        match = re.match(r"(.*?\.)(\d+)(\..*)", name)
        key = (match[1], match[3]) if match else (name, "")
        groups[key] += [int(match[2])] if match else []
        order[key] = None
    return [f"{head}{_ranges(groups[head, tail])}{tail}" if groups[head, tail] else head for head, tail in order]


def _ranges(numbers: list[int]) -> str:
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = number
        previous = number
    return "{" + ",".join(parts) + "}"
