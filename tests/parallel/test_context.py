"""Prompts with images whose tokens are split over ranks that share contexts; `test_served.py` has texts."""

from __future__ import annotations

import pytest
from prompts import make_prompt, noise, reference_answer
from seeing import load
from thread_engine import ThreadEngine
from tiny_vision import END, IMAGE, START

LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "replicas"), [("qwen2_5_vl", 1), pytest.param("qwen3_vl", 1, marks=LONG), ("qwen2_vl", 2)]
)
def test_images_in_a_prompt_that_is_split(name: str, replicas: int) -> None:
    """Each rank places what the tower gives for its own tokens, and turns their positions."""
    seen = load(name)
    marks, tail = [START, IMAGE, END], [(7 * i + 3) % 100 + 9 for i in range(140)]
    prompts = [
        make_prompt(seen.processor, [5, *marks, 9, *marks, *tail], [noise(24, 40), noise(56, 64)]),
        make_prompt(seen.processor, [*tail, *marks, 7], [noise(48, 64, seed=1)]),
        make_prompt(seen.processor, [5, *marks, 9], [noise(24, 40)]),
    ]
    with ThreadEngine(seen.checkpoint.path, tp_size=2 * replicas, attn_cp_size=2, attn_dp_size=replicas) as engine:
        for _ in range(2):
            for prompt in prompts:
                engine.features |= prompt.features
            asked = [engine.submit(each.ids, 8, media=each.items, positions=each.positions) for each in prompts]
            expected = [reference_answer(seen.reference, each, seen.tower, 8) for each in prompts]
            assert [engine.answer(each) for each in asked] == expected
        assert any(context is not None and context.num_splits for context in engine.contexts())
