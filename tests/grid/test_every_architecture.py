"""Every architecture through the engine: 64 greedy tokens are transformers', however the work is cut and shared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from in_process import GREEDY, InProcess, Setup
from tiny import CASES, SIZES, make_tiny
from transformers import PreTrainedModel

from bough.config.hf import open_checkpoint
from bough.layers.batch import Model
from bough.models.load import build_model

COMMON = [(7 * i + 3) % 120 + 3 for i in range(37)]
PROMPTS = [[*COMMON, 5, 17, 99], [42], [*COMMON, 5, 88, 61, 62, 63], [100, 90, 80, 70, 60, 50, 40]]
PLAIN = Setup(overlap=False, radix_cache=False, context_length=128)
IN_SEVENS = Setup(chunk_tokens=7, page_size=4, context_length=128)


SHORT = msgspec.structs.replace(GREEDY, max_new_tokens=16)
"""Of answers from the prefix cache, whose tokens are known by then."""
SOME = ("llama", "gemma3", "mixtral", "phi3-longrope")
"""Cases that `make test` also computes alone and after a retraction; `make test-long` does so with all of them."""


@dataclass(frozen=True)
class Family:
    """A tiny model, its engine, transformers' greedy answers to `PROMPTS`, and the engine's own, in one batch."""

    model: Model
    shared: InProcess
    expected: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = make_tiny(request.param, folder)
    model = build_model(
        open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"), context_length=128
    )
    shared = engine(model, IN_SEVENS)
    answers = shared.generate(PROMPTS)
    expected = [greedy(reference, prompt, guess) for prompt, guess in zip(PROMPTS, answers, strict=True)]
    return Family(model, shared, expected, answers)


some = pytest.mark.parametrize(
    "family", [pytest.param(case, marks=[pytest.mark.long] * (case not in SOME)) for case in CASES], indirect=True
)


def greedy(reference: PreTrainedModel, prompt: list[int], guess: list[int]) -> list[int]:
    """What transformers answers. One pass over a guess shows whether it is that, step by step; generating takes 64."""
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *guess]])).logits[0, len(prompt) - 1 : -1]
    if len(guess) == GREEDY.max_new_tokens and logits.argmax(-1).tolist() == guess:
        return guess
    out = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=GREEDY.max_new_tokens,
        min_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def engine(model: Model, setup: Setup) -> InProcess:
    return InProcess(model, SIZES["vocab_size"], setup)


def test_in_a_ragged_batch_and_again_from_the_cache(family: Family) -> None:
    shared, expected = family.shared, family.expected
    assert family.answers == expected
    again = shared.finish([shared.submit(prompt, SHORT) for prompt in PROMPTS[::-1]])
    assert [answer.tokens for answer in again] == [answer[: SHORT.max_new_tokens] for answer in expected[::-1]]
    ends = [answer.end for answer in again]
    assert all(end is not None for end in ends)
    assert max(end.cached_tokens for end in ends if end is not None) >= len(COMMON), "the second time hits the tree"


@some
def test_alone(family: Family) -> None:
    plain = engine(family.model, PLAIN)
    assert [plain.generate([prompt])[0] for prompt in PROMPTS] == family.expected


@some
def test_after_a_retraction(family: Family) -> None:
    retracted = engine(family.model, IN_SEVENS)
    assert retracted.generate_with_a_retraction(PROMPTS) == family.expected
