"""Which tokens of a step advance which states."""

from __future__ import annotations

import torch

from bough.runner.states import _Phase


def test_tokens_that_are_alone_name_their_states_in_one_piece():
    """Kernels read the numbers of states one after the other, whatever lies between them."""
    phase = _Phase()
    for row in range(3):
        phase.add(1 + 4 * row, row, row + 1, place=20 + row)
    made = phase.done(torch.device("cpu"))
    assert made.ones_at_N.tolist() == [0, 1, 2]
    assert made.ones_N.tolist() == [1, 5, 9]
    assert made.saves is not None
    assert [each.tolist() for each in made.saves] == [[1, 5, 9], [20, 21, 22]]
    for each in (made.ones_at_N, made.ones_N, *made.saves):
        assert each.is_contiguous()


def test_a_phase_without_such_tokens_saves_nothing():
    phase = _Phase()
    phase.add(3, 0, 7, place=0)
    made = phase.done(torch.device("cpu"))
    assert len(made.ones_N) == len(made.ones_at_N) == 0
    assert made.longs == ((slice(0, 7), 3),)
    assert made.saves is None
