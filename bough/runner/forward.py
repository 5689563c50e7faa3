"""One forward pass over packed step tensors, from token ids to logits and to sampled tokens.

The same code runs eagerly and under graph capture: it queues device work and reads nothing back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bough.kernels.attention.inputs import AttentionInputs, HostLengths, SharedGroups, Tail
from bough.kernels.sampling import sample
from bough.kernels.step_start import start_step
from bough.layers.batch import AttentionBackend, Batch, Model
from bough.memory.mha import KVPool
from bough.runner.inputs import StepTensors

AttentionFactory = Callable[[AttentionInputs], AttentionBackend]

TAIL_SHARE = 0.25
"""The last layer is narrowed to the tokens that are read if these are at most this part of the step."""


@dataclass(slots=True)
class DeviceState:
    """What lives on the device by slot. The last slot is spare, for padding."""

    page_table: Tensor
    """int32 [slots + 1, pages per slot]"""
    last_token: Tensor
    """int64 [slots + 1]: the token each slot's row sampled last."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What the host knows of a step: upper bounds that grids are sized by, and exact lengths where nothing is captured."""

    max_query: int
    max_kv: int
    shared: bool
    host: HostLengths | None = None


class Forward:
    """Binds the model, its KV and the device state."""

    def __init__(self, model: Model, pool: KVPool, state: DeviceState, attention: AttentionFactory) -> None:
        self.model = model
        self.pool = pool
        self.state = state
        self.narrows = True
        """The last layer computes no more than what is read (off where somebody watches the layers)."""
        self._attention = attention
        self._pages = state.page_table.view(-1)

    def write_table(self, at_U: Tensor, pages_U: Tensor) -> None:
        """Writes pages at flat places of the page table, ahead of a step."""
        self._pages.scatter_(0, at_U, pages_U)

    def hidden(self, tensors: StepTensors, extent: Extent, at: Tensor | None, segments: Tensor | None = None) -> Tensor:
        """Makes the step's page-table writes, and gives hidden states after the final norm at token indices `at` (all
        tokens: None)."""
        if at is not None and not len(at):
            return self.hidden(tensors, extent, at.new_zeros(1), segments)[:0]
        state = self.state
        ids = start_step(
            self._pages,
            tensors.table_at_U,
            tensors.table_pages_U,
            tensors.ids_T,
            tensors.token_slots_T,
            state.last_token,
        )
        shared = None
        if extent.shared:
            shared = SharedGroups(
                rows_S=tensors.group_rows_R, start_G1=tensors.group_start_R1, num_tokens_G=tensors.group_tokens_R
            )
        inputs = AttentionInputs(
            query_start_R1=tensors.query_start_R1,
            kv_len_R=tensors.kv_len_R,
            slots_R=tensors.slots_R,
            page_table=state.page_table,
            loc_T=tensors.loc_T,
            page_size=self.pool.page_size,
            max_query=extent.max_query,
            max_kv=extent.max_kv,
            k_caches=self.pool.keys,
            v_caches=self.pool.values,
            shared=shared,
            host=extent.host,
        )
        if self.narrows and at is not None and extent.host is not None and len(at) <= len(ids) * TAIL_SHARE:
            inputs.tail = Tail(at, partial(_rows_of, at, tensors, replace(inputs)))  # not itself: that would be a cycle
        batch = Batch(
            ids_T=ids,
            positions_T=tensors.positions_T,
            attention=self._attention(inputs),
            logits_at=at,
            num_tokens=len(ids),
            segments_T=segments,
        )
        return self.model.forward(batch)

    def draw(self, logits: Tensor, tensors: StepTensors) -> Tensor:
        """Samples one token a row and keeps it as the slot's last."""
        rows = len(logits)
        tokens = sample(
            logits,
            tensors.temperature_R[:rows],
            tensors.top_k_R[:rows],
            tensors.top_p_R[:rows],
            tensors.min_p_R[:rows],
            tensors.seed_R[:rows],
            tensors.counter_R[:rows],
        )
        return self.keep(tokens, tensors)

    def keep(self, tokens: Tensor, tensors: StepTensors) -> Tensor:
        tokens = tokens.to(torch.int64)
        self.state.last_token.scatter_(0, tensors.sample_slots_R[: len(tokens)], tokens)
        return tokens


def _rows_of(at: Tensor, tensors: StepTensors, inputs: AttentionInputs) -> AttentionInputs:
    """The tokens `at`, each as a row that sees everything up to itself."""
    return AttentionInputs(
        query_start_R1=torch.arange(len(at) + 1, dtype=torch.int32, device=at.device),
        kv_len_R=(tensors.positions_T[at] + 1).to(torch.int32),
        slots_R=tensors.token_slots_T[at].to(torch.int32),
        page_table=inputs.page_table,
        loc_T=inputs.loc_T[at],
        page_size=inputs.page_size,
        max_query=1,
        max_kv=inputs.max_kv,
        k_caches=inputs.k_caches,
        v_caches=inputs.v_caches,
        k_scales=inputs.k_scales,
        v_scales=inputs.v_scales,
    )
