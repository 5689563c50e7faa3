"""Log-probabilities of the default model, against transformers on the same weights: of outputs, of prompts, of the best
few and of given tokens; the same however the engine came to them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import bough
from bough.config.hf import open_checkpoint
from bough.tokenizer import load_tokenizer
from bough.weights.from_gguf import open_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had not caught a fish for",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
]
NEW_TOKENS = 12
GIVEN = [260, 17, 1000, 49_151]
TOP = 5
Floats = npt.NDArray[np.float32]


@cache
def reference() -> Any:
    checkpoint = open_checkpoint("")
    config = dict(checkpoint.config)
    hf_config = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa", dtype=torch.float32).eval()
    weights = {name: stored.read(0, stored.shape[0]).float() for name, stored in open_gguf(checkpoint).items()}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


@cache
def expected(ids: tuple[int, ...]) -> Floats:
    """Of every position: the log-probabilities of what comes next."""
    with torch.no_grad():
        rows: Floats = reference()(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    return rows


@cache
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(open_checkpoint(""))
    return [tokenizer.encode(text) for text in PROMPTS]


def ask(engine: bough.Engine, tokens: int = NEW_TOKENS, **more: Any) -> list[dict[str, Any]]:
    options = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": TOP,
        "token_ids_logprob": [GIVEN] * 3,
    }
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return engine.generate(input_ids=prompts(), sampling_params=sampling, **{**options, **more})  # type: ignore[return-value]


def differences(answers: list[dict[str, Any]], start: int = 0) -> Floats:
    """Every log-probability an answer has, less what it should be."""
    found: list[float] = []
    for prompt, answer in zip(prompts(), answers, strict=True):
        meta, output = answer["meta_info"], answer["output_ids"]
        assert len(output) == NEW_TOKENS
        rows = expected((*prompt, *output))
        inputs, outputs = meta["input_token_logprobs"], meta["output_token_logprobs"]
        assert [entry[1] for entry in inputs] == prompt[start:]
        assert [entry[1] for entry in outputs] == output
        assert inputs[0][0] is None, "the first has none"
        for name, first, tokens in (("input", start, prompt[start:]), ("output", len(prompt), output)):
            own = meta[f"{name}_token_logprobs"]
            tops, given = meta[f"{name}_top_logprobs"], meta[f"{name}_token_ids_logprobs"]
            assert len(own) == len(tops) == len(given) == len(tokens)
            for at, token in enumerate(tokens):
                if name == "input" and at == 0:
                    assert tops[at] is given[at] is None
                    continue
                row = rows[first + at - 1]
                found.append(own[at][0] - row[token])
                assert len(tops[at]) == TOP
                assert [entry[0] for entry in tops[at]] == sorted((entry[0] for entry in tops[at]), reverse=True)
                found += [score - row[other] for score, other, _ in tops[at]]
                found += (np.array([score for score, _, _ in tops[at]]) - np.sort(row)[::-1][:TOP]).tolist()
                assert [entry[1] for entry in given[at]] == GIVEN
                found += [score - row[other] for score, other, _ in given[at]]
    return np.array(found, np.float32)


@pytest.fixture(scope="module")
def engine() -> Iterator[bough.Engine]:
    settings = {"dtype": "float32", "quantization": "none", "device": "cpu", "max_total_tokens": 4096, "cpu_threads": 1}
    with bough.Engine(**settings) as made:
        yield made


@pytest.fixture(scope="module")
def cold(engine: bough.Engine) -> list[dict[str, Any]]:
    """Answers of an engine that has seen none of the prompts."""
    engine.flush_cache()
    return ask(engine)


def test_float32_is_transformers(engine: bough.Engine, cold: list[dict[str, Any]]) -> None:
    off = differences(cold)
    assert len(off) > 700
    assert np.abs(off).max() <= 1e-4
    part = ask(engine, logprob_start_len=3)
    assert np.abs(differences(part, 3)).max() <= 1e-4


def test_text_in_logprobs(engine: bough.Engine) -> None:
    tokenizer = load_tokenizer(open_checkpoint(""))
    answer = ask(engine, 3, return_text_in_logprobs=True)[0]["meta_info"]
    for entry in answer["input_token_logprobs"] + answer["output_token_logprobs"]:
        assert entry[2] == tokenizer.decode([entry[1]])


def test_the_same_after_cache_hits(engine: bough.Engine, cold: list[dict[str, Any]]) -> None:
    warm = ask(engine)
    later = ask(engine, logprob_start_len=-1)
    assert [answer["output_ids"] for answer in cold] == [answer["output_ids"] for answer in warm]
    assert sum(answer["meta_info"]["cached_tokens"] for answer in later) > 0
    assert np.abs(differences(warm)).max() <= 1e-4
    for answer, plain in zip(later, cold, strict=True):
        ours, theirs = (each["meta_info"]["output_token_logprobs"] for each in (answer, plain))
        assert [entry[1] for entry in ours] == [entry[1] for entry in theirs]
        assert np.abs(np.array([a[0] - b[0] for a, b in zip(ours, theirs, strict=True)])).max() <= 1e-4


@pytest.mark.long  # the short form has tests/grid/test_same_answer.py
def test_the_same_in_chunks() -> None:
    plain = {"dtype": "float32", "quantization": "none", "device": "cpu", "max_total_tokens": 4096}
    with bough.Engine(**plain, chunked_prefill_size=8, page_size=4, radix_cache=False) as made:
        assert np.abs(differences(ask(made))).max() <= 1e-4


def test_the_same_after_retractions(engine: bough.Engine) -> None:
    for _ in range(5):  # on a machine that stands still they may be done before they can be retracted
        engine.flush_cache()
        last: dict[int, dict[str, Any]] = {}
        news = ask(engine, stream=True)
        for number, answer in enumerate(news):
            last[answer["index"]] = answer  # everything so far
            if number in (0, 8):
                engine.pause("retract")
                engine.resume()
        answers = [last[index] for index in range(len(PROMPTS))]
        assert np.abs(differences(answers)).max() <= 1e-4
        if min(answer["meta_info"]["num_retractions"] for answer in answers) > 0:
            return
    pytest.fail("they were never retracted")


def test_processed_by_option(engine: bough.Engine) -> None:
    """After bias and temperature instead of the model's own."""
    sampling = {
        "temperature": 0.5,
        "max_new_tokens": 1,
        "logit_bias": {"300": 5.0},
        "allowed_token_ids": [300, 400, 500],
    }
    prompt = prompts()[0]
    row = expected(tuple(prompt))[-1].astype(np.float64)
    shaped = np.full(len(row), -np.inf)
    shaped[[300, 400, 500]] = (row[[300, 400, 500]] + [5.0, 0.0, 0.0]) / 0.5
    shaped -= np.log(np.exp(shaped).sum())
    for processed, wanted in ((True, shaped), (False, row), (None, row)):
        answer = engine.generate(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, processed_logprobs=processed,
            token_ids_logprob=[300, 400, 500],
        )  # fmt: skip
        meta = answer["meta_info"]  # type: ignore[call-overload]
        token = answer["output_ids"][0]  # type: ignore[call-overload]
        assert meta["output_token_logprobs"][0][0] == pytest.approx(wanted[token], abs=1e-4)
        given = [entry[0] for entry in meta["output_token_ids_logprobs"][0]]
        assert given == pytest.approx(wanted[[300, 400, 500]].tolist(), abs=1e-4)


@pytest.mark.long
def test_bfloat16_is_near() -> None:
    """Tokens' own log-probabilities within 0.05 on average; those of the alternatives, which are noisier the less likely
    they are, no further off than transformers' own bfloat16."""
    with bough.Engine(dtype="bfloat16", quantization="none", device="cpu", max_total_tokens=4096) as made:
        answers = ask(made)
    rounded = copy.deepcopy(reference()).to(torch.bfloat16)
    own: list[float] = []
    ours: list[float] = []
    theirs: list[float] = []
    for prompt, answer in zip(prompts(), answers, strict=True):
        meta, ids = answer["meta_info"], (*prompt, *answer["output_ids"])
        rows = expected(ids)
        with torch.no_grad():
            peer = rounded(torch.tensor([ids])).logits[0].float().log_softmax(-1).numpy()
        entries = meta["input_token_logprobs"] + meta["output_token_logprobs"]
        others = [meta[f"input_{kind}"] + meta[f"output_{kind}"] for kind in ("top_logprobs", "token_ids_logprobs")]
        for at in range(1, len(ids)):
            own.append(entries[at][0] - rows[at - 1][ids[at]])
            for score, token, _ in others[0][at] + others[1][at]:
                ours.append(score - rows[at - 1][token])
                theirs.append(peer[at - 1][token] - rows[at - 1][token])
    assert np.abs(own).mean() <= 0.05
    assert np.abs(ours).mean() <= 1.1 * np.abs(theirs).mean()
