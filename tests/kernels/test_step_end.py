"""Which of a row's drafts are right, against the rule written out; and what the slots are like afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bough.kernels.step_end import advance, verify
from bough.kernels.step_start import SlotState

SLOTS = 9


@pytest.mark.parametrize("seed", range(20))
def test_a_row_yields_what_it_drew_up_to_the_first_wrong_draft(seed: int):
    rng = np.random.default_rng(seed)
    rows, width = 6, 5
    count = rng.integers(1, width + 1, rows)
    first = np.cumsum(count) - count
    total = int(count.sum())
    slots = rng.permutation(SLOTS)[:rows]
    ids, drawn = rng.integers(0, 2, total), rng.integers(0, 2, total)
    positions, counters = rng.integers(0, 90, total), rng.integers(0, 50, total)
    blocked = rng.random(total) < 0.15
    state = SlotState.make(SLOTS, 4, torch.device("cpu"))
    state.last_token.fill_(-5)
    state.kv_len.fill_(-6)
    state.num_output.fill_(-7)
    inputs = SimpleNamespace(
        ids_T=torch.from_numpy(ids),
        positions_T=torch.from_numpy(positions),
        sample_at_L=torch.arange(total),
        sample_slots_L=torch.from_numpy(slots.repeat(count)),
        counter_L=torch.from_numpy(counters),
        sample_start_R1=torch.from_numpy(np.append(first, total).astype(np.int32)),
    )
    out = verify(state, inputs, torch.from_numpy(drawn), rows, width, torch.from_numpy(blocked))
    for row in range(rows):
        begin, yielded = int(first[row]), []
        for at in range(begin, begin + int(count[row])):
            if blocked[at] or (at > begin and ids[at] != drawn[at - 1]):
                break
            yielded.append(int(drawn[at]))
        assert out[row, 0] == len(yielded)
        assert out[row, 1 : 1 + len(yielded)].tolist() == yielded
        slot = int(slots[row])
        found = int(state.last_token[slot]), int(state.kv_len[slot]), int(state.num_output[slot])
        if yielded:
            assert found == (yielded[-1], positions[begin] + len(yielded), counters[begin] + len(yielded))
        else:
            assert found == (-5, -6, -7), "nothing has happened"
    others = np.setdiff1d(np.arange(SLOTS), slots)
    assert (state.last_token[others] == -5).all()


def test_without_drafts_every_sample_is_a_rows_next_token():
    state = SlotState.make(4, 4, torch.device("cpu"))
    inputs = SimpleNamespace(
        positions_T=torch.tensor([5, 8, 13, 2]),
        sample_at_L=torch.tensor([0, 3, 0]),
        sample_slots_L=torch.tensor([2, 1, 4]),
        counter_L=torch.tensor([7, 0, 0]),
    )
    advance(state, inputs, torch.tensor([31, 32]))
    assert state.last_token.tolist() == [0, 32, 31, 0, 0]
    assert state.kv_len.tolist() == [0, 3, 6, 0, 0]
    assert state.num_output.tolist() == [0, 1, 8, 0, 0]
