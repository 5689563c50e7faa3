"""The default model through the official client: a real server, real processes, real answers."""

from __future__ import annotations

import concurrent.futures
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from default_server import default_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
GREEDY: dict[str, Any] = {"model": "default", "temperature": 0}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        _strict_response_validation=True, base_url=f"{default_server()}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.fixture(scope="module")
def lenient() -> Iterator[openai.OpenAI]:
    """For what OpenAI itself sends against its client's types: null for a finish reason that is not there yet, and for
    the score of a prompt's first token."""
    with openai.OpenAI(base_url=f"{default_server()}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["SmolLM2-135M-Instruct"]
    assert client.models.retrieve("SmolLM2-135M-Instruct").model_extra["max_model_len"] == 8192


def test_it_makes_sense(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=CAPITAL, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_streaming_equals_not_streaming(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "messages": CAPITAL, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    finish = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finish == [whole.choices[0].finish_reason]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_length_and_stop(lenient: openai.OpenAI) -> None:
    cut = lenient.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": "Tell a story."}], max_tokens=5
    )
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 5
    counted = lenient.completions.create(**GREEDY, prompt="1, 2, 3, 4, 5, 6, 7,", max_tokens=40, stop=[" 10"])
    assert counted.choices[0].finish_reason == "stop"
    assert counted.choices[0].text == " 8, 9,"
    assert counted.choices[0].model_extra["matched_stop"] == " 10"
    streamed = lenient.completions.create(
        **GREEDY, prompt="1, 2, 3, 4, 5, 6, 7,", max_tokens=40, stop=[" 10"], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == " 8, 9,"


def test_a_second_time_finds_the_prompt_cached(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Remember these words: " + " ".join(f"word{i}" for i in range(60))}]
    for attempt in range(2):
        answer = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        if attempt:
            assert cached > answer.usage.prompt_tokens // 2


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        asked = {"model": "default", "prompt": "Once upon a time", "max_tokens": 16, "temperature": 1.5}
        return client.completions.create(**asked, seed=seed).choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="default", prompt="Once upon a time", n=3, max_tokens=8, temperature=1.5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=CAPITAL, max_tokens=4, logprobs=True, top_logprobs=5)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert answer.usage is not None
    for item in scores.content:
        assert item.logprob <= 0
        assert item.logprob == pytest.approx(max(top.logprob for top in item.top_logprobs), abs=1e-3)
        assert len(item.top_logprobs) == 5
        assert sum(math.exp(top.logprob) for top in item.top_logprobs) <= 1 + 1e-4


def test_echoed_scores(lenient: openai.OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy"
    answer = lenient.completions.create(**GREEDY, prompt=prompt, max_tokens=1, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text.startswith(prompt)
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.token_logprobs is not None
    assert "".join(scores.tokens) == choice.text
    assert scores.token_logprobs[0] is None
    assert scores.tokens[-1] == " dog"
    assert all(score is not None and score <= 0 for score in scores.token_logprobs[1:])


def test_token_prompts_equal_text(client: openai.OpenAI) -> None:
    import httpx

    asked = {"prompt": "The capital of Italy is"}
    ids = httpx.post(f"{default_server()}/tokenize", json=asked, timeout=60).json()["tokens"]
    by_ids = client.completions.create(**GREEDY, prompt=ids, max_tokens=6).choices[0].text
    by_text = client.completions.create(**GREEDY, prompt="The capital of Italy is", max_tokens=6).choices[0].text
    assert by_ids == by_text
    both = client.completions.create(**GREEDY, prompt=["The capital of Italy is"] * 2, max_tokens=6)
    assert [choice.text for choice in both.choices] == [by_text, by_text]


def test_many_at_once(client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[str, str]:
        messages = [{"role": "user", "content": f"Repeat after me: number {number}."}]
        asked = {**GREEDY, "messages": messages, "max_tokens": 12}
        whole = client.chat.completions.create(**asked).choices[0].message.content or ""
        stream = client.chat.completions.create(**asked, stream=True)
        return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for whole, streamed in pool.map(ask, range(8)):
            assert whole
            assert streamed


def test_continue_final_message(client: openai.OpenAI) -> None:
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of France is"}]
    asked: dict[str, Any] = {**GREEDY, "messages": messages, "max_tokens": 4}
    answer = client.chat.completions.create(**asked, extra_body={"continue_final_message": True})
    assert "Paris" in (answer.choices[0].message.content or "")


def test_json(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "size": {"enum": ["small", "large"]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    try:
        answer = client.chat.completions.create(
            **GREEDY, messages=CAPITAL, max_tokens=64,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        )  # fmt: skip
    except openai.BadRequestError as error:
        pytest.skip(f"this build has no grammars: {error}")
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"city", "size"}
    assert value["size"] in ("small", "large")
