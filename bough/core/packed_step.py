"""A step as it travels to other ranks: its flat arrays lie one behind the other in one piece of memory.

Rank 0 encodes every step while the device waits for it. Encoding each array by itself takes three to four times as long
(`docs/decisions/shared_memory_collectives.md`).
"""

from __future__ import annotations

from operator import attrgetter, mul
from typing import Any, Final

import numpy as np
from msgspec import Struct

from bough.core.step import KVMoves, SharedSpans, SlotSetup, Step, StepMedia, StepStates

_I32, _I64, _BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)
ARRAYS: Final[dict[str, np.dtype[Any]]] = {
    "table_at": _I64, "slots": _I32, "num_query": _I32, "context": _I32, "tokens": _I32, "drafts": _I32,
    "table_pages": _I32, "copy_from": _I32, "copy_to": _I32, "constrained": _I32, "prompt_logprobs": _I32,
    "following": _I32, "room": _I32, "following_ids": _I32, "samples": _BOOL,
}  # fmt: skip
"""The flat arrays of a step, the widest elements first, so that each is aligned."""
_arrays_of = attrgetter(*ARRAYS)
_WIDTHS: Final = tuple(dtype.itemsize for dtype in ARRAYS.values())


class StepRest(Struct, kw_only=True):
    """What few steps have: as in `Step`."""

    moves: list[KVMoves]
    setups: list[SlotSetup]
    shared: SharedSpans | None
    media: StepMedia | None
    states: StepStates | None


class PackedStep(Struct, array_like=True):
    """Fields of `Step`, its arrays in one piece."""

    index: int
    num_decodes: int
    proposals: int
    lengths: list[int]
    """Elements of each of `ARRAYS`..."""
    data: bytes
    """...and all of them."""
    rest: StepRest | None


def pack_step(step: Step) -> PackedStep:
    arrays = _arrays_of(step)
    lengths = list(map(len, arrays))
    try:
        data = b"".join(arrays)
    except TypeError:  # one of them is a view with gaps
        data = b"".join([each.tobytes() for each in arrays])
    assert len(data) == sum(map(mul, lengths, _WIDTHS)), "an array has elements of another size than `ARRAYS` says"
    rest = None
    if step.setups or step.moves or step.shared or step.media or step.states:
        rest = StepRest(moves=step.moves, setups=step.setups, shared=step.shared, media=step.media, states=step.states)
    return PackedStep(step.index, step.num_decodes, step.proposals, lengths, data, rest)


def unpack_step(packed: PackedStep) -> Step:
    """The step; its arrays are read-only views."""
    found: dict[str, Any] = {}
    at = 0
    for (name, dtype), length in zip(ARRAYS.items(), packed.lengths, strict=True):
        found[name] = np.frombuffer(packed.data, dtype, length, at) if length else np.empty(0, dtype)
        at += length * dtype.itemsize
    if (rest := packed.rest) is not None:
        found |= {
            "moves": rest.moves, "setups": rest.setups, "shared": rest.shared, "media": rest.media,
            "states": rest.states,
        }  # fmt: skip
    return Step(index=packed.index, num_decodes=packed.num_decodes, proposals=packed.proposals, **found)
