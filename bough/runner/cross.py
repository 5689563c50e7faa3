"""Cross attention of a step: which pages hold the media that its tokens read.

T tokens, M positions of media, L lines of media, S tokens that see other media than answers, P runs of them.

Every token is a row of its own with one query, which sees media from the beginning of a line of a page table on: so
attention backends need to know nothing of it. Where tokens of a prompt see media that lie further behind, their runs get
lines of their own, which begin there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionInputs, Lines, Spec
from bough.kernels.rotary import write_kv
from bough.kernels.step_start import SlotState
from bough.layers.batch import AttentionBackend
from bough.memory.mha import KVPool
from bough.runner.context import AttentionFactory


@dataclass(frozen=True, slots=True)
class FreshMedia:
    """Media whose keys and values a step writes."""

    values_MW: Tensor
    """Their embeddings..."""
    at_LM: Tensor
    """...and int64: where they go in each line of media, as `page * page size + offset`."""


@dataclass(frozen=True, slots=True)
class MediaSights:
    """Tokens that see other media than their slot's answer will."""

    at_S: Tensor
    """int64, among the step's tokens..."""
    length_S: Tensor
    """...int64: the positions that each sees..."""
    run_S: Tensor
    """...and int64: its run."""
    slot_P: Tensor
    """int64: the run's slot..."""
    column_P: Tensor
    """...and int64: the first column of media that it sees."""


class CrossPages:
    """One rank's pages of media."""

    def __init__(self, pool: KVPool, state: SlotState, attention: AttentionFactory, most: int) -> None:
        """`attention`: serves nothing else. `most`: positions of a request's media."""
        self._pool, self._state, self._attention, self._most = pool, state, attention, most

    def of_step(self, token_slots_T: Tensor, fresh: FreshMedia | None, sights: MediaSights | None) -> StepCross:
        """What the tokens of a step read. Queues device work only, and may be captured without `fresh` and `sights`."""
        pool, state = self._pool, self._state
        assert state.media_len is not None
        assert pool.line_of is not None, "tokens and media have lines of their own"
        lengths_T = state.media_len[token_slots_T]
        nowhere_T = torch.full_like(token_slots_T, -1)
        media_tables: Sequence[Tensor] = state.media_tables
        if sights is not None:
            lengths_T = lengths_T.index_copy(0, sights.at_S, sights.length_S.to(lengths_T.dtype))
            rows_S = (len(media_tables[0]) + sights.run_S).to(token_slots_T.dtype)
            token_slots_T = token_slots_T.index_copy(0, sights.at_S, rows_S)
            sizes = pool.page_sizes[len(state.tables) :]
            media_tables = [
                _with_runs(table, pool.page_size // size, sights)
                for table, size in zip(media_tables, sizes, strict=True)
            ]
        tables = (*state.tables, *media_tables)
        inputs = AttentionInputs(
            query_start_R1=torch.arange(len(token_slots_T) + 1, dtype=torch.int32, device=token_slots_T.device),
            kv_len_R=lengths_T.to(torch.int32),
            slots_R=token_slots_T.to(torch.int32),
            page_table=tables[0],
            loc_T=nowhere_T,
            page_size=pool.page_size,
            max_query=1,
            max_kv=self._most,
            k_caches=pool.keys,
            v_caches=pool.values,
            k_scales=pool.k_scales,
            v_scales=pool.v_scales,
            lines=Lines(pool.line_of, tables, [nowhere_T] * len(tables), pool.page_sizes),
        )
        return StepCross(pool, len(state.tables), self._attention(inputs), inputs, lengths_T, fresh)


def _with_runs(table: Tensor, parts: int, sights: MediaSights) -> Tensor:
    """A page table of media with a line for each run, which begins where the run sees media. `parts`: pages of a column."""
    width = table.shape[1]
    at_PW = sights.column_P[:, None] * parts + torch.arange(width, device=table.device)
    return torch.cat([table, table[sights.slot_P].gather(1, at_PW.clamp_(max=width - 1))])


class StepCross:
    """A `layers.batch.CrossKv`."""

    def __init__(
        self,
        pool: KVPool,
        first_line: int,
        backend: AttentionBackend,
        inputs: AttentionInputs,
        lengths_T: Tensor,
        fresh: FreshMedia | None,
    ) -> None:
        """`first_line`: of media."""
        self._pool, self._first_line, self._backend, self._inputs = pool, first_line, backend, inputs
        self._fresh = fresh
        self.has_media_T1 = lengths_T[:, None] > 0

    @property
    def fresh_MW(self) -> Tensor | None:
        return None if self._fresh is None else self._fresh.values_MW

    def write(self, spec: Spec, k_MKH: Tensor, v_MKH: Tensor) -> None:
        pool, layer = self._pool, spec.layer
        assert self._fresh is not None
        assert pool.line_of is not None
        at_M = self._fresh.at_LM[pool.line_of[layer] - self._first_line]
        k_scale, v_scale = self._inputs.scales(layer)
        write_kv(k_MKH, v_MKH, pool.keys[layer], pool.values[layer], at_M, k_scale=k_scale, v_scale=v_scale)

    def attend(self, spec: Spec, q_TNH: Tensor) -> Tensor:
        unused_TKH = q_TNH.new_zeros(len(q_TNH), spec.num_kv_heads, spec.head_dim)  # goes nowhere
        return self._backend.forward(spec, q_TNH, unused_TKH, unused_TKH)
