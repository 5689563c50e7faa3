"""Sessions over HTTP and gRPC: what reaches the engine is the whole prompt."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from scripted_server import Answer, FakeServer, endless, serving

from bough.core.messages import unpack_ids


def ids_of(running: FakeServer) -> bytes:
    return bytes(unpack_ids(running.engine.seen[-1].prompt).tolist())


def generate(running: FakeServer, text: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/generate", json={"text": text, **fields})


def test_a_session() -> None:
    with serving(Answer(pieces=["!"])) as running:
        session = httpx.post(f"{running.url}/open_session", json={"capacity_of_str_len": 1000}).json()
        assert isinstance(session, str)

        def turn(text: str, **where: Any) -> str:
            answer = generate(running, text, session_params={"id": session, **where})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["meta_info"]["id"])

        first = turn("one")
        second = turn("two", rid=first)
        assert ids_of(running) == b"one!two"
        turn("three", rid=first)
        assert ids_of(running) == b"one!three"
        turn("four", rid=second, offset=4, replace=True)
        assert ids_of(running) == b"one!four"
        turn("five", rid=second, drop_previous_output=True)
        assert ids_of(running) == b"one!twofive"
        streamed = generate(running, "six", session_params={"id": session, "rid": second}, stream=True, rid="mine")
        assert streamed.status_code == 200
        turn("seven", rid="mine")
        assert ids_of(running) == b"one!two!six!seven"
        assert httpx.post(f"{running.url}/close_session", json={"session_id": session}).status_code == 200
        assert generate(running, "a", session_params={"id": session}).status_code == 404


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"session_params": {"id": "none"}}, 404),
        ({"session_params": {"id": "open", "rid": "none"}}, 404),
        ({"session_params": {}}, 400),
        ({"session_params": {"id": "open", "what": 1}}, 400),
        ({"session_params": {"id": "open", "offset": "x"}}, 400),
        ({"session_params": "open"}, 400),
        ({"session_params": {"id": "open"}, "text": ["a", "b"]}, 400),
        ({"session_params": {"id": "open"}, "sampling_params": {"n": 2}}, 400),
    ],
)
def test_wrong_params(server: FakeServer, fields: dict[str, Any], status: int) -> None:
    httpx.post(f"{server.url}/open_session", json={"session_id": "open"})
    refused = httpx.post(f"{server.url}/generate", json={"text": "a", **fields})
    assert refused.status_code == status, refused.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"session_id": "twice"}, 409),
        ({"capacity_of_str_len": 0}, 400),
        ({"timeout": -1}, 400),
        ({"streaming": True}, 400),
        ({"session_id": "x" * 300}, 400),
    ],
)
def test_wrong_openings(server: FakeServer, body: dict[str, Any], status: int) -> None:
    httpx.post(f"{server.url}/open_session", json={"session_id": "twice"})
    assert httpx.post(f"{server.url}/open_session", json=body).status_code == status


def test_tenants_are_apart() -> None:
    with serving(api_key=["mine=a", "theirs=b"]) as running:
        mine, theirs = ({"authorization": f"Bearer {each}"} for each in "ab")
        session = httpx.post(f"{running.url}/open_session", json={}, headers=mine).json()
        body = {"text": "a", "session_params": {"id": session}}
        assert httpx.post(f"{running.url}/generate", json=body, headers=mine).status_code == 200
        assert httpx.post(f"{running.url}/generate", json=body, headers=theirs).status_code == 404
        closing = {"json": {"session_id": session}}
        assert httpx.post(f"{running.url}/close_session", headers=theirs, **closing).status_code == 404


def test_aborted_requests_keep_what_they_said() -> None:
    with serving(endless()) as running:
        session = httpx.post(f"{running.url}/open_session", json={}).json()
        with httpx.stream(
            "POST",
            f"{running.url}/generate",
            json={"text": "a", "stream": True, "rid": "one", "session_params": {"id": session}},
        ) as response:
            lines = response.iter_lines()
            next(lines)
            busy = generate(running, "b", session_params={"id": session, "rid": "one"})
            assert busy.status_code == 409
            httpx.post(f"{running.url}/abort_request", json={"rid": "one"})
            for _ in lines:
                pass
        body = {"text": "b", "sampling_params": {"max_new_tokens": 1}, "session_params": {"id": session, "rid": "one"}}
        with httpx.stream("POST", f"{running.url}/generate", json={**body, "stream": True}) as response:
            next(response.iter_lines())
        assert ids_of(running).startswith(b"ax")
        assert ids_of(running).endswith(b"xb")
