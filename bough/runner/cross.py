"""Cross attention of a step: which pages hold the media that its tokens read.

T tokens, M positions of media, L lines of media.

Every token is a row of its own with one query, which sees all of its request's media: so attention backends need to know
nothing of it.
"""

from __future__ import annotations

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


class CrossPages:
    """One rank's pages of media."""

    def __init__(self, pool: KVPool, state: SlotState, attention: AttentionFactory, most: int) -> None:
        """`attention`: serves nothing else. `most`: positions of a request's media."""
        self._pool, self._state, self._attention, self._most = pool, state, attention, most

    def of_step(self, token_slots_T: Tensor, fresh: FreshMedia | None) -> StepCross:
        """What the tokens of a step read. Queues device work only, and may be captured."""
        pool, state = self._pool, self._state
        assert state.media_len is not None
        assert pool.line_of is not None, "tokens and media have lines of their own"
        lengths_T = state.media_len[token_slots_T]
        nowhere_T = torch.full_like(token_slots_T, -1)
        tables = (*state.tables, *state.media_tables)
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
