"""Drafting is never much slower than none, whatever drafts are worth and whatever noise is in times; it wins what it can."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from bough.core.step import I32
from bough.speculative.guesses import Guess
from tests.sim.streams import (
    DeviceStream,
    HostStream,
    Noise,
    Right,
    bursts,
    by_turns,
    drawn,
    drifting,
    noisy,
    quiet,
)

TOKENS = 2000
NOISES = [noisy, pytest.param(bursts, marks=pytest.mark.long), pytest.param(quiet, marks=pytest.mark.long)]


def verify_cost(plain: float, per_draft: float) -> Callable[[int], float]:
    return lambda tokens: plain * (1.0 + per_draft * (tokens - 1))


def wrong(at: int, rng: random.Random) -> int:
    return 0


def chat(at: int, rng: random.Random) -> int:
    """Most of the time nothing is found, and what is found is often wrong."""
    return -1 if rng.random() < 0.7 else drawn(0.3, 0.5)(at, rng)


def rewrite(at: int, rng: random.Random) -> int:
    return 0 if rng.random() < 0.2 else drawn(0.93)(at, rng)


HOST_STREAMS: dict[str, Right] = {
    "chat": chat,
    "wrong": wrong,
    "by turns": by_turns(7, drawn(0.95), wrong),
    "by long turns": by_turns(40, drawn(0.95), wrong),
    "worse and worse": drifting(0.95, 0.0, 1500),
    "about break-even": drawn(0.2),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", HOST_STREAMS)
@pytest.mark.parametrize(("per_draft", "overlaps"), [(0.15, False), (0.6, True)])
def test_guesses_never_cost_more_than_two_percent(per_draft: float, overlaps: bool, name: str, noise: Noise) -> None:
    stream = HostStream(HOST_STREAMS[name], token_ms=verify_cost(10.0, per_draft), noise=noise, overlaps=overlaps)
    assert stream.run(TOKENS).speed > 0.98


@pytest.mark.parametrize("noise", [quiet, noisy, bursts])
def test_guesses_that_are_often_right_win_nearly_what_they_can(noise: Noise) -> None:
    """Beside the best fixed number of drafts, each of whose steps is counted up by hand."""
    per_draft = 0.15
    rng = random.Random(0)
    right = [rewrite(0, rng) for _ in range(20_000)]
    best = max(
        (1 + sum(min(each, count) for each in right) / len(right)) / (1 + per_draft * count) for count in range(12)
    )
    won = HostStream(rewrite, token_ms=verify_cost(10.0, per_draft), noise=noise).run(TOKENS).speed
    assert best > 1.8
    assert won > (0.93 if noise is quiet else 0.85) * best


def head_cost(plain: float, verify: float, draft: float, upkeep: float) -> Callable[[int, int], float]:
    """Parts of a plain step: of a token that is verified, of a draft that is made, of keeping up."""
    return lambda drafts, left: plain * (1 + verify * drafts + (upkeep + draft * left if left >= 0 else 0.0))


HEADS: dict[str, tuple[int, Callable[[int, int], float], dict[str, Any]]] = {
    "eagle on a cpu": (3, head_cost(10.0, 0.12, 0.45, 0.4), {"upkeep": 0.04, "prompt_ms": 70.0}),
    "medusa on a cpu": (4, head_cost(10.0, 0.12, 0.3, 0.02), {"keeps_kv": False, "prompt_ms": 70.0}),
    "eagle on a gpu": (3, head_cost(4.19, 0.01, 0.065, 0.03), {"upkeep": 0.04, "prompt_ms": 20.0}),
    "eagle, 64 rows": (3, head_cost(7.11, 0.14, 0.015, 0.02), {"upkeep": 0.04, "prompt_ms": 20.0, "rows": 64}),
}
HEAD_STREAMS: dict[str, Right] = {
    "bad": drawn(0.2, 0.05),
    "wrong": wrong,
    "good": drawn(0.75, 0.65, 0.55),
    "by turns": by_turns(7, drawn(0.95), wrong),
    "by long turns": by_turns(400, drawn(0.95), wrong),
    "worse and worse": drifting(0.95, 0.0, 1500),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", HEAD_STREAMS)
@pytest.mark.parametrize("head", HEADS)
def test_heads_never_cost_more_than_five_percent(head: str, name: str, noise: Noise) -> None:
    most, cost, options = HEADS[head]
    stream = DeviceStream(HEAD_STREAMS[name], most=most, step_ms=cost, noise=noise, **options)
    assert stream.run(TOKENS if options.get("rows", 1) == 1 else 1000).speed > 0.95


@pytest.mark.parametrize("head", ["eagle on a cpu", "medusa on a cpu"])
def test_a_short_run_is_within_five_percent_too(head: str) -> None:
    """Right after the start, when nothing is known yet."""
    most, cost, options = HEADS[head]
    stream = DeviceStream(HEAD_STREAMS["bad"], most=most, step_ms=cost, noise=noisy, length=64, **options)
    assert stream.run(380).speed > 0.95


@pytest.mark.parametrize(("head", "rows_tokens"), [("eagle on a gpu", TOKENS), ("eagle, 64 rows", 800)])
@pytest.mark.parametrize("noise", [quiet, bursts])
def test_good_heads_win_nearly_what_they_can(head: str, rows_tokens: int, noise: Noise) -> None:
    most, cost, options = HEADS[head]
    expected = [1.0, 1.75, 1.75 + 0.75 * 0.65, 1.75 + 0.75 * 0.65 * 1.55]
    plain, prompt, length = cost(0, -1), options["prompt_ms"], 100
    kept = prompt * cost(0, 0) / plain
    per_token = min(cost(count, count) / expected[count] for count in range(1, most + 1))
    best = (length * plain + prompt) / (length * per_token + kept)
    stream = DeviceStream(HEAD_STREAMS["good"], most=most, step_ms=cost, noise=noise, length=length, **options)
    assert best > 1.6
    assert stream.run(rows_tokens).speed > 0.97 * best


def test_a_head_that_rests_leaves_prompts_alone() -> None:
    most, cost, options = HEADS["eagle on a cpu"]
    stream = DeviceStream(HEAD_STREAMS["wrong"], most=most, step_ms=cost, **options)
    stream.run(600)
    assert stream.drafter.is_resting
    assert stream.drafter.proposals(0, prompts=True) == -1


@pytest.mark.parametrize("guess_ms", [0.0, 0.6])
def test_what_guessing_takes_is_booked_too(guess_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that are never worth a draft, each of which takes 6 % of a step: few are made, and drafts stop with them."""
    clock, made = [0.0], [0]
    stream = HostStream(wrong, token_ms=verify_cost(10.0, 0.6), noise=quiet, clock=lambda: clock[0])
    guess = stream.guess

    def slow(text: I32, namespace: str) -> Guess:
        clock[0] += guess_ms / 1e3
        made[0] += 1
        return guess(text, namespace)

    monkeypatch.setattr(stream, "guess", slow)
    result = stream.run(TOKENS)
    lost_ms = result.ms + 1e3 * clock[0] - 10.0 * result.tokens
    assert lost_ms < 0.02 * 10.0 * result.tokens
    assert made[0] > (100 if guess_ms else TOKENS // 2)
