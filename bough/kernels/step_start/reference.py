"""The start of a step in plain torch. Reads nothing back from the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.kernels.step_start import SlotState, StepInputs


def start_step(state: SlotState, inputs: StepInputs, page_size: int) -> None:
    table = state.page_table
    state.table_entries.scatter_(0, inputs.table_at_U, inputs.table_pages_U)
    places = torch.arange(max(map(len, (inputs.ids_T, inputs.slots_R, inputs.counter_L))), device=table.device)
    tokens, rows, samples = (places[None] < inputs.derived[:, None]).unbind()

    slots, ids = inputs.token_slots_T, inputs.ids_T
    ids = torch.where(ids == -1, state.last_token[slots], ids)
    if state.drafts.shape[1]:
        ids = torch.where(ids < -1, state.drafts[slots, (-2 - ids).clamp_min(0)], ids)
    is_derived, room = tokens[: len(ids)], inputs.loc_T
    positions = inputs.positions_T + state.kv_len[slots]
    page = table[slots, (positions // page_size).clamp_max(table.shape[1] - 1)].long()
    loc = torch.where(positions < room, page * page_size + positions % page_size, -1)
    inputs.ids_T.copy_(torch.where(is_derived, ids, inputs.ids_T))
    inputs.positions_T.copy_(torch.where(is_derived, positions, inputs.positions_T))
    inputs.loc_T.copy_(torch.where(is_derived, loc, room))

    length = state.kv_len[inputs.slots_R.long()].to(inputs.kv_len_R.dtype)
    inputs.kv_len_R.add_(length.masked_fill_(~rows[: len(length)], 0))
    drawn = state.num_output[inputs.sample_slots_L]
    inputs.counter_L.add_(drawn.masked_fill_(~samples[: len(drawn)], 0))


def locate(state: SlotState, inputs: StepInputs, page_sizes: Sequence[int]) -> list[Tensor]:
    slots, positions, is_nowhere = inputs.token_slots_T, inputs.positions_T, inputs.loc_T < 0
    located = []
    for table, page_size in zip(state.tables[1:], page_sizes[1:], strict=True):
        page = table[slots, (positions // page_size).clamp_max(table.shape[1] - 1)].long()
        located.append((page * page_size + positions % page_size).masked_fill_(is_nowhere, -1))
    return located
