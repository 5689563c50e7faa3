"""The default model's greedy answers are the same ids, however its prompts are cut, cached and accompanied."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from in_process import InProcess, Setup

from bough.config.hf import open_checkpoint
from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.kernels.cpu_build import library
from bough.layers.batch import Model
from bough.layers.cpu_stack import StackedBlocks
from bough.layers.decoder import Decoder, one_by_one
from bough.models.load import build_model
from bough.tokenizer import load_tokenizer

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C++ compiler")

QUESTIONS = [
    "Write a long story about the keeper of a lighthouse.",
    "What is the capital of France, and what is it known for?",
    "Write a long story about the keeper of a lighthouse who has lost the only key to its door.",
    "Name three fruits and explain how each of them grows, step by step, for a child of eight years.",
    "Hi",
]
NEW_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
CONTEXT = 192

SETUPS = {
    "plain": Setup(overlap=False, radix_cache=False),
    "overlapped": Setup(),
    "chunks of 7": Setup(chunk_tokens=7),
    "chunks of 64, pages of 5": Setup(chunk_tokens=64, page_size=5, overlap=False),
    "no shared spans": Setup(shared_spans=False, page_size=1),
    "chunks of 33, nothing cached": Setup(chunk_tokens=33, radix_cache=False),
}
Answers = list[tuple[list[int], list[float]]]
"""Ids and their log-probabilities."""


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(
        open_checkpoint(""),
        dtype=torch.float32,
        device=torch.device("cpu"),
        quantization="gguf",
        context_length=CONTEXT,
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(open_checkpoint(""))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return [
        tokenizer.encode(
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        for question in QUESTIONS
    ]


def engine_of(model: Model, setup: Setup) -> InProcess:
    return InProcess(
        model, open_checkpoint("").vocab, replace(setup, attention="cpu", context_length=CONTEXT, stream=False)
    )


def answers(engine: InProcess, prompts: list[list[int]]) -> Answers:
    spec = LogprobSpec(start=-1, top=0)
    found = engine.finish([engine.submit(prompt, GREEDY, spec) for prompt in prompts])
    assert all(len(each.tokens) == NEW_TOKENS for each in found)
    return [
        (each.tokens, [v for part in each.output_logprobs for v in part.logprobs if v is not None]) for each in found
    ]


@pytest.fixture(scope="module")
def expected(model: Model, prompts: list[list[int]]) -> Answers:
    """Every prompt alone and at once, with nothing cached, on one thread."""
    engine = engine_of(model, SETUPS["plain"])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = list(chain.from_iterable(answers(engine, [prompt]) for prompt in prompts))
    finally:
        torch.set_num_threads(before)
    assert all(len(scores) == NEW_TOKENS for _, scores in found)
    assert len({tuple(tokens) for tokens, _ in found}) == len(QUESTIONS)
    return found


LONG = {"plain", "chunks of 33, nothing cached"}


@pytest.mark.parametrize(
    "number",
    [pytest.param(at, id=name, marks=[pytest.mark.long] * (name in LONG)) for at, name in enumerate(SETUPS)],
)
def test_company_and_cuts(model: Model, prompts: list[list[int]], expected: Answers, number: int) -> None:
    """Two, five or eight at a time, then one or two once more, when all that can be cached is."""
    engine = engine_of(model, list(SETUPS.values())[number])
    before = torch.get_num_threads()
    torch.set_num_threads(1 + number % 3)
    try:
        orders = ([2, 0], [4, 3, 2, 1, 0], [0, 4, 1, 0, 3, 2, 1, 2])
        for order in (orders[number % 3], [1, 0] if number % 2 else [0]):
            assert answers(engine, [prompts[i] for i in order]) == [expected[i] for i in order], order
    finally:
        torch.set_num_threads(before)


def test_a_cached_answer_is_continued_as_it_was(model: Model, prompts: list[list[int]], expected: Answers) -> None:
    """What a decode step wrote to its page is what a prompt would have written there."""
    engine = engine_of(model, Setup(page_size=16))
    answers(engine, [prompts[0]])
    for used in (10, 17, 31):
        continued = [*prompts[0], *expected[0][0][:used]]
        left = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS - used, ignore_eos=True)
        rest = engine.generate([continued], left)[0]
        assert rest == expected[0][0][used:], used


def test_retraction(model: Model, prompts: list[list[int]], expected: Answers) -> None:
    engine = engine_of(model, Setup())
    found = engine.generate_with_a_retraction(prompts[:3])
    for tokens, (ids, _) in zip(found, expected[:3], strict=True):
        assert tokens[:NEW_TOKENS] == ids[: len(tokens)]
        assert len(tokens) > 20


def test_blocks_one_by_one_compute_what_their_stack_does(
    model: Model, prompts: list[list[int]], expected: Answers
) -> None:
    assert isinstance(model, Decoder)
    at_once = model.run_blocks
    assert isinstance(at_once, StackedBlocks)
    model.run_blocks = one_by_one
    try:
        assert answers(engine_of(model, SETUPS["plain"]), prompts[:2]) == expected[:2]
    finally:
        model.run_blocks = at_once
