"""Settings of speculative decoding: vLLM's object, ranges, and what can't be had together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bough.config.concerns import SpeculativeAlgorithm, SpeculativeConfig
from bough.config.draft_defaults import DRAFT_DEFAULTS, DraftDefault
from bough.config.server_args import ServerArgs, load_config
from bough.config.speculation import draft_numbers, draft_tokens, drafts_of_row, drafts_of_step
from bough.core.errors import ConfigError


def loaded(**given: object) -> ServerArgs:
    return ServerArgs.of(load_config(given, environ={}).config)


def test_vllms_object_is_read_as_settings() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 7}'
    made = loaded(speculative_config=text)
    assert made.speculative_algorithm == "NGRAM"
    assert made.speculative_num_draft_tokens == 6
    assert made.speculative_ngram_min_match_window_size == 2
    assert made.speculative_ngram_max_match_window_size == 7
    assert loaded(speculative_config=text, speculative_num_draft_tokens=3).speculative_num_draft_tokens == 3


def test_vllms_suffix_decoding() -> None:
    made = loaded(
        speculative_config='{"method": "suffix", "suffix_decoding_max_tree_depth": 9, '
        '"suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.25}'
    )
    assert made.speculative_algorithm == "SUFFIX"
    assert made.speculative_suffix_max_tree_depth == 9
    assert made.speculative_suffix_max_spec_factor == 2.0
    assert made.speculative_suffix_min_token_prob == 0.25


@pytest.mark.parametrize(
    ("method", "algorithm"),
    [
        ("eagle", "EAGLE"), ("eagle3", "EAGLE3"), ("medusa", "MEDUSA"), ("draft_model", "STANDALONE"),
        ("dflash", "DFLASH"), ("mtp", "NEXTN"), ("deepseek_mtp", "NEXTN"),
    ],
)  # fmt: skip
def test_vllms_methods_that_draft_on_the_device(method: str, algorithm: str) -> None:
    text = '{"method": "%s", "model": "head", "num_speculative_tokens": 3, "quantization": "fp8", "revision": "v2"}'
    made = loaded(speculative_config=text % method)
    assert made.speculative_algorithm == algorithm
    assert made.speculative_draft_model_path == "head"
    assert made.speculative_num_draft_tokens == 4
    assert made.speculative_draft_model_quantization == "fp8"
    assert made.speculative_draft_model_revision == "v2"


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "EAGLE3"),
        ("yuhuili/EAGLE-Vicuna-7B-v1.3/", "EAGLE"),
        ("FasterDecoding/medusa-vicuna-7b-v1.3", "MEDUSA"),
        ("z-lab/Qwen3-8B-DFlash-b16", "DFLASH"),
        ("meta-llama/Llama-3.2-1B-Instruct", "STANDALONE"),
    ],
)
def test_vllms_method_follows_from_the_draft_models_name(model: str, algorithm: str) -> None:
    made = loaded(speculative_config=json.dumps({"model": model, "num_speculative_tokens": 3}))
    assert (made.speculative_algorithm, made.speculative_draft_model_path) == (algorithm, model)


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_vllms_old_name_of_prompt_lookup(model: str) -> None:
    given = {"model": model, "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    made = loaded(speculative_config=json.dumps(given))
    assert (made.speculative_algorithm, made.speculative_draft_model_path) == ("NGRAM", "")
    assert made.speculative_ngram_max_match_window_size == 4


@pytest.mark.parametrize(("rule", "flags"), [("standard", (True, False)), ("block", (False, True))])
def test_vllms_rules_of_rejection(rule: str, flags: tuple[bool, bool]) -> None:
    given = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3, "rejection_sample_method": rule}
    made = loaded(speculative_config=json.dumps(given))
    assert (made.speculative_use_rejection_sampling, made.speculative_use_block_verification) == flags


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("{}", "method None"),
        ('{"method": "eagle4", "model": "x"}', "method 'eagle4'"),
        ('{"method": ["eagle3"]}', "method ['eagle3']"),
        ('{"model": 3}', "method None"),
        ('{"method": "eagle3", "draft_tensor_parallel_size": 1}', "has 'draft_tensor_parallel_size'"),
        ('{"method": "eagle3", "rejection_sample_method": "synthetic"}', "has 'synthetic'"),
        ('{"method": "ngram", "rejection_sample_method": "block"}', "has 'rejection_sample_method'"),
        ('{"method": "eagle3", "prompt_lookup_min": 2}', "has 'prompt_lookup_min'"),
        ('{"method": "eagle3", "model": 3}', "has 3 as model"),
        ('{"method": "ngram", "model": "x"}', "has 'model'"),
        ('{"method": "ngram", "num_speculative_tokens": "five"}', "has 'five' as num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "has True"),
    ],
)
def test_what_it_can_not_say(text: str, about: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(speculative_config=text)
    assert about in caught.value.what
    assert caught.value.param == "speculative_config"
    assert "ngram" in caught.value.fix


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_num_draft_tokens": 1},
        {"speculative_num_draft_tokens": 65},
        {"speculative_ngram_min_match_window_size": 0},
        {"speculative_ngram_min_match_window_size": 9, "speculative_ngram_max_match_window_size": 8},
        {"speculative_ngram_capacity": -1},
        {"speculative_ngram_external_corpus_max_tokens": -1},
        {"speculative_suffix_max_tree_depth": 1},
        {"speculative_suffix_max_spec_factor": 0.0},
        {"speculative_suffix_min_token_prob": 1.5},
        {"speculative_algorithm": "EAGLE9"},
        {"speculative_draft_window_size": 100},
        {"speculative_token_map": "map.json", "speculative_algorithm": "NGRAM"},
        {"speculative_token_map": "map.json", "speculative_algorithm": "NEXTN", "tp_size": 2},
        {"speculative_accept_threshold_single": 0.0, "speculative_algorithm": "NGRAM"},
        {"speculative_accept_threshold_acc": 0.5},
        {"speculative_use_rejection_sampling": True, "speculative_algorithm": "NGRAM"},
        {"speculative_use_block_verification": True, "speculative_algorithm": "NEXTN", "speculative_eagle_topk": 2},
        {
            "speculative_use_rejection_sampling": True,
            "speculative_algorithm": "NEXTN",
            "speculative_accept_threshold_acc": 0.5,
        },
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3", "speculative_algorithm": "NGRAM"},
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3", "speculative_algorithm": "MEDUSA"},
        {"speculative_draft_window_size": 100, "speculative_algorithm": "NEXTN"},
        {"speculative_draft_window_size": -1, "speculative_algorithm": "STANDALONE"},
        {"speculative_algorithm": "NGRAM", "is_embedding": True},
        {"speculative_algorithm": "NGRAM", "pp_size": 2},
        {"speculative_algorithm": "NGRAM", "deterministic": True},
        {"speculative_algorithm": "NGRAM", "tensor_dump_dir": "somewhere"},
    ],
)
def test_what_can_not_be_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(**given)
    assert caught.value.why
    assert caught.value.fix


def test_drafts_of_a_row_and_of_a_step() -> None:
    config = load_config({"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}, environ={}).config
    assert drafts_of_row(config.speculative) == 3
    assert drafts_of_step(config.speculative, "cpu", 8) == 24
    assert drafts_of_step(config.speculative, "cpu", 10_000) == 128
    assert drafts_of_row(load_config({}, environ={}).config.speculative) == 0


def row_of(entry: DraftDefault) -> str:
    """As docs/speculative_decoding.md shows it."""
    algorithms = ", ".join(f"`{each}`" for each in sorted(entry.algorithms))
    target = ", ".join(f"`{each}*`" for each in entry.architectures) or "any"
    return f"| {algorithms} | {target} | {entry.steps} | {entry.topk} | {entry.tokens} | {entry.rests_on} |"


def test_the_defaults_are_those_of_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "speculative_decoding.md").read_text()
    missing = [row_of(entry) for entry in DRAFT_DEFAULTS if row_of(entry) not in page]
    assert not missing, "put these rows into the table of docs/speculative_decoding.md:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("algorithm", "architecture", "steps"),
    [
        ("EAGLE3", "LlamaForCausalLM", 3),
        ("EAGLE3", "SomethingElse", 3),
        ("NEXTN", "DeepseekV3ForCausalLM", 3),
        ("STANDALONE", "LlamaForCausalLM", 3),
    ],
)
def test_numbers_left_open_are_those_of_the_target(
    algorithm: SpeculativeAlgorithm, architecture: str, steps: int
) -> None:
    numbers = draft_numbers(SpeculativeConfig(speculative_algorithm=algorithm), None, architecture)
    assert (numbers.steps, numbers.topk, numbers.tokens) == (steps, 1, steps + 1)
    assert draft_numbers(SpeculativeConfig(speculative_algorithm=algorithm), 2, architecture).steps == 2, (
        "a checkpoint's own"
    )


@pytest.mark.parametrize(("algorithm", "tokens"), [("NGRAM", 12), ("SUFFIX", 17)])
def test_drafts_of_the_host_have_defaults_of_their_own(algorithm: SpeculativeAlgorithm, tokens: int) -> None:
    assert draft_tokens(SpeculativeConfig(speculative_algorithm=algorithm))[0] == tokens
