"""Stages that take a fixed time each: p of them give nearly p times the tokens of one rank that does their work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_engine import ThreadEngine
from tiny import make_tiny

from bough.core.sampling import GrammarSpec

DELAY_S = 0.08
ATTEMPTS = 3
"""A busy machine can spoil one: what is shown is that stages can work at the same time."""
ROWS = 2
"""Of a step: as many requests run for each stage."""
TOKENS = 12


class Delayed(ThreadEngine):
    """Its ranks take `delay_s` more in the middle of each step, between what they receive and what they pass on."""

    def __init__(self, path: Path, delay_s: float, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.delay_s = delay_s
        self.steps: list[int] = []
        """Rows of each step of the last stage."""

    def _build(self, rank: int, mesh: Any) -> Any:
        runner, spread = super()._build(rank, mesh)

        def wait(*_: object) -> None:
            time.sleep(self.delay_s)

        model = runner.forward.model
        assert isinstance(model, torch.nn.Module)
        model.layers[0].register_forward_pre_hook(wait)  # type: ignore[operator, index, union-attr]
        return runner, spread


def tokens_per_s(engine: Delayed, num_requests: int, *, bound: bool) -> float:
    """Of requests that all run at once; one in each group of rows is bound by a grammar, if asked for."""
    grammar = GrammarSpec(kind="regex", source=f"{TOKENS},0,0")
    with engine:
        engine.answer(engine.submit([9, 8, 7], 2))
        start_s = time.monotonic()
        asked = [
            engine.submit([5, 17, 99, at + 3], TOKENS, grammar=grammar if bound and at % ROWS == 0 else None)
            for at in range(num_requests)
        ]
        answers = [engine.answer(each, reasons=("length", "stop")) for each in asked]
        took_s = time.monotonic() - start_s
    assert all(len(each) == TOKENS for each in answers)
    if bound:
        assert all(token % 3 == at % 3 for each in answers[::ROWS] for at, token in enumerate(each))
    return num_requests * TOKENS / took_s


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.long)])
def test_stages_work_at_the_same_time(stages: int, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, num_hidden_layers=4)
    ratios = []
    for _ in range(ATTEMPTS):
        one = Delayed(tmp_path, DELAY_S * stages, max_running_requests=ROWS)
        alone = tokens_per_s(one, ROWS, bound=True)
        several = Delayed(tmp_path, DELAY_S, pp_size=stages, max_running_requests=ROWS * stages)
        ratios.append(tokens_per_s(several, ROWS * stages, bound=True) / alone)
        if ratios[-1] >= 0.85 * stages:
            return
    pytest.fail(f"{stages} stages gave {ratios} times the tokens of one")
