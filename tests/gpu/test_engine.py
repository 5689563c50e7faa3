"""The engine on a GPU: the same answer with graphs and without, overlapped or not, shared or not, cached or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import LATENTS, SHARED_KV, STATES
from in_process import InProcess, Setup
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.sampling import SamplingParams
from bough.models.load import build_model

COMMON = [(7 * i + 3) % 120 + 3 for i in range(70)]
PROMPTS = [[*COMMON, 5, 17, 99], [42], [*COMMON, 5, 88], [100, 90, 80, 70], [*COMMON[:40], 9, 9, 30]]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32)
SIZES = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 256}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BASE = {"device": "cuda", "attention": "hopper" if HOPPER else "triton"}
VARIANTS = {
    "graphs": {"graphs": True},
    "no overlap": {"graphs": True, "overlap": False},
    "eager, no overlap": {"overlap": False},
    "not shared": {"graphs": True, "shared_spans": False},
    "no cache": {"graphs": True, "radix_cache": False},
    "chunks of 7": {"graphs": True, "chunk_tokens": 7},
    "pages of 1": {"graphs": True, "page_size": 1},
    "pages of 64": {"graphs": True, "page_size": 64},
    "n-gram drafts": {"graphs": True, "drafts": "ngram"},
    "drafts, eager": {"drafts": "ngram", "overlap": False},
    "drafts, pages of 1": {"graphs": True, "drafts": "ngram", "page_size": 1},
    "known drafts": {"graphs": True, "drafts": "known"},
}


FAMILIES = [
    "llama", "qwen3", "gemma3", "gemma2", "mistral", "qwen3_moe", "qwen3_next", "gemma3n", "gemma4", "gemma4-experts",
    "deepseek_v3", "deepseek_v32-chosen", "glm_moe_dsa",
]  # fmt: skip


def _sizes(family: str) -> dict[str, int]:
    """Heads of latents have widths of their own."""
    return {name: size for name, size in SIZES.items() if family not in LATENTS or name != "head_dim"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp(request.param)
    prefix, extra = {**STATES, **SHARED_KV, **LATENTS}.get(request.param, (request.param, {}))
    if (
        "vocab_size_per_layer_input" in extra
    ):  # some versions of transformers look up every id there, and would go beyond it
        extra = {**extra, "vocab_size_per_layer_input": 131}
    reference = make_tiny(prefix, folder, **{**extra, **_sizes(request.param)}).cuda()
    expected = []
    for prompt in PROMPTS:
        out = reference.generate(
            torch.tensor([prompt], device="cuda"), attention_mask=torch.ones(1, len(prompt), device="cuda"),
            max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cuda"))
    return model, expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_answers_equal_transformers(family, variant):
    model, expected = family
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    engine = InProcess(model, 131, Setup(**BASE, **VARIANTS[variant]), answers)
    assert engine.generate(PROMPTS, GREEDY) == expected
    assert engine.generate(PROMPTS, GREEDY) == expected, "from the cache"


def test_launch_never_waits_for_the_device(family):
    """Every step but the first of its kind runs under torch's debug mode, which makes a hidden wait an error."""
    model, _ = family
    engine = InProcess(model, 131, Setup(**BASE, graphs=True))
    rich = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        frequency_penalty=0.5,
        logit_bias={5: 1.0},
        max_new_tokens=8,
        bad_words=((7, 8), (9,)),
    )
    engine.generate(PROMPTS, GREEDY)
    engine.generate(PROMPTS, rich)
    launch = engine.loop.runner.launch

    def guarded(step):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.loop.runner.launch = guarded
    engine.generate([p[::-1] for p in PROMPTS], GREEDY)
    engine.generate([p[::-1] for p in PROMPTS], rich)


def test_a_seeded_draw_does_not_depend_on_the_batch(family):
    model, _ = family
    engine = InProcess(model, 131, Setup(**BASE, graphs=True))
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_new_tokens=16)
    alone = engine.generate([PROMPTS[0]], seeded)[0]
    assert engine.generate(PROMPTS, seeded)[0] == alone
