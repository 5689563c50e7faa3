"""`bough.Engine` with the real engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import bough
from bough.core.errors import InvalidRequest, PromptTooLong
from tests.waiting import until

from .conftest import ENDLESS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = ["The sea is", "One, two, three,", "def main():", "Il était une fois"]


def generate(engine: bough.Engine, *args: Any, **kwargs: Any) -> Any:
    return engine.generate(*args, **kwargs)


def live(engine: bough.Engine) -> int:
    state = engine.get_server_info()["internal_states"][0]
    return int(state["running"] + state["prefilling"] + state["queued"])


@pytest.mark.long
def test_the_default_model_makes_sense() -> None:
    with bough.Engine(context_length=512, max_total_tokens=1024) as engine:
        answer = generate(engine, "The capital of France is", {"temperature": 0, "max_new_tokens": 2})
        assert answer["text"].startswith(" Paris")
        assert engine.tokenizer is not None
        assert engine.tokenizer.chat_template is not None
        chat = engine.tokenizer.chat_template.render([{"role": "user", "content": "Say hello."}])
        reply = generate(engine, chat, {"temperature": 0, "max_new_tokens": 24})
        assert reply["meta_info"]["finish_reason"]["type"] in ("stop", "length")
        assert "<|im_end|>" not in reply["text"]
        assert reply["text"].isprintable() or "\n" in reply["text"]


def test_alone_in_a_batch_and_streamed_the_answer_is_the_same(tiny_engine: bough.Engine) -> None:
    alone = [generate(tiny_engine, prompt, GREEDY) for prompt in PROMPTS]
    batch = generate(tiny_engine, PROMPTS, GREEDY)
    assert [each["output_ids"] for each in batch] == [each["output_ids"] for each in alone]
    assert [each["text"] for each in batch] == [each["text"] for each in alone]
    for prompt, whole in zip(PROMPTS, alone, strict=True):
        streams = [list(generate(tiny_engine, prompt, GREEDY, stream=True)) for _ in range(5)]
        for pieces in streams:
            assert pieces[-1]["text"] == whole["text"]
            assert pieces[-1]["output_ids"] == whole["output_ids"]
        assert max(map(len, streams)) > 3, "it comes in pieces, unless it waits for somebody to read"
        meta = whole["meta_info"]
        assert meta["completion_tokens"] == 12
        assert meta["finish_reason"] == {"type": "length", "length": 12}


def test_ids_and_text_are_the_same_request(tiny_engine: bough.Engine) -> None:
    assert tiny_engine.tokenizer is not None
    for prompt in PROMPTS:
        ids = tiny_engine.tokenizer.encode(prompt)
        by_ids = generate(tiny_engine, input_ids=ids, sampling_params=GREEDY)
        assert by_ids["output_ids"] == generate(tiny_engine, prompt, GREEDY)["output_ids"]
        assert by_ids["meta_info"]["prompt_tokens"] == len(ids)


def test_a_second_time_the_prefix_is_cached(tiny_engine: bough.Engine) -> None:
    tiny_engine.flush_cache()
    prompt = list(range(300, 500))
    first = generate(tiny_engine, input_ids=prompt, sampling_params=GREEDY)
    second = generate(tiny_engine, input_ids=prompt, sampling_params=GREEDY)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] >= 128
    assert first["output_ids"] == second["output_ids"]
    salted = generate(tiny_engine, input_ids=prompt, sampling_params=GREEDY, cache_salt="other tenant")
    assert salted["meta_info"]["cached_tokens"] == 0
    assert salted["output_ids"] == first["output_ids"]
    tiny_engine.flush_cache()
    assert generate(tiny_engine, input_ids=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"] == 0


def test_a_stop_string_cuts_text_ids_and_usage(tiny_engine: bough.Engine) -> None:
    whole = generate(tiny_engine, PROMPTS[0], GREEDY)
    stop = whole["text"][len(whole["text"]) // 2 :][:4]
    for stream in (False, True):
        answer = generate(tiny_engine, PROMPTS[0], {**GREEDY, "stop": [stop]}, stream=stream)
        cut = list(answer)[-1] if stream else answer
        assert cut["text"] == whole["text"][: whole["text"].index(stop)]
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert cut["meta_info"]["completion_tokens"] == len(cut["output_ids"]) <= 12
        assert cut["output_ids"] == whole["output_ids"][: len(cut["output_ids"])]


def test_a_stop_token_ends_the_answer(tiny_engine: bough.Engine) -> None:
    whole = generate(tiny_engine, PROMPTS[1], GREEDY)
    token = whole["output_ids"][5]
    first = whole["output_ids"].index(token)
    cut = generate(tiny_engine, PROMPTS[1], {**GREEDY, "stop_token_ids": [token]})
    assert cut["output_ids"] == whole["output_ids"][: first + 1]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_n_and_seeds(tiny_engine: bough.Engine) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 8, "n": 3, "sampling_seed": 5, "ignore_eos": True}
    first, second = (generate(tiny_engine, PROMPTS[0], params) for _ in range(2))
    assert len(first) == 3
    assert [each["output_ids"] for each in first] == [each["output_ids"] for each in second]
    assert len({tuple(each["output_ids"]) for each in first}) == 3


def test_logprobs_have_their_shape(tiny_engine: bough.Engine) -> None:
    assert tiny_engine.tokenizer is not None
    ids = tiny_engine.tokenizer.encode("a few tokens here")
    answer = generate(
        tiny_engine, input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 4}, return_logprob=True,
        logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True,
    )  # fmt: skip
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None
    assert all(entry[0] <= 0 for entry in meta["input_token_logprobs"][1:])
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    assert "".join(entry[2] for entry in meta["output_token_logprobs"]) == answer["text"]
    for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 2
        assert top[0][:2] == pytest.approx(entry[:2])


async def test_async_side_by_side(tiny_engine: bough.Engine) -> None:
    expected = [generate(tiny_engine, prompt, GREEDY)["output_ids"] for prompt in PROMPTS]
    answers = await asyncio.gather(*(tiny_engine.async_generate(prompt, GREEDY) for prompt in PROMPTS))
    assert [each["output_ids"] for each in answers if isinstance(each, dict)] == expected
    stream: Any = await tiny_engine.async_generate(PROMPTS[0], GREEDY, stream=True)
    pieces = [piece async for piece in stream]
    assert pieces[-1]["output_ids"] == expected[0]


def test_leaving_a_stream_frees_its_memory(tiny_engine: bough.Engine) -> None:
    long = {"temperature": 0, "max_new_tokens": ENDLESS, "ignore_eos": True}
    stream = generate(tiny_engine, PROMPTS[0], long, stream=True)
    next(stream)
    assert live(tiny_engine) == 1
    stream.close()
    assert until(lambda: live(tiny_engine) == 0)


def test_abort_by_name(tiny_engine: bough.Engine) -> None:
    long = {"temperature": 0, "max_new_tokens": ENDLESS, "ignore_eos": True}
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(generate(tiny_engine, PROMPTS, long, rid="mine")))
    thread.start()
    assert until(lambda: live(tiny_engine) == 4)
    assert sum(tiny_engine.abort(f"mine_{i}") for i in range(4)) == 4
    thread.join(60)
    assert [each["meta_info"]["finish_reason"]["type"] for each in answers[0]] == ["abort"] * 4


def test_bad_requests_are_refused_and_the_engine_goes_on(tiny_engine: bough.Engine) -> None:
    with pytest.raises(PromptTooLong):
        generate(tiny_engine, input_ids=[5] * 33_000)
    with pytest.raises(InvalidRequest):
        generate(tiny_engine, input_ids=[10**6])
    with pytest.raises(InvalidRequest):
        generate(tiny_engine, "x", {"top_p": 2})
    assert generate(tiny_engine, "x", GREEDY)["output_ids"]


def test_information(tiny_engine: bough.Engine) -> None:
    info = tiny_engine.get_server_info()
    assert info["context_length"] == 32_768
    assert info["decisions"]
    assert until(lambda: live(tiny_engine) == 0)
    assert tiny_engine.get_model_info()["architectures"] == ["LlamaForCausalLM"]


def test_many_prompts_at_once(tiny_engine: bough.Engine) -> None:
    prompts = [[100 + i, 200 + i, 300 + i] for i in range(150)]
    answers = generate(tiny_engine, input_ids=prompts, sampling_params={**GREEDY, "max_new_tokens": 4})
    assert len(answers) == 150
    assert all(len(each["output_ids"]) == 4 for each in answers)
    some = generate(tiny_engine, input_ids=prompts[77], sampling_params={**GREEDY, "max_new_tokens": 4})
    assert some["output_ids"] == answers[77]["output_ids"]
