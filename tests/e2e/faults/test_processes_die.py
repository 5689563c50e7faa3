"""Processes that are killed, stopped and asked to end: who notices, how fast, and what is left."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import LONG, Server, body, gone, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Client(threading.Thread):
    """Asks in the background."""

    def __init__(self, server: Server, request: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.status = 0
        self.json: Any = None
        self._server = server
        self._request = request
        self.start()

    def run(self) -> None:
        try:
            answer = self._server.ask(self._request)
            self.status, self.json = answer.status_code, answer.json()
        except httpx.HTTPError:
            self.status = -1


def test_a_killed_engine_is_noticed_told_and_recorded(tmp_path: Path) -> None:
    with Server("--crash-dir", str(tmp_path / "crashes")) as server:
        secret = "a very private thought"
        client = Client(server, body(secret, tokens=3500, rid="mine"))
        assert until(server.live, 10)
        children = server.children
        began = time.monotonic()
        os.kill(children["engine"], signal.SIGKILL)
        assert until(lambda: server.status("/health") == 503, 2), "503 within two seconds"
        assert time.monotonic() - began < 2
        client.join(10)
        assert client.status == 503
        assert "error" in client.json
        assert server.process.wait(10) == 1
        assert time.monotonic() - began < 10
        assert all(until(lambda pid=pid: gone(pid), 5) for pid in children.values())
        last = server.log().strip().splitlines()[-3:]
        assert last[0].startswith("error: the engine process was killed")
        assert last[1].startswith("  why:")
        assert last[2].startswith("  fix:")
        (bundle,) = (tmp_path / "crashes").iterdir()
        assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
        text = bundle.read_text()
        told = json.loads(text)
        assert told["process"] == "engine"
        assert told["last_steps"], "what was running is on record"
        assert told["last_steps"][-1]["rows"] == 1
        assert told["settings"]["max_total_tokens"] == "16384"
        assert secret not in text
        assert "api_key" not in told["settings"]


def test_supervision_restarts_and_quarantines(tmp_path: Path) -> None:
    """The engine dies whenever it sees token 777. After two deaths that request is refused, and others are served."""
    environ = {"BOUGH_FAULTS": "kill@TOKEN:777"}
    with Server("--supervise", environ=environ) as server:
        deadly, harmless = body([5, 777, 9]), body([5, 6, 7])
        assert server.ask(harmless).status_code == 200
        for crash in (1, 2):
            pid = server.children["engine"]
            assert server.ask(deadly).status_code == 503
            assert until(lambda pid=pid: gone(pid), 5)
            assert server.status("/health") in (0, 503)
            assert until(lambda: server.status("/readyz") == 200, 60), server.log()
            assert server.process.poll() is None
            assert server.log().count("starting again") == crash
        refused = server.ask(deadly)
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "quarantined"
        assert server.ask(harmless).status_code == 200
        other = server.ask(body([5, 777, 10]))  # another request may still be tried
        assert other.status_code == 503
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) in (0, 1)


def test_a_stopped_engine_is_found_by_the_watchdog_and_comes_back() -> None:
    with Server("--watchdog-timeout", "1") as server:
        engine = server.children["engine"]
        assert server.status() == 200
        os.kill(engine, signal.SIGSTOP)
        began = time.monotonic()
        assert until(lambda: server.status() == 503, 5)
        assert time.monotonic() - began < 3
        assert server.status("/livez") == 503
        readings = server.metrics()
        assert readings["heartbeat_age_seconds"] >= 1, "the numbers of a stuck engine can be read"
        assert readings["up"] == 0
        os.kill(engine, signal.SIGCONT)
        assert until(lambda: server.status() == 200, 5)
        assert server.ask(body()).status_code == 200


def test_a_stuck_engine_is_replaced_under_supervision() -> None:
    with Server("--supervise", "--watchdog-timeout", "1.5", "--admin-api-key", "b0ss") as server:

        def logging(**fields: Any) -> dict[str, Any]:
            headers = {"authorization": "Bearer b0ss"}
            reply = httpx.post(f"{server.url}/configure_logging", json=fields, headers=headers, timeout=10)
            told: dict[str, Any] = reply.json()
            return told

        assert logging(log_level="debug", log_requests=True)["success"]
        engine = server.children["engine"]
        os.kill(engine, signal.SIGSTOP)
        assert until(lambda: gone(engine), 10)
        assert until(lambda: server.status("/readyz") == 200, 60), server.log()
        assert server.ask(body()).status_code == 200
        assert "had not moved" in server.log()
        kept = logging()
        assert (kept["log_level"], kept["log_requests"]) == ("debug", True), "as it was changed before"


def test_a_second_sigterm_ends_at_once() -> None:
    with Server() as server:
        client = Client(server, LONG)
        assert until(server.live, 10)
        children = server.children
        os.kill(server.process.pid, signal.SIGTERM)
        time.sleep(0.6)
        assert server.process.poll() is None, "the first one drains"
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(10)
        assert time.monotonic() - began < 6
        assert all(until(lambda pid=pid: gone(pid), 2) for pid in children.values())
        client.join(10)


def test_draining_ends_in_time_and_refuses_newcomers() -> None:
    with Server("--drain-timeout", "2") as server:
        client = Client(server, LONG)
        assert until(server.live, 10)
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert server.status("/readyz") in (0, 503), "not ready from the first moment"
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 12
        client.join(10)
        assert client.status in (503, 200, -1)


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_outlives_a_killed_parent(busy: bool) -> None:
    with Server("--api-workers", "2") as server:
        client = Client(server, LONG) if busy else None
        if busy:
            assert until(server.live, 10)
        children = server.children
        assert set(children) == {"engine", "detokenizer", "entrypoints.http"}
        server.process.kill()
        server.process.wait()
        began = time.monotonic()
        assert all(until(lambda pid=pid: gone(pid), 5) for pid in children.values())
        assert time.monotonic() - began < 5
        if client is not None:
            client.join(10)
