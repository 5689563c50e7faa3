"""Rehearsed steps keep to the runner's limits and leave no trace in its pages."""

from __future__ import annotations

import pytest

from bough.core.step import RunnerLimits
from bough.runner.rehearsal import rehearsals


def limits(**changes: int) -> RunnerLimits:
    sizes = {
        "num_slots": 8,
        "num_pages": 4,
        "page_size": 16,
        "pages_per_slot": 128,
        "context_length": 2048,
        "max_step_tokens": 2048,
        "vocab_size": 100,
    }
    return RunnerLimits(**sizes | changes)


@pytest.mark.parametrize(
    "changes", [{}, {"num_slots": 1}, {"context_length": 512}, {"max_step_tokens": 600}, {"max_step_tokens": 16}]
)
def test_they_keep_to_the_limits(changes: dict[str, int]) -> None:
    bounds = limits(**changes)
    for step in rehearsals(bounds):
        assert 0 < step.num_rows <= bounds.num_slots
        assert step.num_tokens == step.num_query.sum() <= bounds.max_step_tokens
        assert (step.num_query + step.context <= bounds.context_length).all()
        assert not len(step.table_at), "no page is theirs"


def test_prompts_are_rehearsed_alone_and_beside_decodes() -> None:
    steps = list(rehearsals(limits()))
    assert {step.num_decodes > 0 for step in steps} == {True, False}
    assert all(step.num_tokens > 512 for step in steps), "smaller steps have graphs"
