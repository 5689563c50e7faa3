"""An error that comes when the stream is open says what the same error says as a whole response."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from scripted_server import Answer, serving

from bough.core.messages import End

SAID = "max_new_tokens is 9 and min_new_tokens is 8; response_format and prompt differ"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/invocations": CHAT,
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/messages": CHAT,
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"model": "fake", "prompt": "hi"},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 4}},
}
OWN = {
    "/v1/responses": "max_output_tokens",
    "/api/chat": "num_predict",
    "/api/generate": "num_predict",
    "/generate": "max_new_tokens",
}


def told(body: dict[str, Any]) -> tuple[str, Any]:
    error = body["response"]["error"] if "response" in body else body["error"]
    return (error, None) if isinstance(error, str) else (error["message"], error.get("param"))


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_the_words_are_the_routes(path: str) -> None:
    def fail(*_: object) -> Answer:
        end = End(reason="error", message=SAID, status=400, param="max_new_tokens")
        return Answer(pieces=["a", ""], end=end, delay_s=0.3)

    with serving(fail) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post(path, json={**ROUTES[path], "stream": False})
        assert whole.status_code == 400
        streamed = client.post(path, json={**ROUTES[path], "stream": True})
        assert streamed.status_code == 200
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if "{" in line]
    message, param = told(json.loads(lines[-1]))
    wanted, wanted_param = told(whole.json())
    own = OWN.get(path, "max_tokens")
    assert message == wanted
    assert own in message
    if path not in ("/v1/responses", "/v1/messages"):  # which have no place for a field's name
        assert param == wanted_param
