"""What ranks must see alike, so that each decides the same: they exchange what they have seen, and go by the least of it.

Free memory differs from rank to rank and from moment to moment, and which type is fastest is measured. Ranks that decided
by what they saw themselves would differ in pages or in types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from bough.config.resolve_facts import MachineFacts
from bough.core.errors import ConfigError, Unavailable
from bough.ipc.store import AnyStore

_PATIENCE_S = 600.0


def agree(mine: MachineFacts, store: AnyStore, rank: int, num_ranks: int, sharing: int = 1) -> MachineFacts:
    """The machine by which all ranks decide. Waits for the others. Raises `Unavailable` if one does not come.

    `sharing`: ranks on this machine, which have its memory in common if they run on its CPU.
    """
    store.set(_key(rank), msgspec.json.encode(part_of(mine, sharing)))
    return least([_heard(store, each) for each in range(num_ranks)])


def part_of(machine: MachineFacts, sharing: int) -> MachineFacts:
    """The machine as one of `sharing` ranks has it: on a CPU they have its memory in common."""
    if machine.device != "cpu":
        return machine
    free_bytes, host_free_bytes = machine.free_bytes // sharing, machine.host_free_bytes // sharing
    return replace(machine, free_bytes=free_bytes, host_free_bytes=host_free_bytes)


def least(seen: Sequence[MachineFacts]) -> MachineFacts:
    """What all of them have. Raises `ConfigError` if they are of different kinds."""
    first = seen[0]
    for rank, other in enumerate(seen):
        if other.device != first.device:
            raise ConfigError(
                what=f"rank 0 runs on {first.device}, rank {rank} on {other.device}",
                why="ranks of one model must compute the same way",
                fix="set --device on every machine",
            )
    common = tuple(name for name in first.attention_backends if all(name in each.attention_backends for each in seen))
    return replace(
        first,
        total_bytes=min(each.total_bytes for each in seen),
        free_bytes=min(each.free_bytes for each in seen),
        host_free_bytes=min(each.host_free_bytes for each in seen),
        has_bfloat16=all(each.has_bfloat16 for each in seen),
        attention_backends=common,
    )


def _key(rank: int) -> str:
    return f"machine/{rank}"


def _heard(store: AnyStore, rank: int) -> MachineFacts:
    try:
        return msgspec.json.decode(store.get(_key(rank), _PATIENCE_S), type=MachineFacts)
    except TimeoutError:
        raise Unavailable(
            what=f"rank {rank} did not start within {_PATIENCE_S:g} s", why="the others waited for it"
        ) from None
