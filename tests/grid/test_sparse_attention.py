"""Queries that read chosen tokens alone: greedy answers are transformers', however the engine is set up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import draft_files
import proposing
import pytest
import torch
from company import NEW_TOKENS, PROMPTS, answers_of
from families import LATENTS
from in_process import DraftsOnDevice
from lifetimes import LIFETIMES
from pairwise import pairwise_cover
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.config.server_args import build_config
from bough.core.errors import ConfigError
from bough.engine.decide import decide
from bough.layers.batch import Model, attention_specs
from bough.models.load import build_model
from bough.platform import detect
from bough.speculative.proposers.tree import TreeShape

AXES = {
    "page_size": [16, 1, 5],
    "chunk_tokens": [512, 7],
    "overlap": [True, False],
    "radix_cache": [True, False],
    "attention": ["torch", "cpu"],
    "company": ["alone", "batch", "cached", "retracted", "tiny pool"],
    "drafts": ["none", "known", "device"],
}
CASES = {"deepseek_v32-chosen": {}, "glm_moe_dsa": {"indexer_types": ["full", "shared", "full", "shared", "full"]}}


class Family(NamedTuple):
    """A tiny model, transformers' greedy answers to PROMPTS, and its own layer that drafts, in chains and in trees."""

    model: Model
    answers: list[list[int]]
    chain: DraftsOnDevice
    tree: DraftsOnDevice


@pytest.fixture(scope="module", params=["deepseek_v32-chosen", pytest.param("glm_moe_dsa", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder: Path = tmp_path_factory.mktemp(request.param)
    prefix, extra = LATENTS[request.param]
    whole = make_tiny(prefix, folder, **{**extra, **CASES[request.param], "num_hidden_layers": 5})
    draft_files.nextn(folder, whole)
    whole.model.layers = whole.model.layers[:4]
    whole.config.num_hidden_layers = 4
    model = build_model(
        open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"), context_length=256
    )
    chain = proposing.head("NEXTN", folder, folder, model)
    tree = proposing.head("NEXTN", folder, folder, model, TreeShape(steps=3, topk=2))
    answers = []
    for prompt in PROMPTS:
        out = whole.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return Family(model, answers, chain, tree)


COMBINATIONS = pairwise_cover(AXES)
SOON = (9,)
"""It has many of the values that matter; the others take longer."""


@pytest.mark.parametrize(
    "number",
    [pytest.param(at, marks=() if at in SOON else pytest.mark.long) for at in range(len(COMBINATIONS))],
)
def test_every_pair_of_features_keeps_the_answer(family: Family, number: int) -> None:
    answers = answers_of(family.model, COMBINATIONS[number], family.answers, {"device": family.chain})
    assert answers == family.answers, COMBINATIONS[number]


def test_trees_of_drafts_choose_tokens_by_branch(family: Family) -> None:
    setup = {"page_size": 4, "chunk_tokens": 7, "drafts": "device", "company": "batch", "most_drafts": 5}
    assert answers_of(family.model, setup, family.answers, {"device": family.tree}) == family.answers


def test_queries_read_less_than_there_is(family: Family) -> None:
    """Otherwise these tests would be of ordinary attention."""
    assert isinstance(family.model, torch.nn.Module)
    assert {spec.topk for spec in attention_specs(family.model)} == {9}
    assert max(map(len, PROMPTS)) > 4 * 9


def test_keys_in_eight_bits_are_read_as_they_were_written(family: Family) -> None:
    """Whether tokens were computed in the same step, or long before, the same ones are chosen."""
    setup = {"page_size": 4, "kv_dtype": torch.float8_e4m3fn, "drafts": "none"}
    whole = answers_of(family.model, {**setup, "chunk_tokens": 512, "company": "alone"}, family.answers, {})
    cut = answers_of(family.model, {**setup, "chunk_tokens": 7, "company": "cached"}, family.answers, {})
    assert cut == whole


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"tp_size": 2, "attn_cp_size": 2}, "--attn-cp-size does not work"),
        ({"pp_size": 2, "pp_layer_partition": "3,3"}, "can't begin with layer 3"),
        ({"pp_size": 2, "pp_layer_partition": "2,4"}, ""),
    ],
)
def test_what_can_not_be_split_is_refused(asked: dict[str, Any], refused: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LIFETIMES["chosen latents"]))
    config = build_config(model=str(tmp_path), load_format="dummy", device="cpu", **asked)
    if not refused:
        decide(config, detect("cpu"))
        return
    with pytest.raises(ConfigError, match=refused):
        decide(config, detect("cpu"))
