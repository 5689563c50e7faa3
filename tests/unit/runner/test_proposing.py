"""What a proposer reads of a step: the token behind each of its tokens, with padding and in steps of one token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bough.runner.proposing import Bounds, Drafting

SPARE = 3


def drafting(ids: list[int], starts: list[int], following: list[int], sampled: list[tuple[int, int, int]]) -> Drafting:
    """`sampled`: slot, place among the step's tokens, and token, of each that is drawn."""
    tensors = SimpleNamespace(
        ids_T=torch.tensor(ids),
        query_start_R1=torch.tensor(starts, dtype=torch.int32),
        following_R=torch.tensor(following, dtype=torch.int32),
        sample_slots_L=torch.tensor([slot for slot, _, _ in sampled]),
        sample_at_L=torch.tensor([at for _, at, _ in sampled]),
    )
    state = SimpleNamespace(room=torch.zeros(SPARE + 1))
    rows = SimpleNamespace(slots_R=tensors.sample_slots_L, at_R=tensors.sample_at_L)
    drawn = torch.tensor([token for _, _, token in sampled])
    nothing: Any = None
    return Drafting(
        0, nothing, cast(Any, rows), cast(Bounds, nothing), cast(Any, tensors), drawn, cast(Any, state), nothing
    )


def test_rows_end_with_what_was_drawn_or_comes_next() -> None:
    made = drafting([10, 11, 12, 20, 21], [0, 3, 5], [7, 22], [(0, 2, 13)])
    assert made.following_ids().tolist() == [11, 12, 13, 21, 22]


@pytest.mark.parametrize("slot", [0, SPARE])
def test_a_step_of_one_token(slot: int) -> None:
    """Also one of padding alone, as graphs are captured with."""
    made = drafting([10], [0, 1], [0], [(slot, 0, 11)])
    expected = [11] if slot != SPARE else [0]
    assert made.following_ids().tolist() == expected
    assert made.moved_on(torch.tensor([10]), torch.tensor([12])).tolist() == ([12] if slot != SPARE else [10])
