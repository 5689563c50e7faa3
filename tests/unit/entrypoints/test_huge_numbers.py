"""Numbers beyond what a machine word holds: refused with 400 or taken, never 5xx, and what is sent on can be sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from scripted_server import FakeServer, serving

USER = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "Hi"},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 3, "messages": USER},
    "/api/chat": {"messages": USER},
    "/api/generate": {"prompt": "x"},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/embeddings": {"input": "x"},
    "/v1/score": {"query": "a", "items": ["b"]},
    "/v1/classify": {"input": "x"},
}
FIELDS = (
    "priority", "seed", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "top_k",
    "top_n", "top_p", "temperature", "truncate_prompt_tokens", "top_logprobs", "logprobs", "deadline_ms", "thinking_budget",
    "dimensions", "num_predict",
)  # fmt: skip
NATIVE = ("seed", "max_new_tokens", "min_new_tokens", "top_k", "n", "temperature", "frequency_penalty")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("number", [2**63, -(2**70), 10**4000, 1e300], ids=["2^63", "-2^70", "10^4000", "1e300"])
def test_huge_numbers(server: FakeServer, path: str, number: float) -> None:
    asked: list[dict[str, Any]] = [{name: number} for name in FIELDS]
    if path == "/generate":
        asked += [{"sampling_params": {name: number}} for name in NATIVE]
    if path.startswith("/api/"):
        asked += [{"options": {name: number}} for name in ("seed", "top_k", "num_predict", "num_ctx")]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for fields in asked:
            before = len(server.engine.seen)
            answer = client.post(path, json={**BODIES[path], **fields})
            assert answer.status_code < 500, (fields, answer.text)
            for message in server.engine.seen[before:]:
                assert msgspec.msgpack.encode(message)
