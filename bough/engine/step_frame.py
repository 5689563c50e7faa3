"""A step as it travels to other ranks: its flat arrays lie one behind the other in one piece of memory.

Rank 0 makes a frame of every step while the device waits for it. Encoding each array by itself takes three to four times as
long, encoding the piece as part of a struct takes half as long again (`docs/decisions/shared_memory_collectives.md`).

A frame is `_HEAD` (the numbers, and the elements of each of `ARRAYS`), the arrays, and what few steps have as msgpack.
"""

from __future__ import annotations

import struct
from operator import attrgetter, mul
from typing import Any, Final

import numpy as np
from msgspec import Struct

from bough.core.step import KVMoves, SharedSpans, SlotSetup, Step, StepMedia, StepStates
from bough.ipc.codec import OWN_FRAME, Codec, OwnFrame

_I32, _I64, _BOOL = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.bool_)
ARRAYS: Final[dict[str, np.dtype[Any]]] = {
    "table_at": _I64, "slots": _I32, "num_query": _I32, "context": _I32, "tokens": _I32, "drafts": _I32,
    "table_pages": _I32, "copy_from": _I32, "copy_to": _I32, "constrained": _I32, "prompt_logprobs": _I32,
    "following": _I32, "room": _I32, "following_ids": _I32, "adapters": _I32, "samples": _BOOL,
}  # fmt: skip
"""The flat arrays of a step, the widest elements first, so that each is aligned."""
_arrays_of = attrgetter(*ARRAYS)
_WIDTHS: Final = tuple(dtype.itemsize for dtype in ARRAYS.values())
_HEAD: Final = struct.Struct(f"<B?2xI4q{len(ARRAYS)}I")
"""`OWN_FRAME`, `alike`, `rows`, `index`, `num_decodes`, `proposals`, bytes of the arrays, and their lengths. A multiple of 8
bytes: arrays behind it are aligned."""
_make_head = _HEAD.pack


class StepRest(Struct, kw_only=True):
    """What few steps have: as in `Step`."""

    moves: list[KVMoves]
    setups: list[SlotSetup]
    shared: SharedSpans | None
    media: StepMedia | None
    states: StepStates | None


_rests: Final[Codec[StepRest]] = Codec(StepRest)


class RunStep(OwnFrame):
    """A step to launch."""

    __slots__ = ("alike", "rows", "step")
    __match_args__ = ("step", "rows", "alike")

    def __init__(self, step: Step, rows: int = 0, *, alike: bool = False) -> None:
        """`rows`: tokens that each rank brings to the step, where ranks hold different tokens; `alike`: whether those that
        share contexts hold the same."""
        self.step = step
        self.rows = rows
        self.alike = alike

    def to_frame(self) -> bytes:
        step = self.step
        arrays = _arrays_of(step)
        try:
            data = b"".join(arrays)
        except TypeError:  # one of them is a view with gaps
            data = b"".join([each.tobytes() for each in arrays])
        head = _make_head(
            OWN_FRAME, self.alike, self.rows, step.index, step.num_decodes, step.proposals, len(data), *map(len, arrays)
        )
        if step.setups or step.moves or step.shared or step.media or step.states:
            rest = StepRest(
                moves=step.moves, setups=step.setups, shared=step.shared, media=step.media, states=step.states
            )
            return head + data + _rests.encode(rest)
        return head + data

    @classmethod
    def from_frame(cls, frame: bytes | memoryview) -> RunStep:
        """The step's arrays are views of the frame, which must not change."""
        if len(frame) < _HEAD.size:
            raise ValueError("the frame of a step ends early")
        _, alike, rows, index, num_decodes, proposals, num_bytes, *lengths = _HEAD.unpack_from(frame)
        if num_bytes != sum(map(mul, lengths, _WIDTHS)):
            raise ValueError("an array of a step has elements of another size than `ARRAYS` says")
        if len(frame) < _HEAD.size + num_bytes:
            raise ValueError("the frame of a step ends early")
        found: dict[str, Any] = {}
        at = _HEAD.size
        for (name, dtype), length in zip(ARRAYS.items(), lengths, strict=True):
            found[name] = np.frombuffer(frame, dtype, length, at) if length else np.empty(0, dtype)
            at += length * dtype.itemsize
        if at < len(frame):
            rest = _rests.decode(memoryview(frame)[at:])
            found |= {
                "moves": rest.moves, "setups": rest.setups, "shared": rest.shared, "media": rest.media,
                "states": rest.states,
            }  # fmt: skip
        return cls(Step(index=index, num_decodes=num_decodes, proposals=proposals, **found), rows, alike=alike)
