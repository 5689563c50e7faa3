"""Two API workers: whichever a connection meets, responses and sessions are where they were left."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import Server, body

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TRIES = 6
"""New connections: one in sixty-four times all of them meet the same worker, and nothing is tried then."""


def call(server: Server, method: str, path: str, **more: Any) -> httpx.Response:
    """Over a connection of its own."""
    return httpx.request(method, server.url + path, timeout=60, **more)


def respond(server: Server, text: str = "a", **fields: Any) -> dict[str, Any]:
    asked = {"input": text, "max_output_tokens": 4, "temperature": 0, **fields}
    reply = call(server, "POST", "/v1/responses", json=asked)
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def test_responses(steady: Server) -> None:
    kept = [respond(steady) for _ in range(2)]
    assert len({each["id"][5:7] for each in kept} | {"00", "01"}) == 2, "the id says who keeps it"
    for _ in range(TRIES):
        for each in kept:
            found = call(steady, "GET", f"/v1/responses/{each['id']}")
            assert found.json()["output"] == each["output"], found.text
            after = respond(steady, "b", previous_response_id=each["id"])
            items = call(steady, "GET", f"/v1/responses/{after['id']}/input_items", params={"order": "asc"}).json()[
                "data"
            ]
            assert len(items) == 2 + len(each["output"]), "the conversation so far, and what is new"
            item = each["output"][0]["id"]
            said = [{"type": "item_reference", "id": item}, {"role": "user", "content": "again"}]
            assert respond(steady, input=said)["status"] in ("completed", "incomplete")
    gone = call(steady, "DELETE", f"/v1/responses/{kept[0]['id']}")
    assert gone.json()["deleted"]
    for _ in range(TRIES):
        assert call(steady, "GET", f"/v1/responses/{kept[0]['id']}").status_code == 404
        assert call(steady, "GET", "/v1/responses/resp_" + "0" * 32).status_code == 404
        missing = {"input": "b", "previous_response_id": kept[0]["id"]}
        assert call(steady, "POST", "/v1/responses", json=missing).status_code == 404


def test_background_responses(steady: Server) -> None:
    """They are followed and ended from anywhere."""
    for _ in range(TRIES):
        made = respond(steady, background=True, max_output_tokens=20_000)
        url = f"{steady.url}/v1/responses/{made['id']}"
        with httpx.stream("GET", url, params={"stream": "true"}, timeout=60) as events:
            lines = events.iter_lines()
            assert next(line for line in lines if "output_text.delta" in line), "as they come"
            assert call(steady, "POST", f"/v1/responses/{made['id']}/cancel").json()["status"] == "cancelled"
            for _line in lines:
                pass


def test_sessions(steady: Server) -> None:
    for number in range(TRIES):
        session = call(steady, "POST", "/open_session", json={"session_id": f"here {number}"}).json()
        first = steady.ask(body("Once", rid=f"one {number}", session_params={"id": session})).json()
        used = first["meta_info"]["prompt_tokens"] + first["meta_info"]["completion_tokens"]
        more = {"id": session, "rid": f"one {number}"}
        second = steady.ask(body(" upon", rid=f"two {number}", session_params=more)).json()
        assert second["meta_info"]["prompt_tokens"] > used
        streamed = steady.ask(body(" a", session_params={**more, "rid": f"two {number}"}, stream=True))
        assert streamed.text.rstrip().endswith("[DONE]")
        assert call(steady, "POST", "/close_session", json={"session_id": session}).status_code == 200
        assert steady.ask(body(" upon", session_params=more)).status_code == 404
