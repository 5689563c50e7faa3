"""Prompts with images through scheduler, cache, runner and model: greedy answers are transformers', however they are
computed, and pages are shared by content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from in_process import Answer, InProcess, Setup
from prompts import Prompt, make_prompt, noise, reference_answer
from seeing import NAMES, load
from tiny_vision import END, IMAGE, START, VOCAB

from bough.core.messages import Abort, LogprobSpec, Pause, Resume
from bough.core.sampling import SamplingParams

NEW = 20
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW)
MARK = [START, IMAGE, END]
SETUPS = {
    "plain": Setup(overlap=False, radix_cache=False),
    "in sevens": Setup(chunk_tokens=7, page_size=4),
    "one at a time in a small store": Setup(chunk_tokens=13, page_size=5, media_rows=48, step_patches=1),
    "cpu attention": Setup(page_size=16, chunk_tokens=11, attention="cpu", shared_spans=False),
    "drafts": Setup(page_size=1, chunk_tokens=64, drafts="ngram"),
}


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    processor = load(name).processor
    one, other = noise(24, 40), noise(24, 40, seed=1)
    return (
        make_prompt(processor, [5, 6, *MARK, 9, 10, 11], [one]),
        make_prompt(processor, [5, 6, *MARK, 9, *MARK, *MARK, 10, 11], [one, noise(16, 16), noise(56, 8)]),
        make_prompt(processor, [7, 8, 9], []),
        make_prompt(processor, [5, 6, *MARK, 9, 10, 11], [other]),
        make_prompt(processor, [*MARK, 1], [noise(48, 64)]),
    )


@cache
def expected(name: str) -> list[list[int]]:
    seen = load(name)
    return [reference_answer(seen.reference, prompt, seen.tower, NEW) for prompt in prompts(name)]


def engine_of(name: str, setup: Setup) -> InProcess:
    return InProcess(load(name).model, VOCAB, replace(setup, num_snapshots=64))


def answers(engine: InProcess, asked: tuple[Prompt, ...], **extra: object) -> list[Answer]:
    return engine.finish([prompt.submit(engine, GREEDY, **extra) for prompt in asked])


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_transformers_and_again_from_the_cache(name: str, setup: str) -> None:
    engine = engine_of(name, SETUPS[setup])
    assert [answer.tokens for answer in answers(engine, prompts(name))] == expected(name)
    account = engine.queues.media
    assert account is not None
    computed = account.counters.tower_tokens
    again = answers(engine, prompts(name)[::-1])
    assert [answer.tokens for answer in again] == expected(name)[::-1]
    cached = [answer.end.cached_tokens for answer in again if answer.end is not None]
    if SETUPS[setup].radix_cache and setup != "one at a time in a small store":
        assert account.counters.tower_tokens == computed, "what is in the tree is not encoded again"
        size = SETUPS[setup].page_size
        for found, prompt in zip(cached, prompts(name)[::-1], strict=True):
            assert (len(prompt.ids) - 1) // size * size <= found < len(prompt.ids)
    assert account.store.num_available == account.store.num_blocks, "no request is left in the middle of an item"


def test_the_image_counts() -> None:
    """Prompts that differ by an image's pixels only have different answers, so the others are no accident."""
    for name in NAMES:
        assert expected(name)[0] != expected(name)[3], name


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_after_retractions(name: str) -> None:
    engine = engine_of(name, Setup(chunk_tokens=7, page_size=4, media_rows=64))
    ids = [prompt.submit(engine, GREEDY) for prompt in prompts(name)]

    def send(message: object) -> Callable[[], None]:
        return lambda: engine.mailbox.incoming.append(message)  # type: ignore[arg-type]

    turns = {3: Pause(call=1, mode="retract"), 6: Resume(call=2), 14: Pause(call=3, mode="retract"), 17: Resume(call=4)}
    found = engine.finish(ids, {turn: send(message) for turn, message in turns.items()})
    assert [answer.tokens for answer in found] == expected(name)
    assert engine.queues.counters.retractions > 3


def test_an_aborted_request_lets_go_of_its_media() -> None:
    engine = engine_of("qwen3_vl", Setup(chunk_tokens=4, page_size=4))
    account = engine.queues.media
    assert account is not None
    first = prompts("qwen3_vl")[4].submit(engine, GREEDY)
    for _ in range(3):
        engine.loop.turn()
    assert account.store.num_available < account.store.num_blocks, "it is in the middle of its image"
    engine.mailbox.incoming.append(Abort(first, "gone"))
    engine.finish([first])
    assert account.store.num_available == account.store.num_blocks
    assert [answer.tokens for answer in answers(engine, prompts("qwen3_vl"))] == expected("qwen3_vl")


def test_equal_images_share_pages_and_different_ones_never_do() -> None:
    engine = engine_of("qwen2_5_vl", Setup(page_size=4))
    first, _, _, other, _ = prompts("qwen2_5_vl")
    assert len(first.ids) == len(other.ids)
    a, b = answers(engine, (first, first))
    assert a.tokens == b.tokens
    again, different = answers(engine, (first, other))
    assert again.end is not None
    assert different.end is not None
    assert again.end.cached_tokens == len(first.ids) - 1
    assert different.end.cached_tokens == first.items[0].start, "text before the image is shared, nothing of it"
    account = engine.queues.media
    assert account is not None
    assert account.counters.tower_tokens == 2 * first.items[0].cost, "two contents, each computed once"


def test_a_hit_may_end_within_an_image() -> None:
    """The tree has lost the end of an image: the rest is computed from embeddings that are still in the store."""
    name = "qwen3_vl"
    engine = engine_of(name, Setup(page_size=4, num_pages=40, num_slots=2))
    last = prompts(name)[4]
    answers(engine, (last,))
    filler = make_prompt(load(name).processor, [(3 * i) % 200 for i in range(90)], [])
    answers(engine, (filler,))
    (found,) = answers(engine, (last,))
    assert found.end is not None
    item = last.items[0]
    assert item.start < found.end.cached_tokens < item.stop, found.end.cached_tokens
    assert found.tokens == expected(name)[4]


def test_prompt_scores_through_an_image() -> None:
    """Log-probabilities of prompt and output: the same in one chunk, in many, and after a hit."""
    name = "qwen3_vl"
    prompt = prompts(name)[0]
    spec = LogprobSpec(start=1, top=2)

    def scores(setup: Setup, warm: bool) -> list[float]:
        engine = engine_of(name, setup)
        if warm:
            answers(engine, (prompt,))
        (answer,) = engine.finish([prompt.submit(engine, GREEDY, logprobs=spec)])
        assert answer.prompt_logprobs is not None
        values = [each for each in answer.prompt_logprobs.logprobs if each is not None]
        return values + [each for part in answer.output_logprobs for each in part.logprobs if each is not None]

    plain = scores(Setup(overlap=False, radix_cache=False), warm=False)
    assert len(plain) == len(prompt.ids) - 1 + NEW
    for setup in (Setup(chunk_tokens=7, page_size=4), Setup(page_size=1)):
        assert scores(setup, warm=True) == pytest.approx(plain, abs=1e-4)
