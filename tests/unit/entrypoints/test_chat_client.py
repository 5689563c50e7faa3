"""Chat completions with the official client: what it parses is what we promised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted_server import EOS, Answer, FakeServer, serving

from bough.core.messages import unpack_ids
from bough.entrypoints.served_model import reasoning_end_ids

QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{# <tool_call> tools #}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {}}}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        _strict_response_validation=True, base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def test_plain_answer(client: openai.OpenAI, server: FakeServer) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello there."
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert choice.model_extra["matched_stop"] == EOS
    assert answer.usage is not None
    assert (
        answer.usage.prompt_tokens == len("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") - 12 * 2 - 10 + 3
    )
    assert answer.usage.completion_tokens == len("Hello there.")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="fake", messages=USER, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="fake", messages=USER, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_continuous_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(model="fake", messages=USER, stream=True, stream_options=options))  # type: ignore[call-overload]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {chunks[-1].usage.prompt_tokens}


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Hello there."}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 36
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="fake", messages=USER, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {"Hello there."}


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, logprobs=True, top_logprobs=2)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert "".join(item.token for item in scores.content) == "Hello there."
    assert scores.content[0].logprob == -0.5
    assert scores.content[0].bytes == [ord("H")]
    assert [item.logprob for item in scores.content[0].top_logprobs] == [-0.5, -1.5]
    plain = client.chat.completions.create(model="fake", messages=USER, logprobs=True)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.content is not None
    assert plain.choices[0].logprobs.content[0].top_logprobs == []
    streamed = client.chat.completions.create(model="fake", messages=USER, logprobs=True, top_logprobs=1, stream=True)
    items = [
        item for chunk in streamed if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content or []
    ]
    assert "".join(item.token for item in items) == "Hello there."


def test_parameters_reach_the_engine(client: openai.OpenAI, server: FakeServer) -> None:
    server.engine.seen.clear()
    client.chat.completions.create(
        model="default", messages=USER, temperature=0.25, top_p=0.5, seed=11, stop=["a", "b"], max_tokens=None,
        max_completion_tokens=33, frequency_penalty=0.5, presence_penalty=-0.5, logit_bias={"65": -100},
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True,
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
                    "stop_token_ids": [5], "priority": 3, "rid": "mine", "cache_salt": "s", "no_stop_trim": True,
                    "skip_special_tokens": False},
    )  # fmt: skip
    sent = server.engine.seen[-1]
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 7, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (11, ("a", "b"), (5,))
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (33, 2)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert sampling.logit_bias == {65: -100.0}
    assert (sent.priority, sent.rid) == (3, "mine")
    assert sent.namespace
    assert sent.eos_ids == ()
    assert sent.text is not None
    assert (sent.text.no_stop_trim, sent.text.skip_special_tokens) == (True, False)


def test_without_max_tokens_the_context_is_filled(client: openai.OpenAI, server: FakeServer) -> None:
    client.chat.completions.create(model="fake", messages=USER)
    sent = server.engine.seen[-1]
    assert sent.sampling.max_new_tokens == 4096 - len(sent.prompt) // 4


def test_temperature_zero_is_legal(client: openai.OpenAI, server: FakeServer) -> None:
    client.chat.completions.create(model="fake", messages=USER, temperature=0)
    assert server.engine.seen[-1].sampling.greedy


def test_roles_and_parts(client: openai.OpenAI, server: FakeServer) -> None:
    client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ],
    )
    prompt = server.engine.engine_client.tokenizer.decode(list(_ids(server)), False)  # type: ignore[union-attr]
    assert prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


def test_continue_final_message(client: openai.OpenAI, server: FakeServer) -> None:
    client.chat.completions.create(
        model="fake", messages=[*USER, {"role": "assistant", "content": "Sure, I"}],
        extra_body={"continue_final_message": True},
    )  # fmt: skip
    prompt = server.engine.engine_client.tokenizer.decode(list(_ids(server)), False)  # type: ignore[union-attr]
    assert prompt.endswith("<|im_start|>assistant\nSure, I")


def test_response_formats(client: openai.OpenAI, server: FakeServer) -> None:
    client.chat.completions.create(model="fake", messages=USER, response_format={"type": "json_object"})
    assert server.engine.seen[-1].sampling.grammar.kind == "json"  # type: ignore[union-attr]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model="fake", messages=USER,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )  # fmt: skip
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.source) == schema
    client.chat.completions.create(model="fake", messages=USER, response_format={"type": "text"})
    assert server.engine.seen[-1].sampling.grammar is None


def test_token_ids_in_and_out(client: openai.OpenAI) -> None:
    extra = {"input_ids": [72, 105], "return_token_ids": True, "return_prompt_token_ids": True}
    answer = client.chat.completions.create(model="fake", messages=[], extra_body=extra)
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == [72, 105]
    assert answer.choices[0].model_extra["token_ids"] == list(b"Hello there.")


# -- parsers --------------------------------------------------------------------------------------


def _thinks(message, prompt: str) -> Answer:  # type: ignore[no-untyped-def]
    if "<tools>" in prompt or (message.text and message.text.tool_parser):
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        more = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
        return Answer(pieces=[*"<think>hm</think>", "Let me look. ", *call, "\n", *more])
    return Answer(pieces=["<th", "ink>", "two ", "and two", "</think>", "\n\nFour", "."])


@pytest.fixture(scope="module")
def thinker() -> Iterator[FakeServer]:
    with serving(_thinks, template=QWEN3, served={"reasoning_parser": "qwen3", "tool_parser": "hermes"}) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(thinker: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        _strict_response_validation=True, base_url=f"{thinker.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def test_reasoning_is_separate(thinking: openai.OpenAI) -> None:
    message = thinking.chat.completions.create(model="fake", messages=USER).choices[0].message
    assert message.content == "\n\nFour."
    assert message.model_extra["reasoning_content"] == "two and two"
    said, thought = "", ""
    for chunk in thinking.chat.completions.create(model="fake", messages=USER, stream=True):
        said += chunk.choices[0].delta.content or ""
        thought += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or ""
    assert (said, thought) == ("\n\nFour.", "two and two")


def test_reasoning_content_can_be_read_where_there_is_none(thinking: openai.OpenAI) -> None:
    """As with SGLang: people read the attribute of every chunk, and the client raises if it is missing."""
    for chunk in thinking.chat.completions.create(model="fake", messages=USER, stream=True, logprobs=True):
        for choice in chunk.choices:
            assert choice.delta.reasoning_content is None or choice.delta.content is None  # type: ignore[attr-defined]
    for chunk in thinking.chat.completions.create(model="fake", messages=USER, stream=True):
        for choice in chunk.choices:
            assert choice.delta.reasoning_content is None or choice.delta.content is None  # type: ignore[attr-defined]
    off = thinking.chat.completions.create(model="fake", messages=USER, reasoning_effort="none")
    assert hasattr(off.choices[0].message, "reasoning_content")
    with thinking.chat.completions.stream(model="fake", messages=USER) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.reasoning_content == "two and two"  # type: ignore[attr-defined]


def test_reasoning_has_both_of_its_names(thinking: openai.OpenAI, client: openai.OpenAI) -> None:
    for asked, expected in ((thinking, "two and two"), (client, None)):
        message = asked.chat.completions.create(model="fake", messages=USER).choices[0].message
        assert message.reasoning_content == message.reasoning == expected  # type: ignore[attr-defined]
        for options in ({}, {"logprobs": True}):
            thought = ""
            for chunk in asked.chat.completions.create(model="fake", messages=USER, stream=True, **options):  # type: ignore[call-overload]
                delta = chunk.choices[0].delta
                assert delta.reasoning_content == delta.reasoning
                thought += delta.reasoning or ""
            assert thought == (expected or "")


def test_reasoning_comes_back_under_either_name() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    with serving(template=template) as running:
        for name in ("reasoning", "reasoning_content"):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "why"}]
            body = {"model": "fake", "messages": messages}
            assert httpx.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200
            assert bytes(unpack_ids(running.engine.seen[-1].prompt).tolist()) == b"|a;why|b;"


def test_the_operators_settings_of_the_template_stand_in_for_the_clients() -> None:
    template = "{{ enable_thinking }}|{{ style }};"
    with serving(
        template=template, served={"template_defaults": {"enable_thinking": False, "style": "dry"}}
    ) as running:
        for given, rendered in (({}, b"False|dry;"), ({"style": "wild"}, b"False|wild;")):
            body = {"model": "fake", "messages": USER, "chat_template_kwargs": given}
            assert httpx.post(f"{running.url}/v1/chat/completions", json=body).status_code == 200
            assert bytes(unpack_ids(running.engine.seen[-1].prompt).tolist()) == rendered


def test_streams_may_always_report_usage() -> None:
    with serving(stream_usage=True) as running:
        for path, body in (
            ("chat/completions", {"messages": USER}),
            ("completions", {"prompt": "Hi"}),
        ):
            lines = httpx.post(f"{running.url}/v1/{path}", json={"model": "fake", "stream": True, **body}).text
            last = json.loads(lines.strip().split("\n\n")[-2].removeprefix("data: "))
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)


def test_reasoning_stays_in_the_text_if_asked(thinking: openai.OpenAI) -> None:
    answer = thinking.chat.completions.create(model="fake", messages=USER, extra_body={"separate_reasoning": False})
    assert answer.choices[0].message.content == "<think>two and two</think>\n\nFour."


def test_reasoning_effort_none_turns_thinking_off(thinking: openai.OpenAI, thinker: FakeServer) -> None:
    thinking.chat.completions.create(model="fake", messages=USER, reasoning_effort="none")
    prompt = thinker.engine.engine_client.tokenizer.decode(list(_ids(thinker)), False)  # type: ignore[union-attr]
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_a_schema_waits_for_the_end_of_reasoning(thinking: openai.OpenAI, thinker: FakeServer) -> None:
    thinking.chat.completions.create(model="fake", messages=USER, response_format={"type": "json_object"})
    assert thinker.engine.seen[-1].sampling.grammar.after_reasoning is True  # type: ignore[union-attr]
    thinking.chat.completions.create(
        model="fake", messages=USER, response_format={"type": "json_object"}, reasoning_effort="none"
    )
    assert thinker.engine.seen[-1].sampling.grammar.after_reasoning is False  # type: ignore[union-attr]


HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_a_schema_waits_for_the_final_message_of_harmony() -> None:
    """Whatever is said before it, and whether anything is: the prompt itself ends with half of what announces it."""
    parsers = {"reasoning_parser": "gpt-oss", "tool_parser": "gpt-oss"}
    with serving(_thinks, template=HARMONY, served=parsers) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        client.chat.completions.create(model="fake", messages=USER, response_format={"type": "json_object"})
        asked = running.engine.seen[-1]
        assert asked.sampling.grammar.after_reasoning is True  # type: ignore[union-attr]
        tokenizer = running.engine.engine_client.tokenizer
        assert tokenizer is not None
        announced = "<|end|><|start|>assistant<|channel|>final<|message|>"
        assert tokenizer.decode(list(reasoning_end_ids("gpt-oss", tokenizer)), False) == announced
        # Calls are messages before the final one: what they are held to holds from the start.
        client.chat.completions.create(model="fake", messages=USER, tools=[WEATHER], tool_choice="required")  # type: ignore[list-item]
        assert running.engine.seen[-1].sampling.grammar.after_reasoning is False  # type: ignore[union-attr]


def test_tool_calls(thinking: openai.OpenAI) -> None:
    answer = thinking.chat.completions.create(model="fake", messages=USER, tools=[WEATHER, CLOCK])  # type: ignore[list-item]
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    names = [call.function.name for call in choice.message.tool_calls]  # type: ignore[union-attr]
    assert names == ["get_weather", "get_time"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}  # type: ignore[union-attr]
    assert json.loads(choice.message.tool_calls[1].function.arguments) == {}  # type: ignore[union-attr]
    assert choice.message.content.strip() == "Let me look."  # type: ignore[union-attr]


def test_streamed_tool_calls_equal_whole_ones(thinking: openai.OpenAI) -> None:
    with thinking.chat.completions.stream(model="fake", messages=USER, tools=[WEATHER, CLOCK]) as stream:  # type: ignore[list-item]
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    whole = thinking.chat.completions.create(model="fake", messages=USER, tools=[WEATHER, CLOCK]).choices[0]  # type: ignore[list-item]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert final.message.content == whole.message.content
    streamed = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or []]
    assert streamed == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]  # type: ignore[union-attr]


def test_one_call_at_most(thinking: openai.OpenAI) -> None:
    answer = thinking.chat.completions.create(
        model="fake",
        messages=USER,
        tools=[WEATHER, CLOCK],
        parallel_tool_calls=False,  # type: ignore[list-item]
    )
    assert len(answer.choices[0].message.tool_calls or []) == 1


def test_tool_choice_none_offers_nothing(thinking: openai.OpenAI, thinker: FakeServer) -> None:
    thinking.chat.completions.create(model="fake", messages=USER, tools=[WEATHER], tool_choice="none")  # type: ignore[list-item]
    text = thinker.engine.seen[-1].text
    assert text is not None
    assert text.tool_parser is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_forced_calls_are_constrained(thinking: openai.OpenAI, thinker: FakeServer, choice: object) -> None:
    thinking.chat.completions.create(model="fake", messages=USER, tools=[WEATHER, CLOCK], tool_choice=choice)  # type: ignore[call-overload]
    grammar = thinker.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    tags = json.loads(grammar.source)["format"]["tags"]
    assert len(tags) == (2 if choice == "required" else 1)


@pytest.mark.parametrize("said", ["<tool_ca", "<tool_call>", '<tool_call>\n{"name": "get_we'])
def test_a_forced_call_cut_before_its_name_leaves_no_content(said: str) -> None:
    with serving(lambda message, prompt: Answer(pieces=list(said), reason="length", matched=None)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": "fake", "messages": USER, "tools": [WEATHER], "tool_choice": "required"}
        choice = client.chat.completions.create(**asked).choices[0]
        assert (choice.message.content or "", choice.message.tool_calls or []) == ("", [])
        assert choice.finish_reason == "length"
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
        assert chunks[-1].finish_reason == "length"


def test_tools_for_a_template_without_a_place_for_them(server: FakeServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="fake", messages=USER, tools=[WEATHER])  # type: ignore[list-item]
    prompt = server.engine.engine_client.tokenizer.decode(list(_ids(server)), False)  # type: ignore[union-attr]
    assert prompt.startswith("<|im_start|>system\n")
    assert "get_weather" in prompt
    assert server.engine.seen[-1].text.tool_parser == "hermes"  # type: ignore[union-attr]


def _ids(server: FakeServer) -> list[int]:
    from bough.core.messages import unpack_ids

    return unpack_ids(server.engine.seen[-1].prompt).tolist()
