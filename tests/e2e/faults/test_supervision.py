"""Processes that die or hang under `--supervise`: others take their place, and what kills them is refused."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import psutil
import pytest
from serving import Server, body

from tests.waiting import gone, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_supervision_restarts_and_quarantines() -> None:
    """The engine dies whenever it sees token 777. After two deaths that request is refused, and others are served."""
    with Server("--supervise", step_faults="kill@TOKEN:777") as server:
        deadly, harmless = body([5, 777, 9]), body([5, 6, 7])
        assert server.ask(harmless).status_code == 200
        for crash in (1, 2):
            pid = server.children["engine"]
            assert server.ask(deadly).status_code == 503
            assert gone(pid, 60)
            status = server.status("/health")
            assert status in (0, 503) or server.children["engine"] != pid, "only another engine is well"
            assert until(lambda: server.status("/readyz") == 200, 120), server.log()
            assert server.process.poll() is None
            assert server.log().count("starting again") == crash
        refused = server.ask(deadly)
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "quarantined"
        assert server.ask(harmless).status_code == 200
        other = server.ask(body([5, 777, 10]))  # another request may still be tried
        assert other.status_code == 503
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(120) in (0, 1)


@pytest.mark.parametrize("names", [("engine",), pytest.param(("engine", "detokenizer"), marks=pytest.mark.long)])
def test_stuck_processes_are_replaced_under_supervision(names: tuple[str, ...]) -> None:
    with Server("--supervise", "--watchdog-timeout", "4", "--admin-api-key", "b0ss") as server:

        def logging(**fields: Any) -> dict[str, Any]:
            headers = {"authorization": "Bearer b0ss"}
            reply = httpx.post(f"{server.url}/configure_logging", json=fields, headers=headers, timeout=60)
            told: dict[str, Any] = reply.json()
            return told

        assert logging(log_level="debug", log_requests=True)["success"]
        for name in names:
            stuck = server.children[name]
            os.kill(stuck, signal.SIGSTOP)
            assert gone(stuck, 60)
            assert until(lambda: server.status("/readyz") == 200, 120), server.log()
            assert server.ask(body()).status_code == 200
            assert f"the {name} had not moved" in server.log()
            kept = logging()
            assert (kept["log_level"], kept["log_requests"]) == ("debug", True), "as it was changed before"


@pytest.mark.long
def test_a_stuck_api_worker_is_replaced_under_supervision() -> None:
    """The others go on meanwhile: it is the only one whose clients notice."""
    with Server("--supervise", "--watchdog-timeout", "4", "--api-workers", "2") as server:
        children = server.children
        stuck = children["entrypoints.http"]
        assert until(lambda: psutil.Process(stuck).net_connections("inet"), 60), "it listens, and is past its start"
        os.kill(stuck, signal.SIGSTOP)
        assert gone(stuck, 60)
        assert until(lambda: server.children.get("entrypoints.http", stuck) != stuck, 60), server.log()
        assert until(lambda: server.status("/readyz") == 200, 120), server.log()
        assert [server.ask(body()).status_code for _ in range(8)] == [200] * 8
        assert {name: pid for name, pid in server.children.items() if name != "entrypoints.http"} == {
            name: pid for name, pid in children.items() if name != "entrypoints.http"
        }, "nothing else was started again"
