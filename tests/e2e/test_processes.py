"""A served model: its processes, signals and clients that go away."""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ENDLESS, Server
from tests.waiting import gone, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LONG: dict[str, Any] = {
    "text": "Once upon a time",
    "sampling_params": {"temperature": 0, "max_new_tokens": ENDLESS, "ignore_eos": True},
}
SHORT: dict[str, Any] = {**LONG, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}


def settled(server: Server) -> bool:
    return bool(until(lambda: server.live() == 0))


@pytest.mark.long  # the short form has faults/test_clients_misbehave.py
def test_clients_that_go_away_free_their_memory(server: Server) -> None:
    for stream in (True, False):
        with httpx.Client(timeout=60) as client:
            if stream:
                with client.stream("POST", f"{server.url}/generate", json={**LONG, "stream": True}) as answer:
                    lines = answer.iter_lines()
                    next(lines)
                    assert server.live() == 1
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{server.url}/generate", json=LONG, timeout=0.3)
        assert settled(server)
    assert httpx.post(f"{server.url}/generate", json=SHORT, timeout=60).json()["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("name", [pytest.param("engine", marks=pytest.mark.long), "detokenizer"])
def test_a_killed_process_ends_the_server_and_is_named_last(server: Server, name: str) -> None:
    statuses: list[int] = []

    def ask() -> None:
        try:
            statuses.append(httpx.post(f"{server.url}/generate", json=LONG, timeout=60).status_code)
        except httpx.HTTPError:
            statuses.append(0)

    client = threading.Thread(target=ask)
    client.start()
    assert until(server.live)
    children = server.children
    started = time.monotonic()
    os.kill(children[name], signal.SIGKILL)
    client.join(60)
    assert statuses == [503], "the waiting client is told"
    assert server.process.wait(60) != 0
    assert time.monotonic() - started < 30
    assert all(gone(pid, 60) for pid in children.values())
    last = server.rest().strip().splitlines()
    assert any(name in line and "killed" in line for line in last[-4:]), last


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_ends_everything(server: Server, number: signal.Signals) -> None:
    children = server.children
    assert set(children) == {"engine", "detokenizer"}
    os.killpg(server.process.pid, number)
    assert server.process.wait(60) == 0
    assert all(gone(pid, 1) for pid in children.values())
    assert "Traceback" not in server.rest()


def test_sigterm_lets_requests_finish(server: Server) -> None:
    request = {**LONG, "sampling_params": {**LONG["sampling_params"], "max_new_tokens": 400}}
    answers: list[httpx.Response] = []
    client = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/generate", json=request, timeout=60))
    )
    client.start()
    assert until(lambda: server.live() or answers, every_s=0.005)  # or it is over before anybody has looked
    os.kill(server.process.pid, signal.SIGTERM)
    client.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["meta_info"]["completion_tokens"] == 400
    assert server.process.wait(60) == 0


@pytest.mark.long  # the short form has faults/test_processes_die.py
def test_children_end_with_a_killed_parent(server: Server) -> None:
    children = server.children
    server.process.kill()
    server.process.wait()
    assert all(gone(pid, 60) for pid in children.values())


@pytest.mark.long  # the short form has faults/test_processes_die.py
def test_a_stuck_engine_is_found_out_by_its_heartbeat(tiny_settings: dict[str, Any]) -> None:
    server = Server(tiny_settings, "--watchdog-timeout-s", "2")
    try:
        taken: list[float] = []

        def health() -> int:
            began = time.monotonic()
            status = httpx.get(f"{server.url}/health", timeout=60).status_code
            taken.append(time.monotonic() - began)
            return status

        assert until(lambda: health() == 200)
        os.kill(server.children["engine"], signal.SIGSTOP)
        taken.clear()
        assert until(lambda: health() == 503, every_s=0.1)
        assert {health() for _ in range(20)} == {503}
        assert statistics.median(taken) < 1, "health never waits for the engine"
        os.kill(server.children["engine"], signal.SIGCONT)
        assert until(lambda: health() == 200)
    finally:
        server.end()


def test_several_api_workers_share_one_engine(tiny_settings: dict[str, Any]) -> None:
    server = Server(tiny_settings, "--api-workers", "3")
    try:
        children = server.children
        first = _once_open(server).json()["output_ids"]
        for _ in range(12):  # new connections land on different workers
            assert _once_open(server).json()["output_ids"] == first
        _abort_over_other_connections(server)
        os.killpg(server.process.pid, signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert all(gone(pid, 1) for pid in children.values())
    finally:
        server.end()


def _abort_over_other_connections(server: Server) -> None:
    """Whichever worker is told to end a request, and whichever took it."""
    for at in range(8):
        body = {
            "text": "On and on",
            "rid": f"long-{at}",
            "stream": True,
            "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True},
        }
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            answer = httpx.post(f"{server.url}/abort_request", json={"rid": f"long-{at}"}, timeout=60).json()
            assert answer == {"success": True, "aborted": 1}
            last = [line for line in lines if line.startswith("data: {")][-1]
            assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert httpx.post(f"{server.url}/abort_request", json={"rid": "long-0"}, timeout=60).json()["aborted"] == 0


def _once_open(server: Server) -> httpx.Response:
    """A worker that is still opening its door says 503 and asks to come back."""
    give_up = time.monotonic() + 120
    while True:
        answer = httpx.post(f"{server.url}/generate", json=SHORT, timeout=60)
        if answer.status_code != 503 or time.monotonic() > give_up:
            return answer
        time.sleep(0.2)


def test_a_model_that_does_not_exist_is_one_clear_error(tiny_settings: dict[str, Any]) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        Server({**tiny_settings, "model_path": "no/such-model-anywhere"})
    assert "error:" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert time.monotonic() - started < 150
