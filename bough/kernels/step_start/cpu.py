"""The start of a step on the CPU: numpy on the tensors' memory, which takes a third of the time of as many torch calls."""

from __future__ import annotations

from bough.kernels.step_start import SlotState, StepInputs


def start_step(state: SlotState, inputs: StepInputs, page_size: int) -> None:
    table = state.table_entries.numpy()
    table[inputs.table_at_U.numpy()] = inputs.table_pages_U.numpy()
    num_tokens, num_rows, num_samples = inputs.derived.tolist()
    if not num_tokens:
        return
    kv_len = state.kv_len.numpy()
    slots, ids = inputs.token_slots_T.numpy()[:num_tokens], inputs.ids_T.numpy()[:num_tokens]
    last = ids == -1
    ids[last] = state.last_token.numpy()[slots[last]]
    drafted = ids < -1
    if drafted.any():
        ids[drafted] = state.drafts.numpy()[slots[drafted], -2 - ids[drafted]]
    positions, loc = inputs.positions_T.numpy()[:num_tokens], inputs.loc_T.numpy()[:num_tokens]
    positions += kv_len[slots]
    beyond = positions >= loc
    places = positions // page_size
    if beyond.any():
        places[beyond] = 0
    loc[:] = (table[slots * state.page_table.shape[1] + places] - places) * page_size + positions
    loc[beyond] = -1
    inputs.kv_len_R.numpy()[:num_rows] += kv_len[inputs.slots_R.numpy()[:num_rows]]
    inputs.counter_L.numpy()[:num_samples] += state.num_output.numpy()[inputs.sample_slots_L.numpy()[:num_samples]]
