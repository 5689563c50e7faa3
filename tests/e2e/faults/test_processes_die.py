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
from serving import ENDLESS, LONG, PAGES, Server, body, quickest

from tests.covers import long
from tests.waiting import gone, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


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
    places = (tmp_path / str(number) for number in range(3))
    assert quickest(lambda: _seconds_until_503(next(places)), 2) < 2, "503 within two seconds"


def _seconds_until_503(crashes: Path) -> float:
    """Kills a busy engine. How long /health takes to say so; everything else is checked here."""
    with Server("--crash-dir", str(crashes)) as server:
        secret = "a very private thought"
        client = Client(server, body(secret, tokens=ENDLESS, rid="mine"))
        assert until(server.live, 60)
        assert until(lambda: server.state()["running"], 60)
        children = server.children
        began = time.monotonic()
        os.kill(children["engine"], signal.SIGKILL)
        health = 200
        while health == 200 and time.monotonic() - began < 60:
            health = server.status("/health")
            time.sleep(0.05)
        # It says 503 for a second before it ends: who looks too late finds nobody.
        took_s = time.monotonic() - began if health == 503 else float("inf")
        client.join(60)
        assert client.status == 503
        assert "error" in client.json
        assert server.process.wait(60) == 1
        assert all(gone(pid, 60) for pid in children.values())
        last = server.log().strip().splitlines()[-3:]
        assert last[0].startswith("error: the engine process was killed")
        assert last[1].startswith("  why:")
        assert last[2].startswith("  fix:")
        (bundle,) = crashes.iterdir()
        assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
        text = bundle.read_text()
        told = json.loads(text)
        assert told["process"] == "engine"
        assert told["last_steps"], "what was running is on record"
        assert told["last_steps"][-1]["rows"] == 1
        assert told["settings"]["max_total_tokens"] == str(PAGES)
        assert secret not in text
        assert "api_key" not in told["settings"]
    return took_s


def test_stopped_processes_are_found_by_the_watchdog_and_come_back() -> None:
    with Server("--watchdog-timeout", "1.5", "--api-workers", "2") as server:
        children = server.children

        def status(path: str = "/health") -> int:
            """Of an API worker that answers: a connection may meet the one that is stopped."""
            for _ in range(20):
                try:
                    return httpx.get(server.url + path, timeout=0.5).status_code
                except httpx.HTTPError:
                    continue
            return 0

        def stopped_s(name: str) -> float:
            """How long it takes to be found out."""
            assert until(lambda: status() == 200, 60)
            os.kill(children[name], signal.SIGSTOP)
            began = time.monotonic()
            assert until(lambda: status() == 503, 60)
            took_s = time.monotonic() - began
            assert status("/livez") == 503
            if name == "engine":
                readings = server.metrics()
                assert readings["heartbeat_age_seconds"] >= 1, "the numbers of a stuck engine can be read"
                assert readings["up"] == 0
            os.kill(children[name], signal.SIGCONT)
            assert until(lambda: status() == 200, 60)
            return took_s

        for name in ("engine", "detokenizer", "entrypoints.http"):
            assert quickest(lambda name=name: stopped_s(name), 4) < 4, name  # type: ignore[misc]
            assert server.ask(body()).status_code == 200
        worker = children["entrypoints.http"]
        os.kill(worker, signal.SIGKILL)
        assert until(lambda: server.children.get("entrypoints.http", worker) != worker, 60), "another takes its place"
        assert "it is started again" in server.log()
        assert [server.ask(body()).status_code for _ in range(8)] == [200] * 8, "no connection is refused meanwhile"
        assert server.process.poll() is None


@pytest.mark.long  # the short form has tests/unit/engine_client/test_launch.py
def test_a_second_sigterm_ends_at_once() -> None:
    with Server() as server:
        client = Client(server, LONG)
        assert until(server.live, 60)
        children = server.children
        os.kill(server.process.pid, signal.SIGTERM)
        assert until(lambda: server.status("/readyz") in (0, 503), 60), "it has heard"
        time.sleep(0.6)
        assert server.process.poll() is None, "the first one drains"
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(60)
        assert time.monotonic() - began < 20, "the answer would have taken longer"
        assert all(gone(pid, 60) for pid in children.values())
        client.join(60)


@pytest.mark.long  # the short form has test_nothing_lost.py
def test_draining_ends_in_time_and_refuses_newcomers() -> None:
    with Server("--drain-timeout", "5") as server:
        client = Client(server, LONG)
        assert until(server.live, 60)
        began = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)
        assert until(lambda: server.status("/readyz") in (0, 503), 60)
        assert time.monotonic() - began < 5, "not ready while it drains"
        assert server.process.wait(60) == 0
        assert time.monotonic() - began < 25, "the answer would have taken longer"
        client.join(60)
        assert client.status in (503, 200, -1)


@pytest.mark.parametrize("busy", [long(False), True])
def test_nothing_outlives_a_killed_parent(busy: bool) -> None:
    with Server("--api-workers", "2") as server:
        client = Client(server, LONG) if busy else None
        if busy:
            assert until(server.live, 60)
        children = server.children
        assert set(children) == {"engine", "detokenizer", "entrypoints.http"}
        server.process.kill()
        server.process.wait()
        assert all(gone(pid, 20) for pid in children.values()), "no answer is that quick"
        if client is not None:
            client.join(60)
