"""The whole way through real processes: the default model's answers are transformers' on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config.hf import open_checkpoint
from bough.tokenizer import load_tokenizer
from bough.weights.from_gguf import open_gguf

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SUBJECTS = ("the sea", "a bridge", "winter", "copper", "bread", "the moon", "a violin", "trains")
STARTS = ("Tell me about {}.", "Once upon a time, {} was", "Three facts on {}: 1.", "Q: What is {}? A:")
PROMPTS = [start.format(subject) for subject in SUBJECTS for start in STARTS]
FEW = [STARTS[at % 4].format(subject) for at, subject in enumerate(SUBJECTS)]
"""Eight of them: each subject once, each start twice."""
NEW_TOKENS = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another on a busy machine wait for most of their time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.inference_mode()
def reference_answers(prompts: list[str], guesses: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers, holding the weights dequantised from the same file.

    A guess of which each token is the best one after those before it is what greedy decoding gives: that takes one pass to
    see. Others are decoded.
    """
    checkpoint = open_checkpoint("")
    config = dict(checkpoint.config)
    hf_config = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa", dtype=torch.float32).eval()
    weights = {name: stored.read(0, stored.shape[0]).float() for name, stored in open_gguf(checkpoint).items()}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tokenizer = load_tokenizer(checkpoint)
    answers = []
    for prompt, guess in zip(prompts, guesses, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        best = model(torch.cat([ids, torch.tensor([guess])], 1)).logits[0, ids.shape[1] - 1 : -1].argmax(-1).tolist()
        if best == guess and len(guess) == NEW_TOKENS:
            answers.append(best)
            continue
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("prompts", [FEW, pytest.param(PROMPTS, marks=pytest.mark.long)], ids=["8", "32"])
def test_prompts_through_the_official_client(make_server: Callable[..., Any], prompts: list[str]) -> None:
    tokenizer = load_tokenizer(open_checkpoint(""))
    server = make_server({"dtype": "float32", "quantization": "none", "device": "cpu", "cpu_threads": 1})
    asked = {"text": prompts, "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0}}
    guesses = [each["output_ids"] for each in httpx.post(f"{server.url}/generate", json=asked, timeout=300).json()]
    expected = reference_answers(prompts, guesses)
    client = openai.OpenAI(_strict_response_validation=True, base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    reply = client.completions.create(model=model, prompt=prompts, max_tokens=NEW_TOKENS, temperature=0)
    texts = [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]
    assert texts == [tokenizer.decode(ids) for ids in expected]
