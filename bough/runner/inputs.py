"""The arrays of a step, packed into one buffer that crosses to the device in one copy.

T tokens, R rows, U page-table writes, each padded to the sizes of a captured graph (or not padded at all). Padding is
harmless by construction: padded tokens write no KV, padded rows have no queries, and both refer to the spare
slot at the end of every table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.step import I32, Step
from bough.sampler.state import PlainRows

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Padded sizes of a step's arrays."""

    tokens: int
    rows: int
    writes: int


@dataclass(slots=True)
class StepTensors:
    """Device views of a packed step."""

    ids_T: Tensor
    """Input ids; negative: the last sample of the token's slot."""
    positions_T: Tensor
    token_slots_T: Tensor
    loc_T: Tensor
    """KV location (page * page_size + offset) that each token writes; -1: none."""
    kv_len_R: Tensor
    query_start_R1: Tensor
    slots_R: Tensor
    last_at_R: Tensor
    """Index of each sampling row's last token; padded with 0."""
    sample_slots_R: Tensor
    """Where each sampling row's token is kept; the spare slot for padding."""
    table_at_U: Tensor
    table_pages_U: Tensor
    temperature_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    top_k_R: Tensor
    seed_R: Tensor
    counter_R: Tensor
    group_rows_R: Tensor
    """Rows of the groups that share a leading span of KV, group after group..."""
    group_start_R1: Tensor
    """...where each group begins (unused groups are empty)..."""
    group_tokens_R: Tensor
    """...and how many tokens it shares."""


_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


def _fields(sizes: Sizes) -> list[tuple[str, Any, int]]:
    t, r, u = sizes.tokens, sizes.rows, sizes.writes
    return [
        ("ids_T", np.int64, t),
        ("positions_T", np.int64, t),
        ("token_slots_T", np.int64, t),
        ("loc_T", np.int64, t),
        ("kv_len_R", np.int32, r),
        ("query_start_R1", np.int32, r + 1),
        ("slots_R", np.int32, r),
        ("last_at_R", np.int64, r),
        ("sample_slots_R", np.int64, r),
        ("table_at_U", np.int64, u),
        ("table_pages_U", np.int32, u),
        ("temperature_R", np.float32, r),
        ("top_p_R", np.float32, r),
        ("min_p_R", np.float32, r),
        ("top_k_R", np.int32, r),
        ("seed_R", np.int64, r),
        ("counter_R", np.int64, r),
        ("group_rows_R", np.int32, r),
        ("group_start_R1", np.int32, r + 1),
        ("group_tokens_R", np.int32, r),
    ]


class Layout:
    """Where each array of a step of these sizes lies in the packed buffer."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._places: list[tuple[str, Any, int, int]] = []
        self._cuts: list[int] = []
        """Bytes of each array, and of the gap after it."""
        offset = 0
        for name, dtype, length in _fields(sizes):
            num_bytes = length * np.dtype(dtype).itemsize
            gap = -num_bytes % ALIGN
            self._places.append((name, dtype, offset, num_bytes))
            self._cuts += (num_bytes, gap)
            offset += num_bytes + gap
        self.num_bytes = offset

    def arrays(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        return {
            name: buffer[offset : offset + num_bytes].view(dtype) for name, dtype, offset, num_bytes in self._places
        }

    def tensors(self, buffer: Tensor) -> StepTensors:
        # One call for all: slices made one by one take longer, and the device has nothing to do yet.
        pieces = buffer.split_with_sizes(self._cuts)[::2]
        named = zip(self._places, pieces, strict=True)
        return StepTensors(**{name: piece.view(_TORCH[dtype]) for (name, dtype, _, _), piece in named})


class Packer:
    """Packs steps. Keeps the host's mirror of the page table, from which KV locations are looked up."""

    def __init__(self, num_slots: int, pages_per_slot: int, page_size: int) -> None:
        self.spare_slot = num_slots
        self.page_size = page_size
        self.table = np.zeros((num_slots + 1, pages_per_slot), np.int32)

    def pack(self, step: Step, plain: PlainRows, layout: Layout, buffer: npt.NDArray[np.uint8]) -> None:
        """Fills `buffer` with the step, padded to the layout's sizes."""
        self.fill(step, plain, layout.arrays(buffer))

    def fill(self, step: Step, plain: PlainRows, a: dict[str, npt.NDArray[Any]]) -> None:
        """Fills the arrays of a layout with the step, padded to their sizes."""
        num_tokens, num_rows, num_samples = step.num_tokens, step.num_rows, len(plain.rows)
        self.table.reshape(-1)[step.table_at] = step.table_pages
        query_start = np.zeros(num_rows + 1, np.int64)
        np.cumsum(step.num_query, out=query_start[1:])
        positions, token_slots = self._positions(step, query_start)
        pages = self.table[token_slots, positions // self.page_size]
        _put(a["ids_T"], step.tokens, 0)
        _put(a["positions_T"], positions, 0)
        _put(a["token_slots_T"], token_slots, self.spare_slot)
        _put(a["loc_T"], pages * self.page_size + positions % self.page_size, -1)
        _put(a["kv_len_R"], step.context + step.num_query, 0)
        _put(a["query_start_R1"], query_start, num_tokens)
        _put(a["slots_R"], step.slots, self.spare_slot)
        _put(a["last_at_R"], query_start[1:][plain.rows] - 1, 0)
        _put(a["sample_slots_R"], plain.slots, self.spare_slot)
        spare = self.spare_slot * self.table.shape[1]
        _put(a["table_at_U"], step.table_at, spare)
        _put(a["table_pages_U"], step.table_pages, 0)
        for name, values, pad in (
            ("temperature_R", plain.temperature, 0.0),
            ("top_p_R", plain.top_p, 1.0),
            ("min_p_R", plain.min_p, 0.0),
            ("top_k_R", plain.top_k, 1),
            ("seed_R", plain.seed, 0),
            ("counter_R", plain.counter, 0),
        ):
            a[name][:num_samples] = values
            a[name][num_samples:] = pad
        if step.shared is not None:
            _put(a["group_rows_R"], step.shared.rows, 0)
            _put(a["group_start_R1"], step.shared.start, len(step.shared.rows))
            _put(a["group_tokens_R"], step.shared.num_tokens, 0)
        else:
            a["group_start_R1"][:] = 0

    def _positions(
        self, step: Step, query_start: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Position and slot of every token. Decode-only steps need no expansion."""
        if step.num_tokens == step.num_rows:
            return step.context.astype(np.int64), step.slots.astype(np.int64)
        base = np.repeat(step.context - query_start[:-1], step.num_query)
        return base + np.arange(step.num_tokens), np.repeat(step.slots.astype(np.int64), step.num_query)


def _put(target: npt.NDArray[Any], values: npt.NDArray[Any] | I32, pad: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = pad
