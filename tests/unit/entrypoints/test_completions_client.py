"""Plain completions with the official client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from scripted_server import Answer, FakeServer, serving

from bough.core.messages import unpack_ids


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        _strict_response_validation=True, base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


@pytest.fixture(scope="module")
def lenient(server: FakeServer) -> Iterator[openai.OpenAI]:
    """For what OpenAI itself sends against its client's types: null for a finish reason that is not there yet, and for
    the score of a prompt's first token."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_plain(client: openai.OpenAI, server: FakeServer) -> None:
    answer = client.completions.create(model="fake", prompt="Once")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)
    assert server.engine.seen[-1].sampling.max_new_tokens == 16


def test_stream(lenient: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(lenient.completions.create(model="fake", prompt="Once", stream=True, stream_options=options))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "Hello there."
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [b"ab"]), (["a", "bc"], [b"a", b"bc"]), ([97, 98], [b"ab"]), ([[97], [98, 99]], [b"a", b"bc"])],
)
def test_forms_of_prompts(client: openai.OpenAI, server: FakeServer, prompt: object, expected: list[bytes]) -> None:
    server.engine.seen.clear()
    answer = client.completions.create(model="fake", prompt=prompt, n=2)  # type: ignore[call-overload]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    sent = [bytes(unpack_ids(message.prompt).tolist()) for message in server.engine.seen]
    assert sorted(sent) == sorted([each for each in expected for _ in range(2)])
    assert answer.usage.prompt_tokens == sum(len(each) for each in expected)
    assert answer.usage.completion_tokens == 12 * len(answer.choices)


def test_batches_stream_side_by_side(lenient: openai.OpenAI) -> None:
    texts = dict.fromkeys(range(4), "")
    for chunk in lenient.completions.create(model="fake", prompt=["a", "b"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert set(texts.values()) == {"Hello there."}


def test_echo_with_logprobs(lenient: openai.OpenAI) -> None:
    answer = lenient.completions.create(model="fake", prompt="Hi", echo=True, logprobs=2, max_tokens=5)
    choice = answer.choices[0]
    assert choice.text == "HiHello there."
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert "".join(scores.tokens) == choice.text
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[:3] == [None, -1.5, -0.5]
    assert scores.text_offset == list(range(len(choice.text)))
    assert scores.top_logprobs is not None
    assert scores.top_logprobs[0] is None
    assert set(scores.top_logprobs[2]) == {"H", "H'"}


def test_streamed_echo_equals_whole(lenient: openai.OpenAI) -> None:
    tokens: list[str] = []
    offsets: list[int] = []
    text = ""
    for chunk in lenient.completions.create(model="fake", prompt="Hi", echo=True, logprobs=1, stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens or []
            offsets += chunk.choices[0].logprobs.text_offset or []
    whole = lenient.completions.create(model="fake", prompt="Hi", echo=True, logprobs=1).choices[0]
    assert text == whole.text
    assert whole.logprobs is not None
    assert tokens == whole.logprobs.tokens
    assert offsets == whole.logprobs.text_offset


def test_every_chunk_has_logprobs_where_they_are_asked_for(lenient: openai.OpenAI) -> None:
    chunks = list(lenient.completions.create(model="fake", prompt="Hi", logprobs=1, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.choices[0].logprobs is not None for chunk in chunks)


def test_a_prompt_alone_is_scored_without_the_token_that_would_follow(lenient: openai.OpenAI) -> None:
    whole = lenient.completions.create(model="fake", prompt="Hi", echo=True, logprobs=1, max_tokens=0)
    assert whole.choices[0].text == "Hi"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == ["H", "i"]
    (chunk,) = lenient.completions.create(model="fake", prompt="Hi", echo=True, logprobs=1, max_tokens=0, stream=True)
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.tokens == ["H", "i"]


def test_echo_of_token_ids(client: openai.OpenAI) -> None:
    assert client.completions.create(model="fake", prompt=[72, 105], echo=True).choices[0].text == "HiHello there."


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    scores = client.completions.create(model="fake", prompt="Hi", logprobs=0).choices[0].logprobs
    assert scores is not None
    assert scores.top_logprobs is None
    assert len(scores.tokens or []) == 12


def test_best_of_returns_the_likeliest() -> None:
    seen = iter(range(100))

    def script(*_: object) -> Answer:
        return Answer(pieces=["x" * (1 + next(seen))])

    with serving(script) as running:

        def score(message, ids, original=running.engine._score):  # type: ignore[no-untyped-def]
            return original(message, ids, [-1.0 / len(ids)] * len(ids))

        running.engine._scores = score  # type: ignore[method-assign]
        with openai.OpenAI(
            _strict_response_validation=True, base_url=f"{running.url}/v1", api_key="x", max_retries=0
        ) as client:
            answer = client.completions.create(model="fake", prompt="Hi", best_of=4, n=2)
    assert [choice.text for choice in answer.choices] == ["xxxx", "xxx"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1 + 2 + 3 + 4


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 8193}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"prompt": ["a"] * 129, "n": 64}, "n"),
    ],
)
def test_refused(client: openai.OpenAI, bad: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "fake", "prompt": "x", **bad})  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
