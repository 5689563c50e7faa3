"""Fills a model from a checkpoint: fit names and shapes first, then read in parallel, module after module."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock
from typing import TypeVar

import torch
from torch import nn

from bough.config.adapter_folders import adapter_tensor
from bough.config.hf import Checkpoint
from bough.core.errors import WeightsError
from bough.weights.from_gguf import open_gguf
from bough.weights.from_safetensors import open_safetensors
from bough.weights.mapping import Fit, Mapping
from bough.weights.shards import Noted, TracedReads, open_shards
from bough.weights.slots import FinishesLoading, Owner, Slot, owners_of
from bough.weights.stored import Stored, stored_bytes

_MAX_READERS = 8

_Item = TypeVar("_Item")

Progress = Callable[[int, int], None]
"""Hears of bytes done, and of bytes in all. Called from any thread, one call at a time."""


@torch.no_grad()
def load_weights(
    model: nn.Module,
    mapping: Mapping,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    names: Callable[[str], str | None] | None = None,
    left_out: Callable[[str], bool] | None = None,
    rank: int = 0,
) -> None:
    """Fills every slot of `model`. Raises one WeightsError that lists all missing, extra, misshaped and mistyped tensors.

    Modules are filled in their order, and each one finishes as soon as it has all of its tensors. `names` turns the
    checkpoint's names of tensors into those that `mapping` knows; None: no layer's. `left_out`: as in `Mapping.fit`.
    `rank`: this one's number, whose file is read where the checkpoint was cut into those of single ranks.
    """
    owners = owners_of(model)
    slots = {name: slot for owner in owners for name, slot in owner.slots.items()}
    with open_tensors(checkpoint, rank) as tensors:
        fit = _fit(tensors, slots, mapping, checkpoint, names, left_out)
        with ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1)) as readers:
            _all(readers, _check, [pair for pair in fit.pairs if pair[0].check is not None])
            fills = _fills(owners, fit.pairs)
            _all(readers, _Counted(fit.pairs, progress).fill if progress else _Fill.run, fills)


@torch.no_grad()
def trace_reads(
    model: nn.Module,
    mapping: Mapping,
    checkpoint: Checkpoint,
    tensors: dict[str, Stored],
    names: Callable[[str], str | None] | None = None,
    left_out: Callable[[str], bool] | None = None,
) -> TracedReads:
    """What `load_weights` would read of a checkpoint's tensors. `model` stays unfinished, and may be on the meta device."""
    reads = TracedReads()
    noted: dict[str, Stored] = {name: Noted(stored, reads) for name, stored in tensors.items()}
    slots = {name: slot for owner in owners_of(model) for name, slot in owner.slots.items()}
    for slot, stored in _fit(noted, slots, mapping, checkpoint, names, left_out).pairs:
        if slot.check is not None:
            slot.check(stored)
        slot.put(stored)
    return reads


def open_tensors(checkpoint: Checkpoint, rank: int = 0) -> AbstractContextManager[dict[str, Stored]]:
    """All tensors of a checkpoint by name, readable inside the `with`. `rank`: as in `load_weights`."""
    return _with_adapters(checkpoint, rank) if checkpoint.adapters else _open_own(checkpoint, rank)


def _open_own(checkpoint: Checkpoint, rank: int) -> AbstractContextManager[dict[str, Stored]]:
    if checkpoint.shards is not None:
        return open_shards(checkpoint.shards, checkpoint.path, rank)
    if checkpoint.kind == "safetensors":
        return open_safetensors(checkpoint.files)
    return nullcontext(open_gguf(checkpoint))


@contextmanager
def _with_adapters(checkpoint: Checkpoint, rank: int) -> Iterator[dict[str, Stored]]:
    with ExitStack() as stack:
        tensors = dict(stack.enter_context(_open_own(checkpoint, rank)))
        for adapter, path in checkpoint.adapters:
            found = stack.enter_context(open_safetensors((path,)))
            tensors |= {adapter_tensor(adapter, name): stored for name, stored in found.items()}
        yield tensors


def _fit(
    tensors: dict[str, Stored],
    slots: dict[str, Slot],
    mapping: Mapping,
    checkpoint: Checkpoint,
    names: Callable[[str], str | None] | None,
    left_out: Callable[[str], bool] | None,
) -> Fit:
    fit = mapping.fit(tensors if names is None else _renamed(tensors, names), slots, left_out)
    if fit.problems:
        raise _misfit(fit, checkpoint)
    return fit


def _all(readers: ThreadPoolExecutor, work: Callable[[_Item], None], items: Iterable[_Item]) -> None:
    """Does all of the work. Raises the first error, and leaves out what has not begun by then."""
    pending = [readers.submit(work, item) for item in items]
    try:
        for future in pending:
            future.result()
    finally:
        for future in pending:
            future.cancel()


def _renamed(tensors: dict[str, Stored], names: Callable[[str], str | None]) -> dict[str, Stored]:
    pairs = [(name, stored) for old, stored in tensors.items() if (name := names(old)) is not None]
    renamed = dict(pairs)
    if len(renamed) == len(pairs):
        return renamed
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    raise WeightsError(what=f"the checkpoint has several tensors for {twice[0]}", fix="download it again")


def _check(pair: tuple[Slot, Stored]) -> None:
    slot, stored = pair
    assert slot.check is not None
    slot.check(stored)


class _Left:
    """How many slots of a module are still to be filled."""

    def __init__(self, count: int, finishers: tuple[FinishesLoading, ...]) -> None:
        self._count = count
        self._finishers = finishers
        self._lock = Lock()

    def one_less(self) -> None:
        """Finishes the module with the last one."""
        with self._lock:
            self._count -= 1
            if self._count:
                return
        self.finish()

    def finish(self) -> None:
        for module in self._finishers:
            module.finish_loading()


class _Fill:
    """One slot to fill, or a module without tensors to finish."""

    def __init__(self, slot: Slot | None, stored: Stored | None, left: _Left) -> None:
        self.slot, self.stored, self.left = slot, stored, left

    def run(self) -> None:
        with torch.no_grad():  # a thread does not inherit it
            if self.slot is None or self.stored is None:
                self.left.finish()
                return
            self.slot.put(self.stored)
            self.left.one_less()


def _fills(owners: list[Owner], pairs: Iterable[tuple[Slot, Stored]]) -> list[_Fill]:
    """What is to be done, module after module."""
    by_slot: dict[int, list[Stored]] = defaultdict(list)
    for slot, stored in pairs:
        by_slot[id(slot)].append(stored)
    fills: list[_Fill] = []
    for owner in owners:
        mine = [(slot, stored) for slot in owner.slots.values() for stored in by_slot.get(id(slot), ())]
        left = _Left(len(mine), owner.finishers)
        fills += [_Fill(slot, stored, left) for slot, stored in mine]
        if not mine and owner.finishers:
            fills.append(_Fill(None, None, left))
    return fills


class _Counted:
    """Fills slots, and tells how much of the checkpoint has been read."""

    def __init__(self, pairs: Iterable[tuple[Slot, Stored]], progress: Progress) -> None:
        self._progress = progress
        self._lock = Lock()
        self._done = 0
        self._total = sum(stored_bytes(stored) for _, stored in pairs)

    def fill(self, each: _Fill) -> None:
        each.run()
        if each.stored is not None:
            with self._lock:
                self._done += stored_bytes(each.stored)
                self._progress(self._done, self._total)


def _misfit(fit: Fit, checkpoint: Checkpoint) -> WeightsError:
    return WeightsError(
        what=f"the weights of {checkpoint.name} don't fit {checkpoint.architecture}: "
        + ", ".join(f"{len(names)} {what}" for what, names in fit.problems.items()),
        why="; ".join(f"{what}: {', '.join(by_layer(names))}" for what, names in fit.problems.items()),
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
