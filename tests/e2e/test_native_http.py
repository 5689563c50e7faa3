"""Native routes of a real server with the default model."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from default_server import default_server

from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(base_url=default_server(), timeout=120) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_generate(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"text": "The capital of France is", "sampling_params": GREEDY}).json()
    assert "Paris" in answer["text"]
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 12
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert http.post("/detokenize", json={"tokens": answer["output_ids"]}).json()["text"] == answer["text"]


def test_streams_grow_to_the_whole(http: httpx.Client) -> None:
    body = {"text": "The capital of France is", "sampling_params": GREEDY}
    whole = http.post("/generate", json=body).json()["text"]
    pieces = 0
    for _ in range(5):  # what nobody has read yet comes together with what follows
        told = events(http.post("/generate", json={**body, "stream": True}))
        texts = [each["text"] for each in told]
        assert all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False))  # noqa: RUF007
        assert texts[-1] == whole
        pieces = max(pieces, len(told))
    assert pieces > 2


def test_batches_equal_singles(http: httpx.Client) -> None:
    prompts = ["The capital of France is", "Two plus two is", "Once upon a time"]
    together = http.post("/generate", json={"text": prompts, "sampling_params": GREEDY}).json()
    assert len(together) == 3
    assert all(answer["text"] for answer in together)
    assert "Paris" in together[0]["text"]


def test_ids_in_equal_text_in(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    by_ids = http.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY}).json()
    by_text = http.post("/generate", json={"text": "The capital of France is", "sampling_params": GREEDY}).json()
    assert by_ids["output_ids"] == by_text["output_ids"]
    assert by_ids["meta_info"]["prompt_tokens"] == len(ids)


def test_prompt_scores(http: httpx.Client) -> None:
    body = {
        "text": "The quick brown fox", "sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True,
        "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True,
    }  # fmt: skip
    meta = http.post("/generate", json=body).json()["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert "".join(entry[2] for entry in meta["input_token_logprobs"]) == "The quick brown fox"
    assert len(meta["output_top_logprobs"][0]) == 2


def test_facts(http: httpx.Client) -> None:
    model = http.get("/model_info").json()
    assert model["served_model_name"] == "SmolLM2-135M-Instruct"
    assert model["role_affixes"]["assistant"] == ["<|im_start|>assistant\n", "<|im_end|>\n"]
    server = http.get("/server_info").json()
    assert server["context_length"] == 8192
    assert server["engine"]["kv_tokens"] >= 8192
    for path in ("/livez", "/readyz", "/health", "/health_generate"):
        assert http.get(path).status_code == 200


def test_flushing_forgets_prefixes(http: httpx.Client) -> None:
    body = {"text": "forget me " * 40, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    http.post("/generate", json=body)
    assert http.post("/generate", json=body).json()["meta_info"]["cached_tokens"] > 0
    assert http.post("/flush_cache?timeout=60").status_code == 200
    assert http.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 0


def test_abort_by_id(http: httpx.Client) -> None:
    body = {"text": "Count:", "rid": "long-one", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    found: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(httpx.post(f"{default_server()}/generate", json=body, timeout=120))
    )
    thread.start()
    aborted = until(lambda: http.post("/abort_request", json={"rid": "long-one"}).json()["aborted"])
    thread.join(60)
    assert aborted == 1
    assert found[0].json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_leaves_frees_its_place(http: httpx.Client) -> None:
    body = {"text": "Count:", "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    with http.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data:"):
                break
    info = lambda: http.get("/server_info").json()
    assert until(lambda: info()["admission"]["requests"] == 0, 20)
    assert until(lambda: info()["num_running"] == 0, 20), "the engine goes on computing for nobody"
