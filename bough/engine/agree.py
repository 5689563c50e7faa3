"""What ranks must see alike, so that each decides the same: they exchange what they have seen, and go by the least of it.

Free memory differs from rank to rank and from moment to moment, and which type is fastest is measured. Ranks that decided
by what they saw themselves would differ in pages or in types.
"""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from bough.config.resolve import MachineFacts
from bough.core.errors import Unavailable
from bough.ipc import Endpoints
from bough.platform.whole_file import write_whole

_LOOK_EVERY_S = 0.005
_PATIENCE_S = 600.0


def agree(mine: MachineFacts, endpoints: Endpoints, rank: int, num_ranks: int) -> MachineFacts:
    """The machine by which all ranks decide. Waits for the others. Raises `Unavailable` if one does not come."""
    if num_ranks == 1:
        return mine
    write_whole(endpoints.machine(rank), msgspec.json.encode(mine))
    give_up_s = time.monotonic() + _PATIENCE_S
    seen = [_heard(endpoints, each, give_up_s) for each in range(num_ranks)]
    return replace(
        seen[0],
        total_bytes=min(each.total_bytes for each in seen),
        free_bytes=min(each.free_bytes for each in seen),
        host_free_bytes=min(each.host_free_bytes for each in seen),
    )


def _heard(endpoints: Endpoints, rank: int, give_up_s: float) -> MachineFacts:
    while True:
        try:
            return msgspec.json.decode(endpoints.machine(rank).read_bytes(), type=MachineFacts)
        except FileNotFoundError:
            if time.monotonic() > give_up_s:
                raise Unavailable(what=f"rank {rank} did not start", why="the others waited for it") from None
            time.sleep(_LOOK_EVERY_S)
