"""Keys and values in INT8, INT4, and FP8 with scales from the first prompts: greedy answers are those of the plainest run of
the same kind, however the engine is set up. What each costs against exact keys and values is measured in
tests/models/test_fp8_kv.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import proposing
import pytest
import torch
from company import NEW_TOKENS, PROMPTS, answers_of
from in_process import DraftsOnDevice, InProcess, Setup
from pairwise import pairwise_cover
from tiny import make_tiny

from bough.config.hf import open_checkpoint
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
    "company": ["alone", "batch", "cached", "retracted", "tiny pool"],
    "drafts": ["none", "ngram", "device"],
    "kv": ["int8", "int4", "fp8"],
    "family": ["llama", "gemma3"],
}
COVER = pairwise_cover(AXES)
KINDS = {
    "exact": {},
    "int8": {"code_bits": 8},
    "int4": {"code_bits": 4},
    "fp8": {"kv_dtype": torch.float8_e4m3fn, "measures_scales": True},
}


Family = tuple[Model, dict[str, list[list[int]]], dict[str, DraftsOnDevice]]
"""A tiny model, its answers to PROMPTS by kind of keys and values, and what drafts for it on the device."""


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Makes each family once."""

    @cache
    def make(name: str) -> Family:
        folder = tmp_path_factory.mktemp(name)
        make_tiny(name, folder)
        model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
        greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
        plain = {
            kind: [
                InProcess(model, 131, Setup(overlap=False, radix_cache=False, **options)).generate([each], greedy)[0]
                for each in PROMPTS
            ]
            for kind, options in KINDS.items()
        }
        assert name == "gemma3" or plain["exact"] != plain["int4"], "4 bits were really used"
        drafts = proposing.eagle3(folder, model) if name == "gemma3" else proposing.itself(folder, 131)
        return model, plain, {"device": drafts}

    return make


@pytest.mark.parametrize("number", range(len(COVER)))
def test_every_pair_of_features_keeps_the_answer(family_of, number):
    """In the plain runs of FP8 every prompt is the first one, and has scales of its own: answers don't depend on them."""
    combination = dict(COVER[number])
    model, plain, drafts = family_of(combination.pop("family"))
    kind = combination.pop("kv")
    assert answers_of(model, {**combination, **KINDS[kind]}, plain[kind], drafts) == plain[kind], COVER[number]
