"""The arrays of a step, packed into one buffer that crosses to the device in one copy.

T tokens, R rows, U page-table writes, each padded to the sizes of a captured graph (or not padded at all). Padding is
harmless by construction: padded tokens write no KV, padded rows have no queries, and both refer to the spare
slot at the end of every table.

A device without other work waits while a step is packed, and the time goes into calls rather than into what they do. So
arrays of one type and length form a *block*, which is laid out, padded and given to the device as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.step import I32, RunnerLimits, Step
from bough.runner.staging import ALIGN, Stage
from bough.sampler.state import PlainRows


@dataclass(frozen=True, slots=True)
class Sizes:
    """Padded sizes of a step's arrays."""

    tokens: int
    rows: int
    writes: int


@dataclass(slots=True)
class StepTensors:
    """Device views of a packed step, block after block."""

    ids_T: Tensor
    """Input ids; negative: the last sample of the token's slot."""
    positions_T: Tensor
    token_slots_T: Tensor
    loc_T: Tensor
    """KV location (page * page_size + offset) that each token writes; -1: none."""
    last_at_R: Tensor
    """Index of each sampling row's last token; padded with 0."""
    sample_slots_R: Tensor
    """Where each sampling row's token is kept; the spare slot for padding."""
    top_k_R: Tensor
    seed_R: Tensor
    counter_R: Tensor
    table_at_U: Tensor
    query_start_R1: Tensor
    group_start_R1: Tensor
    """Where each group of rows that share a leading span of KV begins (unused groups are empty)..."""
    kv_len_R: Tensor
    slots_R: Tensor
    group_rows_R: Tensor
    """...the groups' rows, group after group..."""
    group_tokens_R: Tensor
    """...and how many tokens each group shares."""
    table_pages_U: Tensor
    temperature_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor


@dataclass(slots=True)
class StepArrays:
    """Host views of a packed step: its blocks. Lines are arrays of `StepTensors`, in the same order."""

    tokens: npt.NDArray[np.int64]
    """ids, positions, token_slots, loc"""
    samples: npt.NDArray[np.int64]
    """last_at, sample_slots, then `PlainRows.longs`"""
    table_at: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    """query_start, group_start"""
    rows: npt.NDArray[np.int32]
    """kv_len, slots, group_rows, group_tokens"""
    table_pages: npt.NDArray[np.int32]
    filters: npt.NDArray[np.float32]
    """`PlainRows.floats`"""


_T, _R, _R1, _U = range(4)
_BLOCKS: tuple[tuple[type[Any], int, torch.dtype, tuple[tuple[int, int], ...]], ...] = (
    (np.int64, 8, torch.int64, ((4, _T), (5, _R), (1, _U))),
    (np.int32, 4, torch.int32, ((2, _R1), (4, _R), (1, _U))),
    (np.float32, 4, torch.float32, ((3, _R),)),
)
"""By type and its size: how many arrays of which length each block has, in the order of `StepTensors`."""


class Layout:
    """Where each array of a step of these sizes lies in the packed buffer."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._blocks: list[tuple[tuple[int, int], type[Any], int, tuple[int, int]]] = []
        """Shape, type, first byte and strides of each."""
        self._parts: list[int] = []
        """Bytes of all blocks of a type..."""
        self._cuts: list[list[int]] = []
        """...and, in elements, its arrays, each with the gap behind it."""
        lengths = (sizes.tokens, sizes.rows, sizes.rows + 1, sizes.writes)
        end = 0
        for dtype, item_bytes, _, blocks in _BLOCKS:
            start, cuts = end, []
            for count, which in blocks:
                length = lengths[which]
                gap = -length % (ALIGN // item_bytes)
                line_bytes = (length + gap) * item_bytes
                self._blocks.append(((count, length), dtype, end, (line_bytes, item_bytes)))
                cuts += [length, gap] * count
                end += count * line_bytes
            self._parts.append(end - start)
            self._cuts.append(cuts)
        self.num_bytes = end

    def arrays(self, buffer: npt.NDArray[np.uint8]) -> StepArrays:
        return StepArrays(
            *[np.ndarray(shape, dtype, buffer, at, strides) for shape, dtype, at, strides in self._blocks]
        )

    def tensors(self, buffer: Tensor) -> StepTensors:
        # One call for all arrays of a type: made one by one they take longer.
        tensors: list[Tensor] = []
        for part, (_, _, dtype, _), cuts in zip(buffer.split_with_sizes(self._parts), _BLOCKS, self._cuts, strict=True):
            tensors += part.view(dtype).split_with_sizes(cuts)[::2]
        return StepTensors(*tensors)


def stage_bytes(limits: RunnerLimits) -> int:
    """Host memory that all but the strangest steps need."""
    tokens, rows = limits.max_step_tokens, limits.num_slots
    return Layout(Sizes(tokens, rows, writes=2 * rows + tokens)).num_bytes


class Packer:
    """Packs steps. Keeps the host's mirror of the page table, from which KV locations are looked up."""

    def __init__(self, num_slots: int, pages_per_slot: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages_per_slot = pages_per_slot
        self.table: I32 = np.zeros((num_slots + 1, pages_per_slot), np.int32)
        self._pages = self.table.reshape(-1)
        """The same, as `Step.table_at` counts."""
        self._token_padding = np.array([[0], [0], [num_slots], [-1]])
        self._sample_padding = np.array([[0], [num_slots], [1], [0], [0]])
        self._filter_padding = np.array([[0.0], [1.0], [0.0]])
        self._row_padding = np.array([[0], [num_slots], [0], [0]])
        self._write_padding = num_slots * pages_per_slot

    def write_table(self, step: Step) -> None:
        """Notes the step's page-table writes."""
        self._pages[step.table_at] = step.table_pages

    def pack(self, step: Step, plain: PlainRows, layout: Layout, buffer: npt.NDArray[np.uint8]) -> None:
        """Fills `buffer` with the step, padded to the layout's sizes."""
        arrays = layout.arrays(buffer)
        self.write_table(step)
        num_writes = len(step.table_at)
        arrays.table_at[0, :num_writes] = step.table_at
        arrays.table_pages[0, :num_writes] = step.table_pages
        _pad(arrays.table_at, num_writes, self._write_padding)
        _pad(arrays.table_pages, num_writes, 0)
        self._put_rows(step, arrays)
        self._put_tokens(step, arrays)
        self._put_samples(plain, arrays)

    def upload(self, step: Step, plain: PlainRows, stage: Stage) -> StepTensors:
        """Queues the copy of a step, not padded, to the device."""
        layout = Layout(Sizes(tokens=step.num_tokens, rows=max(step.num_rows, 1), writes=len(step.table_at)))
        room = stage.room(layout.num_bytes)
        self.pack(step, plain, layout, room.array)
        return layout.tensors(stage.send(room.tensor))

    def _put_rows(self, step: Step, into: StepArrays) -> None:
        num_rows, rows, starts = step.num_rows, into.rows, into.starts
        starts[:, 0] = 0
        np.add.accumulate(step.num_query, out=starts[0, 1 : num_rows + 1])
        np.add(step.context, step.num_query, out=rows[0, :num_rows])
        rows[1, :num_rows] = step.slots
        _pad(rows, num_rows, self._row_padding)
        _pad(starts, num_rows + 1, step.num_tokens)
        shared = step.shared
        if shared is None:
            starts[1] = 0
        else:
            num_groups, num_members = len(shared.num_tokens), len(shared.rows)
            starts[1, : num_groups + 1] = shared.start
            starts[1, num_groups + 1 :] = num_members
            rows[2, :num_members] = shared.rows
            rows[3, :num_groups] = shared.num_tokens
            rows[3, num_groups:] = 0

    def _put_tokens(self, step: Step, into: StepArrays) -> None:
        num_tokens, num_rows, tokens = step.num_tokens, step.num_rows, into.tokens
        slots, positions = step.slots, step.context
        lines = np.multiply(slots, self.pages_per_slot, dtype=np.int64)
        if num_rows < num_tokens:  # otherwise each row has one token
            first = positions - into.starts[0, :num_rows]
            if num_rows > 1:  # otherwise the row's numbers are every token's
                first, slots, lines = (each.repeat(step.num_query) for each in (first, slots, lines))
            positions = np.arange(num_tokens, dtype=np.int32)
            positions += first
        places = positions // self.page_size
        pages = self._pages.take(lines + places)
        pages -= places
        tokens[0, :num_tokens] = step.tokens
        tokens[1, :num_tokens] = positions
        tokens[2, :num_tokens] = slots
        tokens[3, :num_tokens] = pages
        locations = tokens[3, :num_tokens]  # page * page_size + position % page_size, without another division
        locations *= self.page_size
        locations += tokens[1, :num_tokens]
        _pad(tokens, num_tokens, self._token_padding)

    def _put_samples(self, plain: PlainRows, into: StepArrays) -> None:
        num_samples, samples, filters = len(plain.rows), into.samples, into.filters
        samples[0, :num_samples] = into.starts[0, 1:].take(plain.rows)
        samples[0, :num_samples] -= 1
        samples[1, :num_samples] = plain.slots
        samples[2:, :num_samples] = plain.longs
        filters[:, :num_samples] = plain.floats
        _pad(samples, num_samples, self._sample_padding)
        _pad(filters, num_samples, self._filter_padding)


def _pad(block: npt.NDArray[Any], used: int, padding: npt.NDArray[Any] | int) -> None:
    if used < block.shape[1]:
        block[:, used:] = padding
