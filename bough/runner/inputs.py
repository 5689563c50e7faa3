"""The arrays of a step, packed into one buffer that crosses to the device in one copy.

T tokens, R rows, L samples, U page-table writes, M rows of shared spans, each padded to the sizes of a captured graph
(or not padded at all). Padding is harmless by construction: padded tokens write no KV, padded rows have no queries, and
both refer to the spare slot at the end of every table.

Decode rows come first. How long they are is known to the device, so their part of the arrays is completed there by
`kernels.step_start` (*derived*); the host writes what does not depend on it.

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

from bough.core.kv import KvLayout, TablePlaces
from bough.core.step import I32, MOST_LEVELS, RunnerLimits, Step
from bough.runner.staging import ALIGN, Stage
from bough.sampler.state import Samples


@dataclass(frozen=True, slots=True)
class Sizes:
    """Padded sizes of a step's arrays."""

    tokens: int
    rows: int
    samples: int
    writes: int
    members: int = 0
    """Rows of shared spans, each as often as it has spans."""


@dataclass(slots=True)
class StepTensors:
    """Device views of a packed step, block after block: `StepInputs` of `kernels.step_start`, and more."""

    ids_T: Tensor
    positions_T: Tensor
    token_slots_T: Tensor
    loc_T: Tensor
    """KV location (page * page_size + offset) that each token writes; -1: none."""
    sample_at_L: Tensor
    """The token behind which each sample is drawn; padded with 0."""
    sample_slots_L: Tensor
    """Where each sample is kept; the spare slot for padding."""
    top_k_L: Tensor
    seed_L: Tensor
    counter_L: Tensor
    table_at_U: Tensor
    query_start_R1: Tensor
    span_start_R1: Tensor
    """Where the rows of each shared span begin (unused spans have none): there are fewer spans than rows."""
    sample_start_R1: Tensor
    """Where the samples of each sampling row begin (padded rows have none); set in steps with drafts only."""
    kv_len_R: Tensor
    slots_R: Tensor
    span_first_R: Tensor
    span_last_R: Tensor
    span_level_R: Tensor
    room_R: Tensor
    """KV tokens that the row's pages hold; set in steps with a proposer only, like..."""
    following_R: Tensor
    """...the prompt token behind the row's last query token."""
    span_rows_M: Tensor
    """The spans' rows, span after span."""
    table_pages_U: Tensor
    derived: Tensor
    """Leading tokens, rows and samples that are derived."""
    temperature_L: Tensor
    top_p_L: Tensor
    min_p_L: Tensor


@dataclass(slots=True)
class StepArrays:
    """Host views of a packed step: its blocks. Lines are arrays of `StepTensors`, in the same order."""

    tokens: npt.NDArray[np.int64]
    """ids, positions, token_slots, loc"""
    samples: npt.NDArray[np.int64]
    """sample_at, sample_slots, then `Samples.longs`"""
    table_at: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int32]
    """query_start, span_start, sample_start"""
    rows: npt.NDArray[np.int32]
    """kv_len, slots, span_first, span_last, span_level, room, following"""
    span_rows: npt.NDArray[np.int32]
    table_pages: npt.NDArray[np.int32]
    derived: npt.NDArray[np.int32]
    filters: npt.NDArray[np.float32]
    """`Samples.floats`"""


_T, _R, _R1, _L, _U, _M, _COUNTS = range(7)
_BLOCKS: tuple[tuple[type[Any], int, torch.dtype, tuple[tuple[int, int], ...]], ...] = (
    (np.int64, 8, torch.int64, ((4, _T), (5, _L), (1, _U))),
    (np.int32, 4, torch.int32, ((3, _R1), (7, _R), (1, _M), (1, _U), (1, _COUNTS))),
    (np.float32, 4, torch.float32, ((3, _L),)),
)
"""By type and its size: how many arrays of which length each block has, in the order of `StepTensors`."""


class StepLayout:
    """Where each array of a step of these sizes lies in the packed buffer."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._blocks: list[tuple[tuple[int, int], type[Any], int, tuple[int, int]]] = []
        """Shape, type, first byte and strides of each."""
        self._parts: list[int] = []
        """Bytes of all blocks of a type..."""
        self._cuts: list[list[int]] = []
        """...and, in elements, its arrays, each with the gap behind it."""
        lengths = (sizes.tokens, sizes.rows, sizes.rows + 1, sizes.samples, sizes.writes, sizes.members, 3)
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
    writes = (2 * rows + tokens) * max(1, limits.layout.column_pages)
    sizes = Sizes(tokens, rows, samples=rows, writes=writes, members=MOST_LEVELS * rows)
    return StepLayout(sizes).num_bytes


class Packer:
    """Packs steps. Keeps the host's mirror of the page table, from whose first line KV locations are looked up."""

    def __init__(self, num_slots: int, columns: int, layout: KvLayout) -> None:
        """`columns`: those of a slot."""
        parts = layout.line_parts[0] if layout.line_parts else 1
        self.page_size = layout.page_size // parts
        self.pages_per_slot = columns * parts
        """Of the first line."""
        self._pages: I32 = np.zeros(max(TablePlaces(layout, num_slots, columns).size, 1), np.int32)
        """As `Step.table_at` counts."""
        self._token_padding = np.array([[0], [0], [num_slots], [-1]])
        self._sample_padding = np.array([[0], [num_slots], [1], [0], [0]])
        self._filter_padding = np.array([[0.0], [1.0], [0.0]])
        self._row_padding = np.array([[0], [num_slots], [0], [0], [0], [0], [0]])
        self._write_padding = num_slots * self.pages_per_slot

    def write_table(self, step: Step) -> None:
        """Notes the step's page-table writes."""
        self._pages[step.table_at] = step.table_pages

    def pack(
        self,
        step: Step,
        samples: Samples,
        layout: StepLayout,
        buffer: npt.NDArray[np.uint8],
        *,
        writes_table: bool = True,
    ) -> None:
        """Fills `buffer` with the step, padded to the layout's sizes. Without `writes_table` its page-table writes have been
        made already."""
        arrays = layout.arrays(buffer)
        num_writes = len(step.table_at) if writes_table else 0
        if num_writes:
            self.write_table(step)
            arrays.table_at[0, :num_writes] = step.table_at
            arrays.table_pages[0, :num_writes] = step.table_pages
        _pad(arrays.table_at, num_writes, self._write_padding)
        _pad(arrays.table_pages, num_writes, 0)
        self._put_rows(step, arrays)
        self._put_tokens(step, arrays)
        self._put_samples(samples, arrays)

    def upload(self, step: Step, samples: Samples, stage: Stage) -> StepTensors:
        """Queues the copy of a step, not padded, to the device."""
        members = 0 if step.shared is None else len(step.shared.rows)
        layout = StepLayout(Sizes(step.num_tokens, max(step.num_rows, 1), samples.count, len(step.table_at), members))
        room = stage.room(layout.num_bytes)
        self.pack(step, samples, layout, room.array)
        return layout.tensors(stage.send(room.tensor))

    def _put_rows(self, step: Step, into: StepArrays) -> None:
        num_rows, decodes, rows, starts = step.num_rows, step.num_decodes, into.rows, into.starts
        starts[:, 0] = 0
        np.add.accumulate(step.num_query, out=starts[0, 1 : num_rows + 1])
        rows[0, :num_rows] = step.num_query
        if decodes < num_rows:
            rows[0, decodes:num_rows] += step.context[decodes:]
        rows[1, :num_rows] = step.slots
        if len(step.room):
            rows[5, :num_rows] = step.room
            rows[6, :num_rows] = step.following_ids
        else:
            rows[5:, :num_rows] = 0
        _pad(rows, num_rows, self._row_padding)
        _pad(starts, num_rows + 1, step.num_tokens)
        shared = step.shared
        if shared is None:
            starts[1] = 0
        else:
            num_spans, num_members = len(shared.last), len(shared.rows)
            starts[1, : num_spans + 1] = shared.start
            starts[1, num_spans + 1 :] = num_members
            rows[2, :num_spans] = shared.first
            rows[3, :num_spans] = shared.last
            rows[4, :num_spans] = shared.level
            rows[2:5, num_spans:] = 0
            into.span_rows[0, :num_members] = shared.rows
            into.span_rows[0, num_members:] = 0

    def _put_tokens(self, step: Step, into: StepArrays) -> None:
        num_tokens, num_rows, decodes, tokens = step.num_tokens, step.num_rows, step.num_decodes, into.tokens
        derived = int(into.starts[0, decodes])
        into.derived[0, :2] = derived, decodes
        tokens[0, :num_tokens] = step.tokens
        if decodes:
            self._put_derived(step, derived, into)
        if decodes < num_rows:
            self._put_known(step, derived, into)
        _pad(tokens, num_tokens, self._token_padding)

    def _put_derived(self, step: Step, num_tokens: int, into: StepArrays) -> None:
        """Decode rows: of each token its place in the row, and where the row's pages end."""
        decodes, tokens = step.num_decodes, into.tokens
        slots, room = step.slots[:decodes], (step.context + step.num_query)[:decodes]
        place: npt.NDArray[Any] | int = 0
        if decodes < num_tokens:
            num_query = step.num_query[:decodes]
            slots, room, first = (each.repeat(num_query) for each in (slots, room, into.starts[0, :decodes]))
            place = np.arange(num_tokens) - first
        tokens[1, :num_tokens] = place
        tokens[2, :num_tokens] = slots
        tokens[3, :num_tokens] = room

    def _put_known(self, step: Step, derived: int, into: StepArrays) -> None:
        """Rows whose lengths the host knows: positions, and locations by its mirror of the table."""
        decodes, num_tokens = step.num_decodes, step.num_tokens
        slots, positions, num_query = step.slots[decodes:], step.context[decodes:], step.num_query[decodes:]
        lines = np.multiply(slots, self.pages_per_slot, dtype=np.int64)
        if len(slots) < num_tokens - derived:  # otherwise each row has one token
            first = positions - into.starts[0, decodes : step.num_rows]
            if len(slots) > 1:  # otherwise the row's numbers are every token's
                first, slots, lines = (each.repeat(num_query) for each in (first, slots, lines))
            positions = np.arange(derived, num_tokens, dtype=np.int32)
            positions += first
        places = positions // self.page_size
        pages = self._pages.take(lines + places)
        pages -= places
        tokens = into.tokens[:, derived:num_tokens]
        tokens[1] = positions
        tokens[2] = slots
        tokens[3] = pages
        locations = tokens[3]  # page * page_size + position % page_size, without another division
        locations *= self.page_size
        locations += tokens[1]

    def _put_samples(self, given: Samples, into: StepArrays) -> None:
        count, samples, filters, num_rows = given.count, into.samples, into.filters, len(given.rows)
        into.derived[0, 2] = given.num_derived
        ends = into.starts[0, 1:].take(given.rows)
        if given.starts is None:
            samples[0, :count] = ends
            samples[0, :count] -= 1
        else:
            # The last sample of a row is drawn behind its last token, those before it behind the tokens before.
            samples[0, :count] = np.arange(count) + (ends - given.starts[1:]).repeat(np.diff(given.starts))
            into.starts[2, : num_rows + 1] = given.starts
            into.starts[2, num_rows + 1 :] = count
        samples[1, :count] = given.slots
        samples[2:, :count] = given.longs
        filters[:, :count] = given.floats
        _pad(samples, count, self._sample_padding)
        _pad(filters, count, self._filter_padding)


def _pad(block: npt.NDArray[Any], used: int, padding: npt.NDArray[Any] | int) -> None:
    if used < block.shape[1]:
        block[:, used:] = padding
