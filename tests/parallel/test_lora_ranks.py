"""Adapters of operators where ranks split the model: the answers of transformers with the adapter merged, and the memory
that was planned."""

from __future__ import annotations

from typing import Any

import pytest
from test_lora import PROMPTS, adapted
from test_matrix import LONG, SPREADS, check_bytes
from thread_engine import Asked, spread_over

NEW_TOKENS = 8


@pytest.mark.parametrize(
    ("case", "spread"),
    [
        ("llama-tied-bias", "tp"),
        *(pytest.param("llama-tied-bias", spread, marks=LONG) for spread in ("tp x pp", "cp", "dp")),
        *(pytest.param(case, "tp", marks=LONG) for case in ("phi3", "gpt_neox")),
    ],
)
def test_every_rank_has_its_part_of_an_adapter(case: str, spread: str) -> None:
    made = adapted(case)
    asked: list[Any] = []
    for prompt in PROMPTS:
        asked += [Asked(prompt, {}, {"adapter": number}) for number in range(3)]
    wanted = [made.says(name, prompt) for prompt in PROMPTS for name in made.references]
    with spread_over(made.folder / "model", lora_paths=made.paths, **SPREADS[spread]) as served:
        assert served.ask(asked, NEW_TOKENS) == wanted
        assert served.ask(asked[::-1], NEW_TOKENS) == wanted[::-1]
        for engine in served.engines:
            check_bytes(engine)
