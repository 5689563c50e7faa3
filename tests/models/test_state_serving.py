"""Families with layers that keep a state in the engine: no setting, draft or captured step changes an answer, and answers
go on from snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PROMPTS, STATES, greedy
from in_process import InProcess, Setup
from tiny import SIZES, make_tiny

from bough.config.hf import open_checkpoint
from bough.models.load import build_model
from bough.runner.graphs import Graphs
from tests.covers import long


@pytest.mark.parametrize(
    "case",
    ["qwen3_next", "mamba2-bias", *(long(case) for case in ("granite4", "jamba"))],
)
def test_a_conversation_goes_on_from_snapshots(case: str, tmp_path: Path) -> None:
    """Turns that repeat what was said, a branch in the middle, and rows that lose their memory."""
    prefix, extra = STATES[case]
    reference = make_tiny(prefix, tmp_path, **extra)
    model = build_model(
        open_checkpoint(str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"), context_length=256
    )
    setup = Setup(chunk_tokens=16, page_size=4, context_length=256)
    engine = InProcess(model, SIZES["vocab_size"], setup)
    (first,) = engine.generate(PROMPTS[:1])
    assert [first] == greedy(reference, PROMPTS[:1], [first])
    said = [*PROMPTS[0], *first, 9, 8, 7]
    (answer,) = engine.finish([engine.submit(said)])
    assert [answer.tokens] == greedy(reference, [said], [answer.tokens])
    assert answer.end is not None
    assert answer.end.cached_tokens >= len(said) - 3 - setup.state_interval - setup.page_size
    branch = [*said[:50], *PROMPTS[1][:20]]
    for cached in (32, 48):  # the first finds no state where it parts from the others, and leaves one
        (answer,) = engine.finish([engine.submit(branch)])
        assert [answer.tokens] == greedy(reference, [branch], [answer.tokens])
        assert answer.end is not None
        assert answer.end.cached_tokens >= cached
    few = InProcess(
        model,
        SIZES["vocab_size"],
        Setup(chunk_tokens=16, page_size=4, context_length=128, num_pages=36, conservativeness=0.0),
    )
    tight = few.finish([few.submit(prompt) for prompt in PROMPTS])
    assert [answer.tokens for answer in tight] == greedy(reference, PROMPTS, [answer.tokens for answer in tight])
    assert few.queues.counters.retractions > 0


def test_no_setting_changes_the_answer(tmp_path: Path) -> None:
    prefix, extra = STATES["qwen3_next"]
    make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    answers = []
    for setup in (
        Setup(context_length=128, overlap=False, radix_cache=False),
        Setup(context_length=128, page_size=1, chunk_tokens=5),
        Setup(context_length=128, page_size=16, attention="torch", num_snapshots=1),
        Setup(context_length=128, page_size=4, overlap=False, num_snapshots=0),
    ):
        engine = InProcess(model, SIZES["vocab_size"], setup)
        answers += [engine.generate(PROMPTS), engine.generate(PROMPTS)]
    assert all(each == answers[0] for each in answers)


class Rerun:
    """What a captured graph does: computes the same from what its inputs are now."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self.result = run()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.result[0].copy_(self._run()[0])


def test_decode_steps_as_graphs_compute_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps padded to captured sizes, with states found by slot: the same answers, also from snapshots."""
    made: list[Rerun] = []

    def capture(run: Callable[[], Any], pool: object) -> tuple[Rerun, Any]:
        made.append(Rerun(run))
        return made[-1], made[-1].result

    monkeypatch.setattr("bough.runner.graphs.capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    prefix, extra = STATES["qwen3_next"]
    make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    prompts = [*PROMPTS, PROMPTS[0][:9]]
    for setup in (
        Setup(context_length=128, page_size=4, chunk_tokens=24),
        Setup(context_length=128, page_size=4, overlap=False, state_interval=4, num_snapshots=3),
        Setup(context_length=128, page_size=4, drafts="ngram"),
        Setup(context_length=128, page_size=4, drafts="known", overlap=False),
    ):
        expected = InProcess(model, SIZES["vocab_size"], replace(setup, drafts="none")).generate(prompts)
        answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
        engine = InProcess(model, SIZES["vocab_size"], setup, answers)
        runner = engine.runner
        runner.graphs = Graphs(
            runner.forward, max_tokens=64, context_length=128, spare_slot=runner.limits.num_slots, states=runner.states
        )
        assert engine.generate(prompts) == expected
        assert engine.generate_with_a_retraction(prompts) == expected
        assert sum(each.num_replays for each in made) > 40, "most steps decode"


@pytest.mark.parametrize(
    ("case", "drafts"),
    [
        long("qwen3_next", "ngram"),  # these two with captured steps: see above
        long("qwen3_next", "known"),
        ("qwen3_next", "adaptive"),
        ("bamba", "known"),
        ("mamba", "known"),
        *(long(case, "known") for case in ("kimi_linear", "lfm2", "minimax")),
    ],
)
def test_drafts_change_no_token(case: str, drafts: str, tmp_path: Path) -> None:
    """Greedy answers with drafts, right and wrong ones, are those without: cached, in chunks, retracted."""
    prefix, extra = STATES[case]
    reference = make_tiny(prefix, tmp_path, **extra)
    checkpoint = open_checkpoint(str(tmp_path))
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), context_length=128)
    plain = InProcess(model, SIZES["vocab_size"], Setup(context_length=128)).generate(PROMPTS)
    assert plain == greedy(reference, PROMPTS, plain)
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain, strict=True)}
    for setup in (
        Setup(context_length=128, page_size=4, drafts=drafts),
        Setup(context_length=128, page_size=1, chunk_tokens=9, drafts=drafts, overlap=False, state_interval=4),
    ):
        engine = InProcess(model, SIZES["vocab_size"], setup, answers)
        assert engine.generate(PROMPTS) == plain
        assert engine.generate_with_a_retraction(PROMPTS[::-1]) == plain[::-1]
        counters = engine.queues.counters
        if drafts == "known":  # every third may be wrong
            assert 60 < counters.accepted_tokens < counters.draft_tokens
