"""Greedy answers stay what transformers says, however the engine is set up: features switched in pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import combinations

import proposing
import pytest
import torch
from company import NEW_TOKENS, PROMPTS, answers_of
from in_process import DraftsOnDevice, InProcess, Setup
from pairwise import pairwise_cover
from tiny import make_tiny

from bough.config.concerns import CacheConfig, DeviceConfig, SchedulerConfig, SpeculativeConfig
from bough.config.hf import open_checkpoint
from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.layers.batch import Model
from bough.models.load import build_model

AXES = {
    "page_size": [16, 1, 5],
    "chunk_tokens": [512, 7],
    "overlap": [True, False],
    "radix_cache": [True, False],
    "attention": ["torch", "cpu"],
    "shared_spans": [True, False],
    "stream": [True, False],
    "policy": ["auto", "lpm", "dfs-weight", "lof", "shortest-prefill-first"],
    "company": ["alone", "batch", "cached", "retracted", "tiny pool"],
    "drafts": ["none", "ngram", "known", "adaptive", "device"],
    "frees_windows": [True, False],
}
FAMILIES = ["llama", "gemma3", "qwen3_moe"]
COVER = pairwise_cover({**AXES, "family": FAMILIES})
"""Every pair of features on some family, every feature on every family; all pairs on all families are long."""

# Flags that change how an answer is computed -> the axis that switches them.
FLAG_AXES = {
    "page_size": "page_size",
    "radix_cache": "radix_cache",
    "chunked_prefill_size": "chunk_tokens",
    "unwatched_prefill_size": "chunk_tokens",
    "schedule_policy": "policy",
    "overlap_schedule": "overlap",
    "attention_backend": "attention",
    "max_total_tokens": "company",
    "max_running_requests": "company",
    "stream_interval": "stream",
    "custom_kernels": "attention",
    "safe_mode": "overlap",
    "speculative_algorithm": "drafts",
    "speculative_adaptive": "drafts",
}
# Flags that can't change an answer, or are covered elsewhere -> why.
OTHER_FLAGS = {
    "radix_eviction_policy": "tests/sim evicts under every policy with an oracle model",
    "max_queued_requests": "admission",
    "max_queued_tokens": "admission",
    "max_queue_wait_s": "admission",
    "schedule_conservativeness": "admission; tests/sim",
    "tpot_target_ms": "sizes of chunks, which the axis chunk_tokens varies",
    "small_request_share": "sizes of chunks",
    "priority_scheduling": "tests/sim preempts",
    "priority_preemption_threshold": "tests/sim preempts",
    "priority_preemption": "tests/sim preempts, or not",
    "max_prefill_tokens": "sizes of chunks",
    "device": "tests/gpu",
    "mem_fraction_static": "sizes of the pool",
    "cuda_graph": "tests/gpu",
    "cuda_graph_max_tokens": "tests/gpu",
    "cpu_threads": "threads split rows, not sums",
    "deterministic": "tests/e2e/test_deterministic.py",
    "speculative_draft_model_path": "the axis drafts has models and heads of its own",
    "speculative_draft_model_revision": "which file is loaded",
    "speculative_token_map": "which drafts there are, not which are right",
    "speculative_draft_window_size": "which drafts there are, not which are right",
    "speculative_accept_threshold_single": "other answers by design; tests/unit/sampler judges them",
    "speculative_accept_threshold_acc": "other answers by design; tests/unit/sampler judges them",
    "speculative_use_rejection_sampling": "other draws of the same odds, greedy alike: tests/unit/sampler",
    "speculative_use_block_verification": "other draws of the same odds, greedy alike: tests/unit/sampler",
    "speculative_draft_load_format": "which drafts there are, not which are right",
    "speculative_draft_model_quantization": "which drafts there are, not which are right",
    "speculative_draft_kv_cache_dtype": "an axis of tests/grid/test_proposers.py",
    "speculative_eagle_topk": "tests/grid/test_proposers.py grows trees",
    "speculative_num_steps": "tests/sim drafts any number of them",
    "speculative_config": "vLLM's spelling of the other flags",
    "speculative_num_draft_tokens": "tests/sim drafts any number of them",
    "speculative_ngram_min_match_window_size": "which drafts there are, not which are right",
    "speculative_ngram_max_match_window_size": "which drafts there are, not which are right",
    "speculative_ngram_external_corpus_max_tokens": "which drafts there are, not which are right",
    "speculative_suffix_max_tree_depth": "which drafts there are, not which are right",
    "speculative_suffix_max_spec_factor": "which drafts there are, not which are right",
    "speculative_suffix_min_token_prob": "which drafts there are, not which are right",
    "speculative_ngram_capacity": "which drafts there are, not which are right",
}


Family = tuple[Model, list[list[int]], dict[str, DraftsOnDevice]]
"""A tiny model, transformers' greedy answers to PROMPTS, and what drafts for it on the device."""


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Makes each family once."""

    @cache
    def make(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        reference = make_tiny(name, folder)
        model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
        answers = []
        for prompt in PROMPTS:
            out = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            answers.append(out[0, len(prompt) :].tolist())
        drafts = proposing.eagle3(folder, model) if name == "gemma3" else proposing.itself(folder, 131)
        return model, answers, {"device": drafts}

    return make


def check(family: Family, combination: dict[str, object]) -> None:
    model, expected, drafts = family
    assert answers_of(model, combination, expected, drafts) == expected, combination


@pytest.mark.parametrize("number", range(len(COVER)))
def test_every_pair_of_features_keeps_the_answer(family_of, number):
    combination = dict(COVER[number])
    check(family_of(combination.pop("family")), combination)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("number", range(len(pairwise_cover(AXES))))
def test_every_pair_of_features_keeps_the_answer_of_every_family(family_of, number, name):
    check(family_of(name), pairwise_cover(AXES)[number])


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_stay_under_chunks_hits_and_batches(family_of, name):
    """Log-probabilities of prompt and output, against the plainest run."""
    model, _, drafts = family_of(name)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    spec = LogprobSpec(start=3, top=2)

    def scores(setup: Setup, warm: bool) -> list[float]:
        engine = InProcess(model, 131, setup, proposer=drafts.get(setup.drafts))
        if warm:
            engine.generate(PROMPTS, greedy)
        ids = [engine.submit(prompt, greedy, spec) for prompt in PROMPTS[::2]]
        values: list[float] = []
        for answer in engine.finish(ids):
            assert answer.prompt_logprobs is not None
            values += [v for v in answer.prompt_logprobs.logprobs if v is not None]
            values += [v for part in answer.output_logprobs for v in part.logprobs if v is not None]
        return values

    plain = scores(Setup(overlap=False, radix_cache=False), warm=False)
    assert len(plain) == sum(len(p) - 3 + 4 for p in PROMPTS[::2])
    for setup, warm in (
        (Setup(chunk_tokens=7), True),
        (Setup(page_size=1, attention="cpu"), True),
        (Setup(chunk_tokens=7, radix_cache=False, stream=False), False),
        (Setup(drafts="ngram"), True),
        (Setup(drafts="device"), True),
    ):
        other = scores(setup, warm)
        assert torch.allclose(torch.tensor(other), torch.tensor(plain), atol=1e-4), setup


def test_the_cover_has_every_pair():
    axes = {**AXES, "family": FAMILIES}
    for a, b in combinations(axes, 2):
        seen = {(row[a], row[b]) for row in COVER}
        assert len(seen) == len(axes[a]) * len(axes[b])


def test_every_flag_of_the_engine_is_on_the_grid_or_excused():
    flags = {
        f.name for concern in (CacheConfig, SchedulerConfig, DeviceConfig, SpeculativeConfig) for f in fields(concern)
    }
    assert flags == FLAG_AXES.keys() | OTHER_FLAGS.keys()
    assert set(FLAG_AXES.values()) <= AXES.keys()
