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
        return Answer(pieces=["a", ""], end=end, delay_s=0.1)

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


HAVE_A_WORD_FOR_IT = {"/v1/chat/completions", "/invocations", "/v1/completions", "/v1/responses", "/generate"}
"""Dialects in which an answer may end with "abort" (or "cancelled"): the others have no such reason."""


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize(("status", "code"), [(503, "engine_unavailable"), (499, "aborted")])
def test_a_cut_answer_is_never_passed_off_as_whole(path: str, status: int, code: str) -> None:
    """The engine has cut it off: at the end of draining (503), or because somebody aborted it by name (499)."""

    def cut(*_: object) -> Answer:
        end = End(reason="abort", message="the answer was cut off", status=status, code=code)
        return Answer(pieces=["a", ""], end=end, delay_s=0.05)

    with serving(cut) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post(path, json={**ROUTES[path], "stream": False})
        streamed = client.post(path, json={**ROUTES[path], "stream": True})
    if status == 499 and path in HAVE_A_WORD_FOR_IT:
        assert whole.status_code == 200
        assert '"abort"' in whole.text or '"cancelled"' in whole.text
        return
    assert whole.status_code == status
    assert "cut off" in whole.text
    last = [line for line in streamed.text.splitlines() if "{" in line][-1]
    assert streamed.status_code == 200
    assert "cut off" in last
    assert "error" in last
    for reason in ("end_turn", '"stop"', '"done":true', '"abort"', "cancelled"):
        assert reason not in last
