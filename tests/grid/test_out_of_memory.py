"""The device runs out of memory in the middle of a real model: answers stay what transformers says, the engine lives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcess, Setup
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.sampling import SamplingParams
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.scheduler.fail import is_out_of_memory

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
PROMPTS = [[(7 * i + at) % 110 + 3 for i in range(10 * at + 5)] for at in range(5)]
BAD = 120
"""A token that no prompt above has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, list[list[int]]]:
    folder: Path = tmp_path_factory.mktemp("llama")
    reference = make_tiny("llama", folder)
    made = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(made, Decoder)
    answers = []
    for prompt in PROMPTS:
        out = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return made, answers


@contextmanager
def short_of_memory(model: Decoder, fails: Callable[[torch.Tensor], bool]) -> Iterator[list[int]]:
    """The last block fails for steps whose ids say so, when all blocks before it have run and written their KV."""
    failed: list[int] = []
    seen: list[torch.Tensor] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        seen[:] = [inputs[0].ids_T]

    def strike(module: Any, inputs: Any) -> None:
        if fails(seen[0]):
            failed.append(len(seen[0]))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    handles = [model.embed.register_forward_hook(note), model.layers[-1].register_forward_pre_hook(strike)]
    try:
        yield failed
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_device_that_holds_only_small_steps_gets_small_steps(model: Any, overlap: bool, page_size: int) -> None:
    made, expected = model
    engine = InProcess(made, 131, Setup(overlap=overlap, page_size=page_size))
    with short_of_memory(made, lambda ids: len(ids) > 80) as failed:
        assert engine.generate(PROMPTS, GREEDY) == expected
    assert len(failed) == 1, "the steps after it were half as large"
    assert engine.queues.counters.oom_steps == len(failed)


@pytest.mark.parametrize("seed", range(4))
def test_a_moment_without_memory_changes_no_answer(model: Any, seed: int) -> None:
    made, expected = model
    rng = random.Random(seed)
    engine = InProcess(made, 131, Setup(overlap=bool(seed % 2)))
    left = [2 * seed + rng.randrange(3)]

    def once(ids: torch.Tensor) -> bool:
        left[0] -= 1
        return left[0] == -1

    with short_of_memory(made, once) as failed:
        assert engine.generate(PROMPTS, GREEDY) == expected
    assert len(failed) == 1


def test_only_the_request_that_repeats_it_fails(model: Any) -> None:
    made, expected = model
    engine = InProcess(made, 131, Setup())
    with short_of_memory(made, lambda ids: bool((ids == BAD).any())):
        ids = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        bad = engine.submit([5, BAD, 9], GREEDY)
        answers = engine.finish([*ids, bad])
        assert answers[-1].end is not None
        assert answers[-1].end.reason == "error"
        assert "out of memory" in answers[-1].end.message
        assert "MiB" not in answers[-1].end.message, "the device's own words are for the log"
        wrong = [answer for answer, want in zip(answers, expected, strict=False) if answer.tokens != want]
        for answer in wrong:  # prompts that shared both of its steps may go with it
            assert answer.end is not None
            assert answer.end.reason == "error"
        assert engine.generate(PROMPTS, GREEDY) == expected, "and whoever comes after is served"
    assert engine.cache.num_held == 0


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_the_ways_in_which_devices_say_it(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one
