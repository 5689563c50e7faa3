"""Steps with drafts that are timed before the first request, on a tiny model with a head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.bench.direct_engine import DirectEngine
from bough.bench.speculation import TINY, head_config
from bough.core.sampling import SamplingParams
from bough.core.step import NO_PROPOSER
from bough.engine import draft_trial
from bough.engine.draft_trial import try_drafts
from bough.speculative.device import DeviceDrafter

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": (head_config(TINY, 100), {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}),
    "eagle3 tree": (
        head_config(TINY, 100),
        {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8},
    ),
    "medusa": (
        {"medusa_num_heads": 2, "medusa_num_layers": 1, "vocab_size": TINY["vocab_size"], "hidden_size": 64},
        {"speculative_algorithm": "MEDUSA"},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine(tmp_path: Path, case: str, **more: Any) -> tuple[DirectEngine, DeviceDrafter]:
    draft, settings = CASES[case]
    (tmp_path / "draft").mkdir(exist_ok=True)
    (tmp_path / "draft" / "config.json").write_text(json.dumps(draft))
    made = DirectEngine(
        TINY, tmp_path, device="cpu", dtype="float32", cpu_threads=1, context_length=1024, max_running_requests=4,
        max_total_tokens=4096, speculative_draft_model_path=str(tmp_path / "draft"), **settings, **more,
    )  # fmt: skip
    assert isinstance(made.queues.drafter, DeviceDrafter)
    return made, made.queues.drafter


def answer(made: DirectEngine) -> list[int]:
    """Of one request, as its slot has it once all is settled."""
    prompt = np.random.default_rng(0).integers(3, 500, 40)
    made.submit([prompt], SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True))
    said: list[int] = []
    while not said:
        made.turn()
        slots = made.queues.slots
        if slots.known[0] >= 64:
            said = slots.history[0, 40:64].tolist()
    made.finish()
    return said


@pytest.mark.parametrize("case", CASES)
def test_the_drafter_hears_what_steps_take(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, drafter = engine(tmp_path, case)
    heard: dict[int, list[float]] = {}
    monkeypatch.setattr(drafter, "expect", heard.update)
    try_drafts(made.runner, drafter)
    assert sorted(heard) == sorted({NO_PROPOSER, *drafter.fewest_and_most})
    assert all(len(taken) > 2 and min(taken) > 0 for taken in heard.values())
    assert np.median(heard[drafter.most]) > np.median(heard[NO_PROPOSER])


def test_answers_are_the_same_behind_a_trial(tmp_path: Path) -> None:
    plain, _ = engine(tmp_path, "eagle3")
    tried, drafter = engine(tmp_path, "eagle3", speculative_adaptive=True)
    try_drafts(tried.runner, drafter)
    drafter.is_resting = False
    assert answer(tried) == answer(plain)


@pytest.mark.parametrize("why", ["too slow", "too short", "not adaptive"])
def test_what_can_not_be_tried_is_learned_later(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, drafter = engine(tmp_path, "eagle3", **({"speculative_adaptive": False} if why == "not adaptive" else {}))
    monkeypatch.setattr(drafter, "expect", lambda times: pytest.fail("nothing was timed"))
    if why == "too slow":
        monkeypatch.setattr(draft_trial, "_MOST_S", 0.0)
    elif why == "too short":
        monkeypatch.setattr(draft_trial, "_CONTEXT", 1000)
    try_drafts(made.runner, drafter)
