"""What the kernels for chains of drafts compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from bough.kernels.draft_chain import Ahead, ChainPages, ChainRows, ChainSide
from bough.kernels.norm import rms_norm


def look_ahead(rows: ChainRows, pages: ChainPages, places: int) -> Ahead:
    count, spare = len(rows.slots_R), len(pages.room) - 1
    more = -count % 4
    slots = pad(rows.slots_R, (0, more), value=spare)
    steps_P1 = torch.arange(places, device=slots.device)[:, None]
    positions = pad(rows.kv_len_R, (0, more)) + steps_P1
    room, nowhere = pages.room[slots], slots == spare
    kv_len = torch.minimum(positions + 1, room).masked_fill(nowhere, 1).clamp_min(1).to(torch.int32)
    page = pages.page_table[slots, (positions // pages.page_size).clamp_max(pages.page_table.shape[1] - 1)].long()
    loc = page * pages.page_size + positions % pages.page_size
    return Ahead(
        positions[:, :count],
        (pad(rows.counter_R, (0, more)) + steps_P1)[:, :count],
        kv_len[:, :count],
        loc.masked_fill((positions >= room) | nowhere, -1)[:, :count],
        torch.arange(count + 1, dtype=torch.int32, device=slots.device),
        rows.slots_R.to(torch.int32),
    )


def side_by_side(left: ChainSide, right: ChainSide) -> Tensor:
    return torch.cat((_vectors(left), _vectors(right)), -1)


def _vectors(side: ChainSide) -> Tensor:
    x_TW = side.x if side.at_T is None else embedding(side.at_T, side.x)
    return x_TW if side.weight_W is None else rms_norm(x_TW, side.weight_W, side.eps, offset=side.offset)
