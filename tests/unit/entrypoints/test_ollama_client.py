"""Ollama's routes with its Python client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import CONTEXT, Answer, FakeServer, serving

from bough.config.concerns import ModelConfig
from bough.config.hf import checkpoint_of
from bough.core.messages import End, Generate, unpack_ids
from bough.entrypoints.http.ollama.routes import shown_size
from bough.entrypoints.served_model import num_parameters

ollama = pytest.importorskip("ollama")

USER: list[Any] = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
THINKS = {"reasoning_parser": "deepseek-r1", "tool_parser": "hermes"}


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[Any]:
    with ollama.Client(host=server.url) as made:
        yield made


def prompt_of(message: Generate) -> str:
    return bytes(each for each in unpack_ids(message.prompt).tolist() if each < 256).decode()


@pytest.mark.parametrize("model", ["fake", "fake:latest", "default", "default:latest"])
def test_chat(client: Any, model: str) -> None:
    made = client.chat(model=model, messages=USER)
    assert (made.message.role, made.message.content) == ("assistant", "Hello there.")
    assert (made.model, made.done, made.done_reason) == (model, True, "stop")
    assert made.eval_count == len("Hello there.")
    assert made.prompt_eval_count > 0
    assert made.total_duration > 0


def test_streams_are_lines_that_add_up(client: Any, server: FakeServer) -> None:
    told = list(client.chat(model="fake", messages=USER, stream=True))
    assert "".join(each.message.content for each in told) == "Hello there."
    assert [each.done for each in told] == [False, False, False, True]
    assert told[-1].eval_count == len("Hello there.")
    raw = httpx.post(f"{server.url}/api/chat", json={"model": "fake", "messages": USER})  # streams by default
    assert raw.headers["content-type"].startswith("application/x-ndjson")
    assert all(json.loads(each)["model"] == "fake" for each in raw.text.strip().split("\n"))


def test_generate(client: Any, server: FakeServer) -> None:
    assert client.generate(model="fake", prompt="Hi", system="Be brief.").response == "Hello there."
    assert prompt_of(server.engine.seen[-1]) == "system\nBe brief.\nuser\nHi\nassistant\n"
    assert "".join(each.response for each in client.generate(model="fake", prompt="Hi", stream=True)) == "Hello there."
    client.generate(model="fake", prompt="As it is", raw=True)
    assert prompt_of(server.engine.seen[-1]) == "As it is"
    before = len(server.engine.seen)
    assert client.generate(model="fake").done_reason == "load"
    assert client.chat(model="fake", keep_alive=0).done_reason == "unload"
    assert len(server.engine.seen) == before


def test_options(client: Any, server: FakeServer) -> None:
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "seed": 7,
               "num_predict": 9, "stop": ["END"], "num_ctx": 4096}  # fmt: skip
    client.chat(model="fake", messages=USER, options=options)
    sampling = server.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_new_tokens) == (1.1, 7, 9)
    assert sampling.stop == ("END",)
    client.chat(model="fake", messages=USER, options={"num_predict": -1, "top_k": 0, "seed": -1})
    seen = server.engine.seen[-1]
    assert (seen.sampling.top_k, seen.sampling.seed) == (-1, None)
    assert seen.sampling.max_new_tokens == CONTEXT - len(seen.prompt) // 4


def test_formats(client: Any, server: FakeServer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    client.chat(model="fake", messages=USER, format=schema)
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.source) == schema
    client.generate(model="fake", prompt="Hi", format="json")
    assert server.engine.seen[-1].sampling.grammar is not None


def test_logprobs(client: Any) -> None:
    made = client.chat(model="fake", messages=USER, logprobs=True, top_logprobs=2)
    assert len(made.logprobs) == len("Hello there.")
    assert len(made.logprobs[0].top_logprobs) == 2


def test_tools_and_thinking() -> None:
    pieces = ["<think>Hm", "m.</think>", "See: ", CALL[:30], CALL[30:]]
    with serving(Answer(pieces=pieces), served=THINKS) as running, ollama.Client(host=running.url) as client:
        made = client.chat(model="fake", messages=USER, tools=[ADD], think=True)
        assert made.message.thinking == "Hmm."
        assert made.message.content.strip() == "See:"
        assert [(c.function.name, c.function.arguments) for c in made.message.tool_calls] == [("add", {"a": 1})]
        told = list(client.chat(model="fake", messages=USER, tools=[ADD], think="high", stream=True))
        assert "".join(each.message.thinking or "" for each in told) == "Hmm."
        calls = [call for each in told for call in each.message.tool_calls or ()]
        assert [(c.function.name, c.function.arguments) for c in calls] == [("add", {"a": 1})]
        turns = [*USER, made.message, {"role": "tool", "tool_name": "add", "content": "two"}]
        client.chat(model="fake", messages=turns, tools=[ADD])
        assert prompt_of(running.engine.seen[-1]).endswith("\ntool\ntwo\nassistant\n")
        assert {"tools", "thinking"} <= set(client.show("fake").capabilities)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(134_515_008, "134.52M"), (494_032_768, "494.03M"), (8_030_261_248, "8.0B"), (3_000_000_000, "3B"), (23_000_000, "23M"),
     (1_543_714_304, "1.5B"), (22_713, "23K"), (900, "900"), (0, "")],
)  # fmt: skip
def test_a_models_size_is_written_as_ollama_writes_it(count: int, shown: str) -> None:
    with serving(served={"num_parameters": count}) as running, ollama.Client(host=running.url) as client:
        assert client.list().models[0].details.parameter_size == shown
        assert client.show("fake").modelinfo["general.parameter_count"] == (count or None)


def test_the_default_models_size() -> None:
    """Its weights are those of smollm2:135m, of which Ollama says the same."""
    checkpoint = checkpoint_of(ModelConfig())
    assert shown_size(num_parameters(checkpoint, {})) == "134.52M"


@pytest.mark.parametrize(
    ("path", "body", "way"),
    [
        ("/api/embed", {"model": "fake", "input": "a" * 5000, "truncate": False}, '"truncate": true'),
        ("/v1/embeddings", {"input": "a" * 5000}, '"truncate_prompt_tokens": -1'),
    ],
)
def test_texts_that_are_too_long_say_how_they_are_cut(path: str, body: dict[str, Any], way: str) -> None:
    pooling = {"task": "embed", "family": "Qwen3", "modes": ["last"], "width": 2}
    with serving(facts={"pooling": pooling}) as running:
        refused = httpx.post(running.url + path, json=body)
    error = refused.json()["error"]
    told = error if isinstance(error, str) else error["message"]
    assert refused.status_code == 400
    assert told.endswith(f"shorten it, or send {way} to have it cut")


def test_about_models(client: Any, server: FakeServer) -> None:
    assert [model.model for model in client.list().models] == ["fake"]
    shown = client.show("fake:latest")
    assert shown.modelinfo["fake.context_length"] == CONTEXT
    assert "im_start" in shown.template
    assert client.ps().models[0].context_length == CONTEXT
    assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", {"messages": USER}, 400),
        ("/api/chat", {"model": "other", "messages": USER}, 404),
        ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, 400),
        ("/api/chat", {"model": "fake", "messages": [{"role": "king", "content": "x"}]}, 400),
        ("/api/chat", {"model": "fake", "messages": USER, "format": "xml"}, 400),
        ("/api/chat", {"model": "fake", "messages": USER, "tools": [{"type": "function"}]}, 400),
        ("/api/chat", {"model": "fake", "messages": USER, "options": {"temperature": -1}}, 400),
        ("/api/chat", {"model": "fake", "messages": "Hi"}, 400),
        ("/api/generate", {"model": "fake", "prompt": "x", "images": ["aa"]}, 400),
        ("/api/generate", {"model": "fake", "prompt": "x", "suffix": "y"}, 400),
        ("/api/generate", {"model": "fake", "prompt": "x", "context": [1]}, 400),
        ("/api/show", {}, 400),
        ("/api/show", {"model": "other"}, 404),
    ],
)
def test_wrong_requests(server: FakeServer, path: str, body: dict[str, Any], status: int) -> None:
    refused = httpx.post(server.url + path, json=body)
    assert refused.status_code == status, refused.text
    assert isinstance(refused.json()["error"], str)


def test_errors_reach_the_client(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(model="other", messages=USER)
    assert refused.value.status_code == 404
    assert "there is no model" in refused.value.error
    answer = Answer(pieces=["one", "two"], delay_s=0.02, end=End(reason="error", message="it broke", status=500))
    with (
        serving(answer) as running,
        ollama.Client(host=running.url) as broken,
        pytest.raises(ollama.ResponseError, match="it broke"),
    ):
        list(broken.chat(model="fake", messages=USER, stream=True))
