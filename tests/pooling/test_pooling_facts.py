"""Which checkpoints pool, and how: read from files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.config.pooling_facts import PoolingFacts, pooling_facts, rerank_tokens
from bough.core.errors import ConfigError, UnsupportedModel
from bough.models import registry

BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip


def facts_of(
    folder: Path, architecture: str, model_type: str, *, forced: bool = False, mode: str = "auto", **config: Any
):
    facts = registry.facts_of({**BASE, "architectures": [architecture], "model_type": model_type, **config})
    return pooling_facts(facts, folder, forced=forced, mode=mode)


def embedder(folder: Path, **config: Any) -> PoolingFacts:
    found = facts_of(folder, "BertModel", "bert", **config)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("architecture", "model_type", "task", "whole"),
    [
        ("BertModel", "bert", "embed", True),
        ("XLMRobertaModel", "xlm-roberta", "embed", True),
        ("BertForMaskedLM", "bert", "sparse", True),
        ("BertForSequenceClassification", "bert", "classify", True),
        ("Qwen3Model", "qwen3", "embed", False),
        ("Gemma2ForSequenceClassification", "gemma2", "classify", False),
        ("Qwen2ForRewardModel", "qwen2", "classify", False),
    ],
)
def test_architectures_say_what_they_are(
    architecture: str, model_type: str, task: str, whole: bool, tmp_path: Path
) -> None:
    found = facts_of(tmp_path, architecture, model_type)
    assert found is not None
    assert (found.task, found.whole) == (task, whole)


def test_a_generative_model_pools_only_when_told_to(tmp_path: Path) -> None:
    assert facts_of(tmp_path, "LlamaForCausalLM", "llama") is None
    told = facts_of(tmp_path, "LlamaForCausalLM", "llama", forced=True)
    assert told is not None
    assert (told.modes, told.normalise, told.whole) == (("last",), True, False)
    with pytest.raises(ConfigError, match="generates"):
        facts_of(tmp_path, "LlamaForCausalLM", "llama", mode="mean")


def test_a_language_model_of_another_name_generates(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
    assert facts_of(tmp_path, "GPT2LMHeadModel", "gpt2", **sizes) is None


def test_looking_both_ways_means_whole_texts(tmp_path: Path) -> None:
    found = facts_of(tmp_path, "Qwen2Model", "qwen2", is_causal=False)
    assert found is not None
    assert found.whole


def test_sizes_that_an_embedding_may_be_cut_to(tmp_path: Path) -> None:
    plain = embedder(tmp_path)
    assert plain.allows(32)
    assert not plain.allows(16)
    assert plain.legal_dimensions() == "32"
    listed = embedder(tmp_path, matryoshka_dimensions=[8, 16])
    assert [size for size in range(1, 40) if listed.allows(size)] == [8, 16, 32]
    assert listed.legal_dimensions() == "8, 16, 32"
    every = embedder(tmp_path, is_matryoshka=True)
    assert [every.allows(size) for size in (0, 1, 31, 32, 33)] == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("config", "score"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}}, "softmax"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "identity"),
        ({"id2label": {"0": "x"}, "sbert_ce_default_activation_function": "torch.nn.Identity"}, "identity"),
    ],
)  # fmt: skip
def test_how_logits_become_scores(config: dict[str, Any], score: str, tmp_path: Path) -> None:
    found = facts_of(tmp_path, "BertForSequenceClassification", "bert", **config)
    assert found is not None
    assert found.score == score
    assert found.width == len(config["id2label"])


def test_prompts_lengths_and_endings(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    (tmp_path / "tokenizer_config.json").write_text('{"add_eos_token": true}')
    found = embedder(tmp_path)
    assert (found.prompts, found.default_prompt) == ({"query": "query: "}, "query: ")
    assert (found.max_length, found.append_eos) == (24, True)


def test_modules_stay_inside_the_checkpoint(tmp_path: Path) -> None:
    entry = {"idx": 0, "name": "0", "path": "../elsewhere", "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match="outside"):
        embedder(tmp_path)


def test_sparse_needs_a_head_over_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no head for sparse weights"):
        facts_of(tmp_path, "BertModel", "bert", mode="sparse")


def test_a_rerankers_own_tokens(tmp_path: Path) -> None:
    assert rerank_tokens(tmp_path) is None
    entry = {"idx": 1, "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}
    (tmp_path / "modules.json").write_text(json.dumps([entry]))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 9}')
    found = rerank_tokens(tmp_path)
    assert found is not None
    assert (found.true_id, found.false_id) == (7, 9)


@pytest.mark.parametrize("config", [{"position_embedding_type": "relative_key"}, {"hidden_act": "mish"}])
def test_encoders_that_can_not_be_computed(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        embedder(tmp_path, **config)
