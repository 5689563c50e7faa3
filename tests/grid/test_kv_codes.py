"""Keys and values in INT8 and INT4: greedy answers are those of the plainest run of as many bits, however the engine is set
up. What the bits cost against exact keys and values is measured in tests/models/test_fp8_kv.py."""

from __future__ import annotations

from pathlib import Path

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
    "code_bits": [8, 4],
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def family(request, tmp_path_factory) -> tuple[Model, dict[int, list[list[int]]], dict[str, DraftsOnDevice]]:
    """A tiny model, its answers to PROMPTS by bits of keys and values, and what drafts for it on the device."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param, folder)
    model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
    plain = {
        bits: [
            InProcess(model, 131, Setup(overlap=False, radix_cache=False, code_bits=bits)).generate([each], greedy)[0]
            for each in PROMPTS
        ]
        for bits in (0, 8, 4)
    }
    assert request.param == "gemma3" or plain[0] != plain[4], "4 bits were really used"
    drafts = proposing.eagle3(folder, model) if request.param == "gemma3" else proposing.itself(folder, 131)
    return model, plain, {"device": drafts}


@pytest.mark.parametrize("number", range(len(pairwise_cover(AXES))))
def test_every_pair_of_features_keeps_the_answer(family, number):
    model, plain, drafts = family
    combination = pairwise_cover(AXES)[number]
    expected = plain[combination["code_bits"]]
    assert answers_of(model, combination, expected, drafts) == expected, combination
