"""What each rank really holds, in bytes, once it is loaded: to be compared with what was planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from torch import Tensor, nn

from bough.ipc.store import AnyStore

_PATIENCE_S = 600.0
_DEEPEST = 4
"""How far below a module's attributes weights lie: lists of packed weights, their fields."""


class RankMemory(Struct, kw_only=True, frozen=True):
    """One rank's memory."""

    rank: int
    weight_bytes: int
    kv_bytes: int
    state_bytes: int = 0
    """Of layers that keep states: those of rows, and snapshots."""


def weight_bytes(model: nn.Module) -> int:
    """Bytes of everything that a model keeps: parameters, buffers, and what schemes keep in forms of their own."""
    return _bytes_of(tensor for module in model.modules() for tensor in _tensors(vars(module), _DEEPEST))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Memory that tensors share counts once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module):
        if isinstance(value, dict):
            inside = list(value.values())
        elif isinstance(value, list | tuple):
            inside = list(value)
        elif type(value).__module__.startswith("bough."):
            names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ())]
            inside = [getattr(value, name, None) for name in names]
        else:
            inside = []
        for each in inside:
            yield from _tensors(each, depth - 1)


def exchange(mine: RankMemory, store: AnyStore | None, num_ranks: int) -> list[RankMemory]:
    """What all ranks hold, on rank 0; the others only tell."""
    if store is None:
        return [mine]
    store.set(f"held/{mine.rank}", msgspec.json.encode(mine))
    if mine.rank:
        return []
    every = [store.get(f"held/{rank}", _PATIENCE_S) for rank in range(num_ranks)]
    return [msgspec.json.decode(each, type=RankMemory) for each in every]


def of_rank(rank: int, model: nn.Module, pool: object, states: object = None) -> RankMemory:
    """`pool`: that of the KV cache. `states`: that of states, if there are any."""
    return RankMemory(
        rank=rank,
        weight_bytes=weight_bytes(model),
        kv_bytes=_bytes_of(_tensors(pool, _DEEPEST)),
        state_bytes=_bytes_of(_tensors(states, _DEEPEST)),
    )
