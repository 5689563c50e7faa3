"""The end of a step on the CPU, on the tensors' memory."""

from __future__ import annotations

from torch import Tensor

from bough.kernels.step_end import SampleInputs
from bough.kernels.step_start import SlotState


def advance(state: SlotState, inputs: SampleInputs, drawn_L: Tensor) -> None:
    count = len(drawn_L)
    slots = inputs.sample_slots_L.numpy()[:count]
    state.last_token.numpy()[slots] = drawn_L.numpy()
    state.kv_len.numpy()[slots] = inputs.positions_T.numpy()[inputs.sample_at_L.numpy()[:count]] + 1
    state.num_output.numpy()[slots] = inputs.counter_L.numpy()[:count] + 1
