"""Keys and values in 8 and 4 bits on the default model: what the next tokens' distributions lose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import InProcess, Setup

from bough.config.hf import open_checkpoint
from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.models.load import build_model
from bough.tokenizer.load import load_tokenizer

TEXTS = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down the ships that passed. " * 3,
    "To make bread you need flour, water, salt and yeast. First mix the flour with the water and let it rest for half "
    "an hour. Then add the salt and the yeast, knead until the dough is smooth, and leave it in a warm place.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\nprint([",
)


def test_eight_bits_lose_little() -> None:
    checkpoint = open_checkpoint("")
    tokenizer = load_tokenizer(checkpoint)
    prompts = [tokenizer.encode(text)[:128] for text in TEXTS]
    model: Any = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization="none")
    exact = distributions(model, prompts, checkpoint.vocab, torch.float32)
    rounded = distributions(model, prompts, checkpoint.vocab, torch.float8_e4m3fn)
    divergence = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(exact, rounded, strict=True)])
    assert 1e-5 < divergence.mean() <= 0.01, "little, but something: 8 bits were really used"


@pytest.mark.long
def test_codes_lose_less_than_floats_of_as_many_bits() -> None:
    """A scale for every token and head: 8 bits are next to nothing, 4 bits are felt by a model of this size."""
    checkpoint = open_checkpoint("")
    tokenizer = load_tokenizer(checkpoint)
    prompts = [tokenizer.encode(text)[:64] for text in TEXTS]
    model: Any = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization="none")
    exact = distributions(model, prompts, checkpoint.vocab, torch.float32)
    losses = {}
    for bits, attention in ((8, "cpu"), (4, "cpu"), (4, "torch")):
        rounded = distributions(model, prompts, checkpoint.vocab, torch.float32, code_bits=bits, attention=attention)
        losses[bits, attention] = float(
            torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(exact, rounded, strict=True)]).mean()
        )
    assert 1e-6 < losses[8, "cpu"] <= 0.001
    assert 0.005 < losses[4, "cpu"] <= 0.08
    assert abs(losses[4, "cpu"] - losses[4, "torch"]) <= 0.02


def test_scales_keep_what_is_too_large_or_too_small() -> None:
    """A model whose keys are far from 1: 8 bits without scales lose them, with scales they are as good as of any size."""
    checkpoint = open_checkpoint("")
    prompts = [load_tokenizer(checkpoint).encode(text)[:32] for text in TEXTS[1:2]]
    model: Any = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization="none")
    layers = len(model.layers)
    exact = distributions(model, prompts, checkpoint.vocab, torch.float32)

    def loss(**scales: float) -> float:
        given = {name: [scale] * layers for name, scale in scales.items()}
        rounded = distributions(model, prompts, checkpoint.vocab, torch.float8_e4m3fn, **given)
        return float(torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(exact, rounded, strict=True)]).mean())

    assert loss(k_scales=0.125, v_scales=0.03125) <= 0.02
    assert loss(k_scales=2.0**11, v_scales=2.0**11) > 0.1, "such scales make zeros of most: they were really used"


def test_scales_from_the_first_prompt_keep_large_keys() -> None:
    """Keys 200 times as large, queries as much smaller: the same model, but FP8 without scales loses it. Scales taken from
    one short prompt serve the longer ones that follow, and cost nothing where keys were small."""
    checkpoint = open_checkpoint("")
    tokenizer = load_tokenizer(checkpoint)
    prompts = [tokenizer.encode(text)[:48] for text in ("Hello.", TEXTS[1])]
    model: Any = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"), quantization="none")
    exact = distributions(model, prompts, checkpoint.vocab, torch.float32)[1:]

    def loss(**options: Any) -> float:
        rounded = distributions(model, prompts, checkpoint.vocab, torch.float8_e4m3fn, **options)[1:]
        return float(torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(exact, rounded, strict=True)]).mean())

    plain, measured = loss(), loss(measures_scales=True)
    assert 1e-5 < measured <= 1.1 * plain
    for layer in model.layers:
        q, k, _ = layer.attn.qkv.matrix.weight.split(
            [layer.attn.qkv.num_heads * 64, layer.attn.qkv.num_kv_heads * 64, layer.attn.qkv.num_kv_heads * 64]
        )
        q /= 200
        k *= 200
    assert loss() > 0.1, "without scales keys are clamped"
    assert loss(measures_scales=True) <= 1.5 * measured


def distributions(
    model: Any, prompts: list[list[int]], vocab: int, kv_dtype: torch.dtype, **options: Any
) -> list[torch.Tensor]:
    """Log-probabilities after every position of each prompt, in chunks, so that most of the keys come from the cache."""
    engine = InProcess(
        model, vocab, Setup(page_size=16, chunk_tokens=16, kv_dtype=kv_dtype, radix_cache=False, **options)
    )
    kept: list[torch.Tensor] = []
    plain = model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = plain(hidden)
        kept.append(out.float().log_softmax(-1))
        return out

    model.logits = logits
    try:
        for prompt in prompts:
            once = SamplingParams(temperature=0.0, max_new_tokens=1)
            engine.finish([engine.submit(prompt, once, LogprobSpec(start=0))])
    finally:
        del model.logits
    return kept
