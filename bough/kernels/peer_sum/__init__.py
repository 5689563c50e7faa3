"""Sums over GPUs of one machine that read one another's memory: for messages so small that NCCL's steps cost more.

in: a rank's part of a sum, and the memory of all ranks. out: the sum, or its norm with a residual. never: calls in another
order, or of other sizes, on some of the ranks; waiting on the host.
"""

from __future__ import annotations

from typing import Final, Literal

HALF_BYTES: Final = 8 << 20
"""The largest message, in bytes. A rank's memory has room for four."""
MEET_S: Final = 2e-6
"""Seconds until all ranks have seen one another's flags: two trips over NVLink..."""
LINK_BYTES_PER_S: Final = 300e9
"""...and bytes per second that a rank reads from the others. Both by data sheet: they were not measured between GPUs."""

Shots = Literal["one", "two"]


def shots(num_ranks: int, nbytes: int) -> Shots | None:
    """How a message is summed; None: not here.

    In one shot each rank reads all of it from every other, and they meet once. In two it reads the others' parts of its
    slice, then their sums: 2 / `num_ranks` of the bytes, and they meet twice. That pays once what is not read would
    take longer than the second meeting.
    """
    if nbytes > HALF_BYTES:
        return None
    saved = nbytes * (num_ranks - 1) * (1 - 2 / num_ranks)
    return "two" if saved > MEET_S * LINK_BYTES_PER_S else "one"
