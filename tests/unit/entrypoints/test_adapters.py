"""How requests name adapters: as a model, behind a model's name, and as `lora_path`, through every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted_server import FakeServer, serving

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    names = ["mine", "org/yours:v1.2"]
    with serving(facts={"adapters": names}, served={"adapters": tuple(names)}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ({"model": "fake"}, 0),
        ({}, 0),
        ({"model": "mine"}, 1),
        ({"model": "fake:mine"}, 1),
        ({"model": "default:mine"}, 1),
        ({"model": "org/yours:v1.2"}, 2),
        ({"lora_path": "mine"}, 1),
        ({"model": "fake", "lora_path": "org/yours:v1.2"}, 2),
        ({"model": "mine", "lora_path": "org/yours:v1.2"}, 1),
        ({"lora_path": None}, 0),
    ],
)
def test_openai_names(server: FakeServer, http: httpx.Client, body: dict[str, Any], number: int) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": USER, **body})
    assert answer.status_code == 200
    assert answer.json()["model"] == body.get("model", "fake")
    assert server.engine.seen[-1].adapter == number
    assert http.post("/v1/completions", json={"prompt": "Hi", **body}).status_code == 200
    assert server.engine.seen[-1].adapter == number


def test_other_apis(server: FakeServer, http: httpx.Client) -> None:
    for path, body in (
        ("/v1/responses", {"model": "mine", "input": "Hi"}),
        ("/v1/messages", {"model": "fake:mine", "max_tokens": 4, "messages": USER}),
        ("/api/chat", {"model": "mine:latest", "messages": USER, "stream": False}),
        ("/api/generate", {"model": "mine", "prompt": "Hi", "stream": False}),
        ("/generate", {"text": "Hi", "lora_path": "mine"}),
    ):
        assert http.post(path, json=body).status_code == 200, path
        assert server.engine.seen[-1].adapter == 1, path


def test_prompts_of_a_batch_may_differ(server: FakeServer, http: httpx.Client) -> None:
    names = [None, "mine", "org/yours:v1.2"]
    assert http.post("/generate", json={"text": ["a", "b", "c"], "lora_path": names}).status_code == 200
    assert sorted(each.adapter for each in server.engine.seen[-3:]) == [0, 1, 2]
    assert http.post("/generate", json={"text": ["a", "b"], "lora_path": "mine"}).status_code == 200
    assert [each.adapter for each in server.engine.seen[-2:]] == [1, 1]


def test_models_are_listed_with_their_parent(http: httpx.Client) -> None:
    cards = {card["id"]: card["parent"] for card in http.get("/v1/models").json()["data"]}
    assert cards == {"fake": None, "mine": "fake", "org/yours:v1.2": "fake"}
    assert http.get("/v1/models/mine").json()["parent"] == "fake"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"messages": USER, "model": "fake:other"}, 404, "model"),
        ("/v1/chat/completions", {"messages": USER, "lora_path": "other"}, 400, "lora_path"),
        ("/generate", {"text": "Hi", "lora_path": "/etc/passwd"}, 400, "lora_path"),
        ("/generate", {"text": "Hi", "lora_path": 3}, 400, "lora_path"),
        ("/generate", {"text": "Hi", "lora_path": ["mine"]}, 400, "lora_path"),
    ],
)
def test_adapters_that_are_not_there(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
