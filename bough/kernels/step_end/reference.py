"""The end of a step in plain torch. Reads nothing back from the device."""

from __future__ import annotations

import torch
from torch import Tensor

from bough.kernels.step_end import SampleInputs
from bough.kernels.step_start import SlotState


def advance(state: SlotState, inputs: SampleInputs, drawn_L: Tensor) -> None:
    slots = inputs.sample_slots_L[: len(drawn_L)]
    state.last_token.scatter_(0, slots, drawn_L)
    state.kv_len.scatter_(0, slots, inputs.positions_T[inputs.sample_at_L[: len(drawn_L)]] + 1)
    state.num_output.scatter_(0, slots, inputs.counter_L[: len(drawn_L)] + 1)


def verify(
    state: SlotState, inputs: SampleInputs, drawn_L: Tensor, num_rows: int, width: int, blocked_L: Tensor | None
) -> Tensor:
    first_R, count_R = _extents(inputs, num_rows)
    place_W = torch.arange(width, device=drawn_L.device)
    is_real = place_W < count_R[:, None]
    at = torch.where(is_real, first_R[:, None] + place_W, 0)
    drawn = torch.where(is_real, drawn_L[at], -1)
    next_at = torch.where(place_W + 1 < count_R[:, None], first_R[:, None] + place_W + 1, 0)
    draft = inputs.ids_T[inputs.sample_at_L[next_at]]
    follows = (place_W + 1 < count_R[:, None]) & (draft == drawn)
    yields_R = follows.long().cumprod(1).sum(1) + 1
    if blocked_L is not None:
        clear = is_real & ~blocked_L[at]
        yields_R = torch.minimum(yields_R, clear.long().cumprod(1).sum(1))
    yields_R = torch.where(count_R > 0, yields_R, 0)

    last_R = (yields_R - 1).clamp_min(0)
    first_R = torch.where(count_R > 0, first_R, 0)
    spare = len(state.last_token) - 1
    slots = torch.where(yields_R > 0, inputs.sample_slots_L[first_R], spare)
    state.last_token.scatter_(0, slots, drawn.gather(1, last_R[:, None])[:, 0])
    state.kv_len.scatter_(0, slots, inputs.positions_T[inputs.sample_at_L[first_R]] + yields_R)
    state.num_output.scatter_(0, slots, inputs.counter_L[first_R] + yields_R)
    return torch.cat((yields_R[:, None], drawn), 1)


def _extents(inputs: SampleInputs, num_rows: int) -> tuple[Tensor, Tensor]:
    """int64 [R]: each row's first sample, and how many it has."""
    starts = inputs.sample_start_R1[: num_rows + 1].long()
    return starts[:-1], starts.diff()
