"""Memory on the device: the largest steps stay within what the plan keeps for them, and running out of it all the same costs
prefills their step, never a decode or the engine."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcess, Setup
from largest_steps import GREEDY, largest_steps, made, step_of
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.config.memory_plan import MIB, show_bytes
from bough.core.sampling import SamplingParams
from bough.core.step import Step
from bough.models.load import build_model
from bough.runner.model_runner import ModelRunner

pytestmark = pytest.mark.xdist_group("large models")

WIDE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Two layers of a model of 8 billion parameters: activations don't add up over layers."""


def peak_of(runner: ModelRunner, step: Step) -> tuple[int, int]:
    """Bytes that a step takes at most beyond what is held before and after it: by tensors, and by the allocator."""
    runner.launch(step).wait()  # libraries' own workspaces, which stay
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tensors, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    launched = runner.launch(step)
    launched.wait()
    torch.cuda.synchronize()
    del launched
    return torch.cuda.max_memory_allocated() - tensors, torch.cuda.max_memory_reserved() - reserved


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(WIDE))
    return folder


SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "small": {"max_running_requests": 256, "chunked_prefill_size": 2048},
    "safe": {"safe_mode": True, "max_running_requests": 256, "chunked_prefill_size": 2048},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_largest_steps_take_no_more_than_was_kept_for_them(wide: Path, settings: str) -> None:
    runner, plan = made(wide, "cuda", max_total_tokens=262_144, cuda_graph=False, **SETTINGS[settings])
    found = {name: peak_of(runner, step) for name, step in largest_steps(runner.limits).items()}
    for name, (tensors, reserved) in found.items():
        print(
            f"{name:<36} {show_bytes(tensors):>12} {show_bytes(reserved):>12}  kept {show_bytes(plan.activation_bytes)}"
        )
    too_much = [name for name, (tensors, _) in found.items() if tensors > plan.activation_bytes]
    assert not too_much, found
    # What the allocator keeps around tensors comes out of what is kept for the runtime.
    assert max(reserved for _, reserved in found.values()) <= plan.activation_bytes + plan.other_bytes


@pytest.mark.alone
def test_all_that_is_planned_is_really_there(wide: Path) -> None:
    """No ceiling but the device's: after weights, pages and graphs have taken theirs, the largest steps still fit."""
    runner, plan = made(wide, "cuda")
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert plan.kv_tokens > 1_000_000, "the pool takes what is left"
    assert free + held >= plan.activation_bytes, (show_bytes(free), show_bytes(plan.activation_bytes))
    for step in largest_steps(runner.limits).values():
        runner.launch(step).wait()


def test_steps_of_new_sizes_hardly_ask_the_driver_for_memory(wide: Path) -> None:
    """Until it has found some, the device computes nothing. Libraries may want a workspace for larger products, once."""
    runner, _ = made(wide, "cuda", max_total_tokens=262_144, cuda_graph=False)
    most = runner.limits.max_step_tokens
    runner.launch(step_of(runner.limits, [(700, 0), (1, 300)], GREEDY)).wait()
    asked = torch.cuda.memory_stats()["num_device_alloc"]
    for tokens in (3001, most // 2, most - 999, 5003, most // 2 + 77, most - 41, most):
        runner.launch(step_of(runner.limits, [(tokens - 600, 0), (600, 64)], GREEDY)).wait()
    assert torch.cuda.memory_stats()["num_device_alloc"] <= asked + 2


# -- out of memory --------------------------------------------------------------------------------

CHUNK = 8192
LONG = [(7 * i + 3) % 120 + 3 for i in range(CHUNK)]
SHORT = [42, 17, 99]


@pytest.fixture(scope="module")
def fat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small model whose large steps are expensive: half a gibibyte for the widest activation of a whole chunk."""
    folder = tmp_path_factory.mktemp("fat")
    sizes = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 2, "head_dim": 64}
    make_tiny("llama", folder, **sizes, max_position_embeddings=2 * CHUNK)
    return build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cuda"))


def engine_over(model: Any, *, overlap: bool, chunk_tokens: int = CHUNK) -> InProcess:
    setup = Setup(
        device="cuda", attention="triton", chunk_tokens=chunk_tokens, context_length=CHUNK + 256, overlap=overlap
    )
    return InProcess(model, 131, setup)


def tokens(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


def peak_of_a_chunk(model: Any, length: int) -> int:
    engine = engine_over(model, overlap=False)
    engine.generate([LONG[:length]], tokens(2))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.generate([LONG[:length][::-1]], tokens(2))
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def only_free(num_bytes: int) -> Iterator[None]:
    """So much is left to this process, whatever others take or give back meanwhile, and whatever it has got already."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(reserved / total)
    ballast = []  # in what lies between tensors that stay
    for size in (256 * MIB, 32 * MIB, 4 * MIB):
        with suppress(torch.OutOfMemoryError):
            while True:
                ballast.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        ballast.clear()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_full_device_costs_a_prefill_its_step_and_nobody_an_answer(fat: Any, overlap: bool) -> None:
    """A decode is under way when a prompt comes whose chunk does not fit. The prompt comes again in halves; both answers are
    those of an empty device."""
    roomy = engine_over(fat, overlap=overlap, chunk_tokens=2048)
    expected = roomy.generate([SHORT, LONG], tokens(64))
    whole, half = peak_of_a_chunk(fat, CHUNK), peak_of_a_chunk(fat, CHUNK // 2)
    assert whole > 1.6 * half > 0, (whole, half)
    engine = engine_over(fat, overlap=overlap)
    short = engine.submit(SHORT, tokens(64))
    for _ in range(8):
        engine.loop.turn()
    assert engine.mailbox.answers[short].tokens, "it is running"
    with only_free((whole + half) // 2):
        long = engine.submit(LONG, tokens(64))
        answers = engine.finish([short, long])
    assert engine.queues.counters.oom_steps == 1
    assert [answer.end.reason for answer in answers if answer.end is not None] == ["length", "length"]
    assert [answer.tokens for answer in answers] == expected
    assert engine.cache.num_held == 0


def test_what_never_fits_fails_alone(fat: Any) -> None:
    roomy = engine_over(fat, overlap=True, chunk_tokens=2048)
    (expected,) = roomy.generate([SHORT], tokens(200))
    half = peak_of_a_chunk(fat, CHUNK // 2)
    engine = engine_over(fat, overlap=True)
    short = engine.submit(SHORT, tokens(200))
    for _ in range(8):
        engine.loop.turn()
    with only_free(half * 2 // 3):
        long = engine.submit(LONG, tokens(4))
        answers = engine.finish([short, long])
    assert answers[0].tokens == expected
    assert answers[1].end is not None
    assert answers[1].end.reason == "error"
    assert "out of memory" in answers[1].end.message
    assert engine.cache.num_held == 0
    assert engine.generate([LONG], tokens(4)) == roomy.generate([LONG], tokens(4)), "and with room again it is served"
